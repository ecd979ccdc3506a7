"""Decides whether ranks that are forked after some imports behave as if each had made them itself.

For `--start-method auto`, where rankwise chooses the fork server: `ImportWatch` is made before the
imports, `finish` names the first thing that a fork would do otherwise than an interpreter of its
own. Each check is about something that a fork would share, lose or have seen too early:

- threads: a fork has none of them, and may inherit what they have locked. Native threads of a
  library that has started them in its import (OpenBLAS) are fine: the library handles forks.
- a variable that differs by rank: what was made of it is the same in all forks. Only reads of a
  single name through `os.environ` are seen; `getenv` in C is not.
- descriptors, such as those of a GPU's driver or of a connection: forks would share them.
- handlers of signals: the server gives its forks those of a fresh interpreter (`sys.path`, too,
  which the server compares itself).
- output: it would appear once and not once for each rank.
- processes: they would be the server's, not the rank's.
- modules from the user's own folders: they may do anything.
- a tracer or profiler: it belongs to the process that it was started in.

Only an automatic server loads this module.
"""

import _signal  # type: ignore[import-not-found]  # the core of `signal`, without its enums
import os
import sys

TYPE_CHECKING = False  # the fewer modules, the cheaper the forks
if TYPE_CHECKING:
    from typing import Any

_OUTPUT_SHOWN_MAX = 80
_SITE_DIRECTORIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_OWN_PACKAGE = "rankwise"


class ImportWatch:
    """Watches this process from now on, with its output held back.

    Args:
        variables: names of variables that a rank has and this process has not.
    """

    def __init__(self, variables: "frozenset[str]") -> None:
        self._variables = variables
        self._descriptors = _descriptors()
        self._output = os.memfd_create("output-of-imports")
        self._streams = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in self._streams:
            os.dup2(self._output, number)
        self._modules = frozenset(sys.modules)
        self._environment = dict(os.environ)
        self._read: list[str] = []
        self._classes = [(each, type(each)) for each in (os.environ, os.environb)]
        for environ, kind in self._classes:
            environ.__class__ = self._watching(kind)
        self._handlers = _handlers()
        self._directory = os.getcwd()

    def _watching(self, kind: "Any") -> "Any":
        variables, read = self._variables, self._read

        class Watching(kind):  # type: ignore[misc]  # a class is a value here
            """`os.environ`, and a note of each read of a single variable that is watched."""

            def __getitem__(self, name: "Any") -> "Any":
                known = os.fsdecode(name) if isinstance(name, str | bytes) else ""
                if known in variables:
                    read.append(known)
                return kind.__getitem__(self, name)

        return Watching

    def finish(self) -> str:
        """Stop watching; return why ranks must not be forked from here, or the empty string."""
        for environ, kind in self._classes:
            environ.__class__ = kind
        written = self._take_output()
        for reason in (
            self._reason_of_environment(),
            self._reason_of_threads(),
            self._reason_of_descriptors(),
            self._reason_of_processes(),
            self._reason_of_signals(),
            self._reason_of_modules(),
        ):
            if reason:
                return reason
        if written:
            return f"wrote {written!r} to the console"
        if os.getcwd() != self._directory:
            return "changed the working directory"
        return ""

    @property
    def changes_of_environment(self) -> "dict[str, str | None]":
        """What the imports have made of variables: an interpreter of a rank's own would, too."""
        now, before = dict(os.environ), self._environment
        changes: dict[str, str | None] = dict.fromkeys(before.keys() - now.keys())
        changes.update(now.items() - before.items())
        return changes

    def _take_output(self) -> str:
        """Give the streams back; return the beginning of what was written meanwhile."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for number, original in self._streams:
            os.dup2(original, number)
            os.close(original)
        text = os.pread(self._output, 4 * _OUTPUT_SHOWN_MAX, 0)
        os.close(self._output)
        return text.decode("utf-8", "replace").strip()[:_OUTPUT_SHOWN_MAX]

    def _reason_of_environment(self) -> str:
        if self._read:
            return f"read {self._read[0]}, which differs by rank"
        if names := sorted(self._variables & self.changes_of_environment.keys()):
            return f"set {names[0]}, which differs by rank"
        return ""

    def _reason_of_threads(self) -> str:
        threading = sys.modules.get("threading")
        if threading is None:
            return ""
        main = threading.main_thread()
        others = [thread.name for thread in threading.enumerate() if thread is not main]
        return f"started threads ({', '.join(others)})" if others else ""

    def _reason_of_descriptors(self) -> str:
        held = {self._output, *(original for _, original in self._streams)}
        opened = {number: place for number, place in _descriptors().items() if number not in held}
        for number, place in opened.items():
            if place.startswith(_DEVICES):
                return f"opened {place}"
            if self._descriptors.get(number) != place:
                return f"left a descriptor open ({place})"
        return ""

    def _reason_of_processes(self) -> str:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return ""
        return "started a process"

    def _reason_of_signals(self) -> str:
        faulthandler = sys.modules.get("faulthandler")
        if faulthandler is not None and faulthandler.is_enabled():
            return "enabled faulthandler"
        if sys.gettrace() is not None or sys.getprofile() is not None:
            return "are traced or profiled"
        changed = [
            number
            for number, handler in _handlers().items()
            if handler is not self._handlers[number]
        ]
        return f"set a handler of signal {changed[0]}" if changed else ""

    def _reason_of_modules(self) -> str:
        for name in sys.modules.keys() - self._modules:
            # Not by `getattr`: some packages import what they are asked for.
            file = getattr(sys.modules[name], "__dict__", {}).get("__file__")
            # torch makes modules whose file is no path.
            if not isinstance(file, str) or not os.path.isabs(file):
                continue
            is_known = file.startswith(_STANDARD_LIBRARY) or name.partition(".")[0] == _OWN_PACKAGE
            is_alias = name == "__mp_main__"
            if not is_known and not is_alias and not any(s in file for s in _SITE_DIRECTORIES):
                return f"loaded {name} from {file}, which is not an installed package"
        return ""


def _handlers() -> "dict[int, Any]":
    return {number: _signal.getsignal(number) for number in range(1, _signal.NSIG)}


def _descriptors() -> "dict[int, str]":
    """Return what this process has open, by number."""
    found: dict[int, str] = {}
    for number in os.listdir("/proc/self/fd"):
        try:  # noqa: SIM105 - a fork server imports only what it cannot do without
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            pass  # the one by which they were listed
    return found
