"""The guardian: parent of all workers of a node, which leaves no process behind.

A program, started by the agent as `python -I -S guardian.py CONTROL_FD`, where the descriptor is
its end of a socket pair. It makes workers on order (`spawn_loop`), kills what they leave behind
(`descendants`), and outlives the agent by just as long as it takes to kill everything.

It runs without `site` and imports next to nothing, so that it is ready a few milliseconds after
it has been started, and so that nothing that a user installs can break it.
"""

import _socket
import os
import resource
import stat
import sys

if __name__ == "__main__":  # as a file, which knows where its package lies but cannot import it
    sys.path.append(os.path.abspath(__file__).rsplit("/", 5)[0])

from rankwise.drivers.real.hosting import prctl
from rankwise.drivers.real.hosting.descendants import kill_descendants, left_descendants
from rankwise.drivers.real.hosting.spawn_loop import SpawnLoop, SpawnRefused

TYPE_CHECKING = False  # `typing` would cost a third of the guardian's start-up
if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.drivers.real.hosting.spawn_loop import Order
    from rankwise.drivers.real.hosting.wire import Message

_KILLED_MAX, _WORDS_MAX = 1_000, 200
"""How many of those that a sweep has killed are told of, and how much of their command lines."""
SWEEP_PATIENCE_NS = 5_000_000_000
"""How long a sweep tries to kill what does not die; only the kernel can keep a process so long."""
_FILES_NEEDED = 8
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


class CommandRunner:
    """Makes workers of command lines, and nothing else: for a fork server that must not fork."""

    def __init__(self, control: "_socket.socket") -> None:
        self._maker = _WorkerMaker()
        self._loop = SpawnLoop(
            control,
            become=self._maker.begin_worker,
            orders={"environment": self._maker.take_environment},
        )

    def run(self) -> None:
        """Serve until the agent ends."""
        self._loop.tell(("ready", os.getpid(), {}))
        self._loop.run()


class _WorkerMaker:
    """Becomes what an order says, in an environment that most workers share."""

    def __init__(self) -> None:
        self._environment: dict[str, str] = {}

    def take_environment(self, environment: dict[str, str]) -> None:
        """Take on what the next workers have in common."""
        self._environment = environment

    def begin_worker(self, order: "Order") -> None:
        """Replace this process by the order's program."""
        environment = self._environment
        for name, value in order["env"].items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        for name, fd in order["descriptors"].items():
            os.set_inheritable(fd, True)  # noqa: FBT003 - the standard library's signature
            environment[name] = str(fd)
        execute(order["argv"], environment)


class GuardianProgram:
    """Makes and guards the workers of one agent."""

    def __init__(self, control: "_socket.socket") -> None:
        maker = _WorkerMaker()
        self._guarded: list[str] = []
        self._released: set[int] = set()
        """Processes that live on, and the sessions of theirs, which have no other member."""
        self._loop = SpawnLoop(
            control,
            become=maker.begin_worker,
            on_alarm=self._kill_workers,
            orders={
                "environment": maker.take_environment,
                "sweep": self._sweep,
                "guard": self._guard,
                "fence": self._fence,
            },
        )

    def run(self) -> None:
        """Serve until the agent ends; then kill all workers and remove what was guarded."""
        self._loop.tell(("ready", os.getpid(), {}))
        self._loop.run()
        kill_descendants(SWEEP_PATIENCE_NS, spared_trees=self._released)
        _reap_all()
        for path in self._guarded:
            remove_tree(path)

    def _sweep(
        self, token: object, spared_trees: "Sequence[int]" = (), manner: str = "kill"
    ) -> "Message":
        """Let nothing be left of the workers; `manner` says what of their children may be.

        `kill`: nothing. `tell`: nothing, and it is told what was; helpers of libraries may end by
        themselves. `keep`: all, for good.
        """
        left: dict[int, str] = {}
        survivors: list[int] = []
        if manner == "keep":
            left, released = left_descendants(
                spared=self._fork_servers,
                spared_trees=self._released,
                awaited=self._loop.workers.values(),
            )
            self._released |= released
        else:
            survivors = self._kill_workers(spared_trees, left, awaits_helpers=manner == "tell")
        told = {} if manner == "kill" else left
        shown = [(pid, words[:_WORDS_MAX]) for pid, words in sorted(told.items())]
        return ("swept", token, survivors, shown[:_KILLED_MAX])

    @property
    def _fork_servers(self) -> list[int]:
        return [self._loop.workers[worker] for worker in self._loop.kept]

    def _kill_workers(
        self,
        spared_trees: "Sequence[int]" = (),
        killed: "dict[int, str] | None" = None,
        *,
        awaits_helpers: bool = False,
    ) -> list[int]:
        """Kill all descendants that are not kept; return those that could not be killed."""
        return kill_descendants(
            SWEEP_PATIENCE_NS,
            spared=self._fork_servers,
            spared_trees={*spared_trees, *self._released},
            awaited=self._loop.workers.values(),
            killed=killed,
            awaits_helpers=awaits_helpers,
        )

    def _fence(self, instant_ns: int | None) -> None:
        self._loop.alarm_at = instant_ns

    def _guard(self, paths: list[str]) -> None:
        self._guarded = paths


