"""The fork server: imports once what the workers will import, then forks a worker per request.

A program, started by the guardian as `python -u forkserver.py CONTROL [MODE] MODULE…`, where
CONTROL is the number of its end of a socket to the agent, or the name of the variable that holds
the number; MODE is `--guessed`, `--automatic=VARIABLE,…` or `--exec`. It speaks the guardian's
frames (`spawn_loop`), and dies with the guardian.

**It imports and never computes.** A process in which other threads run must not be forked. So the
server counts its threads right after the imports. Python threads beyond the main one at that
moment, or more native threads at any later moment, and it refuses to fork, with the reason. It
forks in a thread that has not imported anything (an automatic server: unless there is no other).

**A guess must do no harm.** Users did not ask for `--guessed` modules. One that cannot be imported
is left to the workers. If they have started threads, the server ends before it has read a single
order; if one ends or crashes the process, so be it. Either way the agent sees a server end that was
never ready, and starts one without modules on the same socket, where all orders still are. That
costs the time of the imports, and the job runs as under any other start method.

**`--automatic` changes nothing visible.** Users did not ask for a fork server here. The imports are
watched (`import_watch`; the variables are those that a rank has and this process has not), and if a
fork would differ from an interpreter that makes them itself, the server tells the agent why and
ends. The one that takes its place is started with `--exec`, imports nothing, and makes of each
order what the guardian would: an interpreter for each rank.

**A fork is cheap as long as it writes little**, because each page that it writes to is copied. So
the server imports less than is usual (`threading` alone, which rebuilds itself in every fork,
doubles the cost of an empty one), and a fork frees nothing of what it has inherited.

**A fork is made to look like an interpreter that has just started**: environment, directory,
`sys.path`, `sys.argv`, signals and random numbers. It leaves the loop and the frames of the server
behind by returning, and ends in `bootstrap.run_and_exit`.
"""

import sys

if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 - PYTHON_EXEC may name another than the agent's
        too_old = f"rankwise: the fork server needs Python 3.10 or later, not {sys.executable}"
        has_successor = sys.argv[2:3] and sys.argv[2].startswith(("--guessed", "--automatic"))
        sys.exit(1 if has_successor else too_old)  # another server is started, and tells
    # Run the module, not this file: `__main__` will be the workers', and must not hold the server.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # since Python 3.11
        del sys.path[0]  # this file's directory, which is no place for modules
    sys.path.insert(0, __file__.rsplit("/", 5)[0])
    from rankwise.drivers.real.hosting import forkserver  # noqa: PLW0406 - see above

    del sys.path[0]
    forkserver.main(sys.argv[1], sys.argv[2:])

import _signal  # type: ignore[import-not-found]  # the core of `signal`, without its enums
import _socket
import _thread
import gc
import os
import resource

from rankwise.drivers.real.hosting.ending_signals import ENDING_SIGNALS
from rankwise.drivers.real.hosting.spawn_loop import SpawnLoop, SpawnRefused
from rankwise.drivers.real.hosting.wire import encode
from rankwise.drivers.real.worker import bootstrap

TYPE_CHECKING = False  # the fewer modules, the cheaper the forks
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_ALWAYS_NEEDED = ("atexit", "rankwise.drivers.real.worker.function")
"""What every fork would import at the latest when it ends, and what most import at once."""
_LARGE_STACK_BYTES = 256 << 20
"""For programs of users whose stacks have no limit: memory is taken as it is used."""
PATH_VARIABLE = "RANKWISE_SYS_PATH"
"""What `sys.path` is during the imports, joined with colons; forks do not keep it."""


class ForkServerProgram:
    """Imports modules, and forks workers from there."""

    def __init__(
        self, control: _socket.socket, preload: list[str], *, is_guess: bool, watched: "str | None"
    ) -> None:
        self._preload = preload
        self._changes: dict[str, str | None] = {}
        """What the imports have made of variables, where forks are to have it as well."""
        # Libraries keep their idle threads together with the thread for which these have worked: a
        # copy of that one would wait for them for ever. So another thread forks.
        self.serving_threads = 1
        """0 if the main thread forks: then a rank's main thread is the one that has imported."""
        self.show_command_line: Callable[[list[str]], None] | None = None
        """Where forks stand for interpreters: lets `ps` show the command line of one."""
        outlive_signals()
        watch: Any = None
        if watched is not None:
            # Now, for the forks; and before the watch, which is to see what is imported later.
            from rankwise.drivers.real.hosting import command_line, import_watch  # noqa: PLC0415

            self.show_command_line = command_line.show_command_line
            watch = import_watch.ImportWatch(frozenset(watched.split(",")))
        failed = import_modules(preload, lambda name: _tell_import(control, name))
        _Importing.is_under_way = False
        if watch is not None:
            told = [f"cannot be made: {error}" for error in failed.values()]
            told += ["changed sys.path"] if _Importing.has_changed_path else []
            _leave_to_others(control, watch.finish() or "".join(told[:1]))
            self._changes = watch.changes_of_environment
            self.serving_threads = 0 if _ends_other_threads() else 1
        self._environment = dict(os.environ)
        gc.collect()
        gc.freeze()  # in a fork, the collector would write to all pages of these objects
        self._python_threads = other_threads()
        if self._python_threads and is_guess:
            os._exit(0)  # and not otherwise, since the threads may never end
        self._native_threads = native_thread_count()
        self._loop = SpawnLoop(
            control,
            become=self._begin_worker,
            admit=self.check_threads,
            orders={"environment": self._take_environment},
        )
        details = {"failed": failed, "threads": self._python_threads}
        self._loop.tell(("ready", os.getpid(), details))

    def run(self) -> "dict[str, Any] | None":
        """Serve until the agent ends; in a fork, return the worker's order."""
        return self._loop.run()

    def check_threads(self) -> None:
        """Raise `SpawnRefused` if a fork could hang; called in a thread that is not counted."""
        # A lock that another thread holds stays locked in the fork for ever.
        threads = self._python_threads or other_threads(uncounted=self.serving_threads)
        if threads:
            raise SpawnRefused(
                f"the fork server cannot fork while other threads run in it "
                f"({', '.join(threads)}); what it imported has started them "
                f"({self._imported}): preload less, or use another start method"
            )
        # A pool that a library has started while it was imported (OpenBLAS does) knows how to fork;
        # one that has been put to work (OpenMP, autograd) leaves a child that hangs.
        count = native_thread_count() - self.serving_threads
        if count > self._native_threads:
            raise SpawnRefused(
                f"the fork server cannot fork any more: {count} threads run in it, but "
                f"{self._native_threads} did right after its imports ({self._imported}); something "
                "in it computes, and its forks could hang: preload less, or use another start "
                "method"
            )

    @property
    def _imported(self) -> str:
        return f"preloaded: {', '.join(self._preload)}" if self._preload else "nothing preloaded"

    def _take_environment(self, environment: dict[str, str]) -> None:
        """Take on what the next workers have in common."""
        # Here once, and not in each fork, which would copy the pages that it writes to.
        for name, value in self._changes.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        replace_environment(self._environment, environment)
        self._environment = environment

    def _begin_worker(self, order: "dict[str, Any]") -> None:
        self._loop.leave()
        # As an interpreter sets them up at its start; all other signals are at their defaults.
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
        _signal.signal(_signal.SIGXFSZ, _signal.SIG_IGN)
        for name, value in order["env"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for name, fd in order["descriptors"].items():
            if name not in bootstrap.OWN_DESCRIPTORS:
                os.set_inheritable(fd, True)  # noqa: FBT003 - the standard library's signature
                os.environ[name] = str(fd)
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_random.seed()  # the standard library does the same to its own after a fork
        # Imported by each rank for itself, torch has a seed of each rank's own.
        torch_generator = getattr(sys.modules.get("torch"), "default_generator", None)
        if torch_generator is not None:
            torch_generator.seed()
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None:
            processes.current_process().authkey = os.urandom(32)


class _Importing:
    """Whether modules are imported now. Forks of the server take place afterwards."""

    is_under_way = True
    has_changed_path = False
    mask: "set[int] | None" = None
    """The signals that were blocked before one of them began to fork."""


def outlive_signals() -> None:
    """Let no signal that is ignored end the imports, and have what they start ignore none.

    The guardian, from which this comes, ignores what is sent to all processes of a job. A process
    that a module starts would inherit that, and could not be terminated. So the signals are caught
    here, which an exec undoes, and a fork too. The loop ignores them again.
    """
    for number in ENDING_SIGNALS:
        # Python ignores these itself, and `subprocess` knows that.
        is_own = number in {_signal.SIGPIPE, _signal.SIGXFSZ}
        if not is_own and _signal.getsignal(number) == _signal.SIG_IGN:
            _signal.signal(number, _go_on)
            _signal.siginterrupt(number, False)  # noqa: FBT003 - the standard library's signature
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_take_signals, after_in_child=_let_signals_end
    )


def _go_on(_signum: int, _frame: object) -> None:
    """Do nothing."""


def _hold_signals() -> None:
    """Let signals wait until a fork that an imported module makes does with them what it should."""
    if _Importing.is_under_way:
        _Importing.mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, ENDING_SIGNALS)


def _take_signals() -> None:
    if _Importing.mask is not None:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, _Importing.mask)
        _Importing.mask = None


def _let_signals_end() -> None:
    """In such a fork, let signals do what they do by default."""
    if _Importing.mask is not None:
        for number in ENDING_SIGNALS:
            if _signal.getsignal(number) is _go_on:
                _signal.signal(number, _signal.SIG_DFL)
        _take_signals()


def _tell_import(control: _socket.socket, name: str) -> None:
    """Tell the agent what is imported now: that may take long, or for ever."""
    try:  # noqa: SIM105 - a fork server imports only what it cannot do without
        control.send(encode(("importing", name)), _socket.MSG_NOSIGNAL | _socket.MSG_DONTWAIT)
    except OSError:
        pass  # it has ended, which the loop will notice