def _reap_all() -> None:
    """Reap the dead, in case that the init process of a container does not."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def execute(argv: list[str], environment: dict[str, str]) -> None:
    """Replace this process by a program; raise `SpawnRefused` if it cannot be."""
    program = argv[0]
    if "/" in program:
        candidates = [program]
    else:
        directories = environment.get("PATH", _DEFAULT_PATH).split(":")
        candidates = [f"{directory or '.'}/{program}" for directory in directories]
    refusal = None
    for candidate in candidates:
        try:
            os.execve(candidate, argv, environment)  # noqa: S606 - no shell is what we want
        except (FileNotFoundError, NotADirectoryError) as error:
            if os.path.lexists(candidate):
                refusal = refusal or _refusal(candidate, error)
        except PermissionError as error:
            refusal = refusal or _refusal(candidate, error)
        except OSError as error:
            raise SpawnRefused(_refusal(candidate, error)) from None
        except ValueError as error:
            raise SpawnRefused(f"cannot start {program!r}: {error}") from None
    if refusal is None:
        place = "" if "/" in program else f" in PATH ({environment.get('PATH', _DEFAULT_PATH)})"
        refusal = f"no such file{place}: {program!r}"
    raise SpawnRefused(refusal)


def _refusal(path: str, error: OSError) -> str:
    """Say in one sentence why an existing file cannot be executed."""
    if isinstance(error, FileNotFoundError):
        return f"cannot start {path!r}: {_missing_interpreter(path)}"
    if isinstance(error, PermissionError):
        if os.path.isdir(path):
            return f"cannot start {path!r}: it is a directory"
        if not os.access(path, os.X_OK):
            return f"cannot start {path!r}: it has no run bit (try: chmod +x {path})"
        return f"cannot start {path!r}: permission denied"
    if error.errno == 7:  # E2BIG; `errno` is not worth its import
        return (
            f"cannot start {path!r}: its arguments and environment together, or one of them, are "
            "longer than the kernel allows"
        )
    if error.errno == 8:  # ENOEXEC
        return f"cannot start {path!r}: it is neither a binary nor a script that begins with #!"
    return f"cannot start {path!r}: {error.strerror}"


def _missing_interpreter(path: str) -> str:
    """Name what is missing when the kernel finds no file although the program exists."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return "it is a link to a file that does not exist"
    try:
        first_line = os.read(fd, 256).partition(b"\n")[0]
    finally:
        os.close(fd)
    if not first_line.startswith(b"#!"):
        return "the loader that this binary asks for does not exist"
    interpreter = first_line[2:].strip().decode(errors="replace")
    ending = " (the line ends in a carriage return)" if first_line.endswith(b"\r") else ""
    return f"its interpreter does not exist: {interpreter!r}{ending}"


def remove_tree(path: str) -> None:
    """Remove a directory with everything in it, or a file; what cannot be removed is left."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        for entry in os.listdir(path):
            remove_tree(f"{path}/{entry}")
        os.rmdir(path)
    except OSError:
        pass  # the agent is gone, and the rest is still worth removing


def main() -> None:
    """Run as the guardian of the process at the other end of the control socket."""
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # Workers get back what their order says.
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
        # Descriptors for workers are moved to 0, 1 and 2, so they must not be received there.
        while (spare := os.open("/dev/null", os.O_RDWR)) <= 2:
            pass
        os.close(spare)
        control = int(sys.argv[1])
        os.set_inheritable(control, False)  # noqa: FBT003 - the standard library's signature
        prctl.adopt_orphans()
        # If it is stopped, it must not keep workers alive that no agent looks after any more.
        prctl.continue_with_parent_s_end()
        guardian = GuardianProgram(_socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, control))
        # A sweep that cannot look around would leave all of them alive: better no guardian.
        for fd in [os.open("/dev/null", os.O_RDONLY) for _ in range(_FILES_NEEDED)]:
            os.close(fd)
    except OSError as error:
        sys.exit(f"rankwise: the guardian cannot start: {error.strerror} (at most {files_max})")
    guardian.run()
    os._exit(0)  # all is released; an interpreter would take its modules apart, which takes time


if __name__ == "__main__":
    main()