def _leave_to_others(control: _socket.socket, reason: str) -> None:
    """If there is a reason, tell it and end: the agent starts another server."""
    if not reason:
        return
    try:  # noqa: SIM105 - a fork server imports only what it cannot do without
        control.send(encode(("unfit", reason)), _socket.MSG_NOSIGNAL)
    except OSError:
        pass  # the agent has ended
    if os.getpgrp() == os.getpid():  # with what the imports have started
        os.killpg(0, _signal.SIGKILL)
    os._exit(0)  # and not otherwise, since threads may never end


def _ends_other_threads() -> bool:
    """Whether a fork leaves this process with one thread: then any thread may fork.

    OpenBLAS ends its threads before each fork. Those of OpenMP stay, and a copy of the thread for
    which they have worked would wait for them.
    """
    if native_thread_count() > 1:
        import warnings  # noqa: PLC0415 - only then

        with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return native_thread_count() == 1


def import_modules(names: list[str], tell: "Callable[[str], None]") -> dict[str, str]:
    """Import each module; return the error of each that cannot be imported.

    `tell` is called with the name of each before.
    `sys.path` is the workers' again afterwards.
    """
    workers_path = imports_path = sys.path[:]
    path = os.environ.pop(PATH_VARIABLE, None)
    if path is not None:
        sys.path[:] = imports_path = path.split(os.pathsep)
    bootstrap.watch_torch()
    failed: dict[str, str] = {}
    for name in (*names, *_ALWAYS_NEEDED):
        try:
            if name in names:
                tell(name)
            __import__(name)
        except BaseException as error:  # noqa: BLE001 - a module may do anything, and exit
            failed[name] = f"{type(error).__name__}: {error}"
    # Looking for what does not exist lists every directory once, here and not in every fork.
    for finder in sys.meta_path:
        finder.find_spec("rankwise-nothing", None)
    _Importing.has_changed_path = sys.path != imports_path
    sys.path[:] = workers_path
    return failed


def other_threads(uncounted: int = 0) -> list[str]:
    """Return the names of all Python threads but the main one.

    Without `threading` they have none, and so many are not counted.
    """
    threading = sys.modules.get("threading")
    if threading is None:
        count = _thread._count() - uncounted  # noqa: SLF001 - no public module counts them
        return ["unnamed"] * count
    main = threading.main_thread()
    return [thread.name for thread in threading.enumerate() if thread is not main]


def native_thread_count() -> int:
    """Return how many threads the kernel sees in this process."""
    # A directory has two links and one for each directory in it; counting them is the cheapest.
    return os.stat("/proc/self/task").st_nlink - 2


def replace_environment(known: dict[str, str], wanted: dict[str, str]) -> None:
    """Make this process's environment, which is known, another, touching only what differs."""
    for name in known.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items() - known.items():
        os.environ[name] = value


def main(control: str, preload: list[str]) -> None:
    """Import, and serve. Does not return."""
    fd = int(control) if control.isdecimal() else int(os.environ.pop(control))
    os.set_inheritable(fd, False)  # noqa: FBT003 - the standard library's signature
    control_socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, fd)
    mode, _, watched = (
        preload.pop(0).partition("=") if preload[:1] and preload[0][:2] == "--" else ("", "", "")
    )
    if mode == "--exec":
        from rankwise.drivers.real.hosting.guardian import CommandRunner  # noqa: PLC0415 - only then

        CommandRunner(control_socket).run()
        os._exit(0)
    server = ForkServerProgram(
        control_socket,
        preload,
        is_guess=mode == "--guessed",
        watched=watched if mode == "--automatic" else None,
    )
    if not server.serving_threads:
        _serve(server)
    if resource.getrlimit(resource.RLIMIT_STACK)[0] == resource.RLIM_INFINITY:
        _thread.stack_size(_LARGE_STACK_BYTES)  # the C library would take 2 MiB
    _thread.start_new_thread(_serve, (server,))
    end = _thread.allocate_lock()
    while end.acquire():
        """The process ends in the other thread."""


def _serve(server: ForkServerProgram) -> None:
    """Serve; in a fork, be the worker. Ends the process."""
    _thread.stack_size(0)  # the default for the program's own threads
    if sys.version_info >= (3, 12):  # which warns of forks beside threads
        import warnings  # noqa: PLC0415 - not for others

        with warnings.catch_warnings():  # left by forks only, which are to warn as usual
            warnings.simplefilter("ignore", DeprecationWarning)
            order = server.run()
    else:
        order = server.run()
    if order is None:
        os._exit(0)
    if server.show_command_line is not None:
        server.show_command_line(order["argv"])
    program = order["program"]
    arguments = {"script": program[1:2], "module": ("-m", *program[1:2])}.get(program[0], ())
    sys.orig_argv[:] = [sys.executable, "-u", *arguments, *(program[2] if program[2:] else ())]
    bootstrap.run_and_exit(program, order["descriptors"])
