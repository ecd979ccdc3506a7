"""Runs a worker's program as Python itself would, and reports how it goes wrong.

Two ways lead here: an interpreter of the worker's own, which was given `boot.py` or this file when
it was compiled, and the fork server, in a fork. All make `__main__` as new, put `sys.argv` and
`sys.path` in order and run the program in it. The program must not be able to tell. In particular
no frame of ours shows in a traceback: this code stands at the bottom of the stack, so its frames
are the first of a traceback and are dropped before it is shown.

**Reports.** The worker has a report pipe. faulthandler writes stacks into it, on a fatal signal and
on `STACKS_SIGNAL`. An uncaught exception is written as a record, and as torch's error file when one
is asked for, *before* `sys.excepthook` is called, and not by means of it: programs that replace the
hook are covered as well, and their hooks still work.

Without a report pipe the program runs all the same, without reports.

**The end.** An interpreter ends with full garbage collections, and most of what these look at was
there before the program: a tenth of what it takes to run an empty one. So that is set aside, which
is safe as long as nothing is in it whose destruction matters, see `_set_startup_aside`.

This file runs in whatever interpreter the user chose, from Python 3.9 on, and before every
program: it imports what is in memory anyway, and what a failure needs only when there is one.
"""

import _frozen_importlib_external as _files
import _signal  # type: ignore[import-not-found]  # the core of `signal`, without its enums
import _thread
import builtins
import faulthandler
import gc
import marshal
import os
import sys
import time
from _frozen_importlib import BuiltinImporter

TYPE_CHECKING = False  # `typing` would cost more than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType, TracebackType
    from typing import Any, NoReturn

    Program = tuple[Any, ...]

STACKS_SIGNAL: int = _signal.SIGRTMIN + 6
"""Makes a worker that has said it is ready print the stacks of all its threads."""
REPORT_VARIABLE = "RANKWISE_REPORT_FD"
RESULT_VARIABLE = "RANKWISE_RESULT_FD"
PAYLOAD_VARIABLE = "RANKWISE_PAYLOAD_FD"
OWN_DESCRIPTORS = (REPORT_VARIABLE, RESULT_VARIABLE, PAYLOAD_VARIABLE)
"""Names of descriptors that are for this code: the program does not find them, nor do its children
inherit them."""
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"

_C10D = "torch.distributed.distributed_c10d"
_CALL_RING = "rankwise.drivers.real.worker.call_ring"
_RECORD_START = "\x1e"
_MESSAGE_CHARACTERS_MAX = 64 << 10
_TRACEBACK_CHARACTERS_MAX = 1 << 20
_OUTPUT_LOST = 120
"""The exit code of an interpreter that could not write at its end what was printed before."""
_NEVER_S = 1e6
_HARMLESS_AT_START = ("__main__", "_distutils_hack")
"""The second one is what setuptools loads in every environment: it holds nothing."""
_OF_EVERY_MODULE = {
    "__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__", "__package__",
    "__spec__",
}  # fmt: skip
_HERE = os.path.dirname(os.path.abspath(__file__)).removesuffix("/__pycache__")
_OUR_DIRECTORY = os.path.dirname(_HERE)
_PACKAGE = os.path.dirname(os.path.dirname(_OUR_DIRECTORY))
_OUR_PACKAGE = os.path.join(_PACKAGE, "")
_SUBSTITUTING = ("descriptors", "first_import", "process_patches", "rank_time", "signal_calls")
_CARRYING_OUT = tuple(
    os.path.join(_PACKAGE, folder, "") for folder in ("collectives", "sim", "simranks")
)
"""Where collectives are carried out, those of simulated ranks too."""
_ENTERING = (
    os.path.join(_OUR_DIRECTORY, "worker", "torch_calls.py"),
    os.path.join(_PACKAGE, "simranks", "run", "output.py"),
    os.path.join(_PACKAGE, "simranks", "torch", "torch_events.py"),
    *(os.path.join(_PACKAGE, "simranks", "world", f"{name}.py") for name in _SUBSTITUTING),
)
_SOON_NS = 2_000_000_000
_LIBRARIES = (os.path.join(os.path.dirname(os.__file__), ""), _OUR_PACKAGE, "<frozen ")
"""Where no line of a program is, nor in any folder `site-packages`."""
_OUR_FILES = (
    (lambda: None).__code__.co_filename,  # where this file was compiled, perhaps elsewhere
    os.path.join(_PACKAGE, "collectives", "recorded_program.py"),
    *(
        os.path.join(_OUR_DIRECTORY, *parts)
        for parts in (
            ("worker", "boot.py"),
            ("worker", "bootstrap.py"),
            ("worker", "function.py"),
            ("hosting", "forkserver.py"),
        )
    ),
)


class Reporter:
    """A worker's end of its report pipe."""

    def __init__(self, report_fd: "int | None") -> None:
        """Report to this descriptor; None: nowhere."""
        self._fd = report_fd
        self._pid = os.getpid()
        self._reported: BaseException | None = None
        self._lock = _thread.allocate_lock()
        self._recorded: Callable[[], str] | None = None

    def announce(self) -> None:
        """Send stacks to the report pipe from now on; say so, and who we are."""
        if self._fd is None:
            return
        # A program that asked Python for stacks on stderr did so before us, and gets them there.
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self._fd, all_threads=True)
        # This comes back when the interpreter ends and lets go of the signal; by default it would
        # kill a rank that is done, and about which others ask just then.
        _signal.signal(STACKS_SIGNAL, _signal.SIG_IGN)
        faulthandler.register(STACKS_SIGNAL, file=self._fd, all_threads=True, chain=False)
        if sys.unraisablehook is sys.__unraisablehook__:
            sys.unraisablehook = _hook_for_lost_interrupts()
        self._write(f'{{"kind": "ready", "pid": {self._pid}}}')

    def tell_calls_begin(self) -> None:
        """Say that this rank enters its calls in its call record from now on."""
        if self._fd is not None and os.getpid() == self._pid:
            self._write('{"kind": "calls"}')

    def tell_ledger_lacks(self, what: str) -> None:
        """Say why the ledger has none of this rank's calls of torch.distributed, or not all."""
        if self._fd is not None and os.getpid() == self._pid:
            self._write(f'{{"kind": "no-ledger", "why": {quoted(what)}}}')

    def answer_for_recorder(self, recorded: "Callable[[], str]") -> None:
        """From now on send what that returns whenever the agent asks, in a thread that else sleeps.

        It is no thread of `threading`, so that the program finds none that it has not begun.
        """
        if self._fd is None or os.getpid() != self._pid or self._recorded is not None:
            return
        self._recorded = recorded
        _thread.start_new_thread(self._answer, (self._fd, recorded))

    def _answer(self, fd: int, recorded: "Callable[[], str]") -> None:
        # This thread is sent STACKS_SIGNAL from now on: no call of the program ends early by it.
        self._write(f'{{"kind": "recorder", "thread": {_thread.get_native_id()}}}')
        try:
            # Of those that have queued while the program held the interpreter, the last one counts.
            while questions := os.read(fd, 4096):
                self._tell_recorded(questions[-1], recorded)
        except OSError:
            pass  # such a descriptor is never asked on

    def _tell_recorded(self, ask: int, recorded: "Callable[[], str]") -> None:
        try:
            groups = recorded()
        except Exception:  # noqa: BLE001 - a torch whose recorder we do not know
            groups = "[]"
        if ask >= 0 or groups != "[]":
            self._write(f'{{"kind": "recorded", "ask": {ask}, "groups": {groups}}}')

    def tell_last_recorded(self) -> None:
        """Send, unasked, what the recorder has: later this process may be unable to answer."""
        if self._recorded is not None and os.getpid() == self._pid:
            self._tell_recorded(-1, self._recorded)

    def tell_exiting(self, ending: SystemExit) -> None:
        """Say that the program ends with this code, before its peers can see connections close.

        Between that and the end of the process torch's threads are ended, which may take seconds.
        """
        if self._fd is not None and os.getpid() == self._pid:
            code, place = _code_of(ending), quoted(_place_of_exit(ending))
            at, _ = _time_of(ending)
            self._write(f'{{"kind": "exiting", "code": {code}, "at": {at}, "place": {place}}}')

    def report(self, error: BaseException) -> None:
        """Report an uncaught exception; the same one only once.

        Its traceback loses our frames. A process that the program has forked has nothing to
        report: it is not the worker.
        """
        if error is self._reported or os.getpid() != self._pid:
            return
        self._reported = error
        raised_at, wall_ns = _time_of(error)
        error.__traceback__ = without_our_frames(error.__traceback__)
        _end_at_the_call(error)
        _leave_out_entering(error)
        tensors = ""
        if type(error).__name__ == "OutOfMemoryError":
            try:
                tensors = _worker_module("gpu_tensors").note_on_memory(error)
            except Exception as problem:  # noqa: BLE001 - a torch that we do not know: the error counts
                if hasattr(error, "add_note"):
                    error.add_note(f"rankwise cannot tell what holds the memory: {problem!r}")
        message = _cut(_text_of(error), _MESSAGE_CHARACTERS_MAX)
        traceback = _cut(_format(error), _TRACEBACK_CHARACTERS_MAX)
        if self._fd is not None:
            self.tell_last_recorded()
            self._write(
                f'{{"kind": "error", "type": {quoted(_name_of(type(error)))}, '
                f'"message": {quoted(message)}, "traceback": {quoted(traceback)}, '
                f'"raised_at": {raised_at}, "wall_ns": {wall_ns}, "tensors": {quoted(tensors)}}}'
            )
        error_file = os.environ.get(ERROR_FILE_VARIABLE)
        if error_file and isinstance(error, Exception):
            summary = quoted(f"{type(error).__name__}: {message}")
            _write_error_file(error_file, error, summary, quoted(traceback), wall_ns)

    def _write(self, record: str) -> None:
        rest = f"{_RECORD_START}{record}\n".encode("ascii")
        try:
            with self._lock:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]  # type: ignore[arg-type]  # asked before
        except OSError:
            pass  # the agent has died, and its guardian is about to end this worker as well


def _hook_for_lost_interrupts() -> "Callable[[Any], None]":
    """Return a hook by which this thread, the main one, loses no Ctrl-C where Python drops it.

    That is in callbacks of weak references, of which each import makes one, and in `__del__`. A
    rank that was interrupted there went on until its grace was over.
    """
    # At the interpreter's end no name of this module has a value any more.
    tell, interrupt, signals, threads = sys.__unraisablehook__, KeyboardInterrupt, _signal, _thread
    is_over, main = sys.is_finalizing, threads.get_ident()

    def send_again() -> None:
        never = threads.allocate_lock()
        never.acquire()
        never.acquire(timeout=0.01)  # the callback returns meanwhile; if not, it is lost once more
        signals.pthread_kill(main, signals.SIGINT)

    def unraisablehook(lost: "Any") -> None:
        is_ours = lost.exc_type is interrupt and threads.get_ident() == main and not is_over()
        if is_ours and signals.getsignal(signals.SIGINT) is signals.default_int_handler:
            threads.start_new_thread(send_again, ())
        else:
            tell(lost)

    return unraisablehook


def run_as_started() -> None:
    """Run the program that the command line names; raises whatever the program raises."""
    boot_file, *arguments = sys.argv
    if arguments[0] == "-m":
        program: Program = ("module", arguments[1], arguments[2:])
    elif arguments[0] == "-f":
        program = ("function",)
    else:
        program = ("script", arguments[0], arguments[1:])
    started_as = getattr(sys, "orig_argv", None)  # since Python 3.10
    if started_as is not None:
        started_as.remove(boot_file)
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        del sys.path[0]
    if program[0] == "function":
        # As a fork does: libraries that are torn down while their peers vanish crash now and then,
        # torch among them, and what the function returned has been sent long ago.
        run_and_exit(program, take_descriptors())
    set_aside = _set_startup_aside()
    try:
        run(program, take_descriptors())
    finally:
        if any(_has_changed(names, before) for names, before in set_aside):
            gc.unfreeze()
        if "torch.distributed.distributed_c10d" in sys.modules:
            _yield_to_threads_of_torch()


def _set_startup_aside() -> "list[tuple[dict[str, Any], list[Any]]]":
    """Take what is in memory out of garbage collection; return what must stay so, and how it is.

    An object that is set aside is not taken apart at the interpreter's end if it is part of a
    cycle, such as a module with functions. A file that is open there would lose its last lines. So
    nothing is set aside beside modules that are not Python's own (`sitecustomize`, say, may keep a
    log) unless they are empty, as Debian's is, and all of it comes back if the program has given a
    name in one of them another value.
    """
    known: frozenset[str] = getattr(sys, "stdlib_module_names", frozenset())  # since 3.10
    if not hasattr(gc, "freeze") or any(
        name.partition(".")[0] not in known
        and name not in _HARMLESS_AT_START
        and not getattr(module, "__dict__", {name: module}).keys() <= _OF_EVERY_MODULE
        for name, module in sys.modules.items()
    ):
        return []
    set_aside = [
        (vars(module), list(vars(module).values()))
        for name, module in sys.modules.items()
        if name not in ("sys", "builtins")  # which are emptied in any case
    ]
    gc.freeze()
    return set_aside


def _has_changed(names: "dict[str, Any]", before: "list[Any]") -> bool:
    """Whether a name has another value, also one that says that it is equal."""
    if len(names) != len(before):
        return True
    return any(now is not then for now, then in zip(names.values(), before))  # noqa: B905 - Python 3.9


def run(
    program: "Program",
    descriptors: "Mapping[str, int]",
    reporter: "Reporter | None" = None,
) -> None:
    """Run a program as `__main__`; raises whatever it raises, which has been reported.

    `sys.path` must not begin with a directory of ours. Call it as the last thing.

    Args:
        program: what to run.
        descriptors: by name, those of `OWN_DESCRIPTORS` that there are; not inheritable.
        reporter: what to report to, if not to the report pipe among the descriptors.
    """
    reporter = reporter or Reporter(descriptors.get(REPORT_VARIABLE))
    _call_finder.reporter = reporter
    if _call_finder.why_off:
        reporter.tell_ledger_lacks(_call_finder.why_off)
    watch_torch()
    if _CALL_RING in sys.modules:  # in a fork of a server that has imported torch
        sys.modules[_CALL_RING].ring_of_process()
    try:
        if program[0] == "script":
            _run_script(reporter, program[1], program[2], descriptors.get(PAYLOAD_VARIABLE))
        elif program[0] == "module":
            _run_module(reporter, program[1], program[2])
        else:
            _renew_main()
            reporter.announce()
            _function().call_payload(
                descriptors.get(PAYLOAD_VARIABLE), descriptors.get(RESULT_VARIABLE), reporter.report
            )
    except SystemExit as ending:
        if _code_of(ending) == 0:
            _enter_end_of_calls()
        else:
            reporter.tell_exiting(ending)
        raise
    except BaseException as error:
        reporter.report(error)
        sys.excepthook = _hook_without_our_frames(getattr(sys, "excepthook", _missing_hook))
        raise
    _enter_end_of_calls()


def watch_torch() -> None:
    """Have calls of torch.distributed recorded, once a program imports that.

    Nothing is loaded before.
    """
    if _call_finder not in sys.meta_path and _C10D not in sys.modules:
        sys.meta_path.insert(0, _call_finder)


def _enter_end_of_calls() -> None:
    """Enter that the program is over, before its connections to other ranks are closed."""
    ring = sys.modules.get(_CALL_RING)
    if ring is not None:
        ring.be_done(is_over=True)
        _call_finder.tell_last_recorded()


class _CallFinder:
    """Finds torch's module as other finders do, and lets its calls be entered when it is loaded.

    Also our own one, which `rankwise.collectives` loads: the agent is told when entries begin.
    """

    reporter: "Reporter | None" = None
    why_off: str = ""
    left_at: "tuple[int, int] | None" = None
    """When the program destroyed torch's groups, by the monotonic clock and by the calendar."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Answer for two names only, and for torch's once."""
        if name not in (_C10D, _CALL_RING):
            return None
        sys.meta_path.remove(self)  # another finder may ask all others, as we do
        spec: Any = None
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        if name != _C10D:
            sys.meta_path.insert(0, self)
        if spec is None:
            return None
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is not None and os.environ.get("RANKWISE_LEDGER") != "0":

            def exec_module(module: "ModuleType") -> None:
                execute(module)
                if name == _C10D:
                    self._enter_calls_of(module)
                else:
                    module.tell_when_begun(self._tell)

            loader.exec_module = exec_module
        return spec

    def _enter_calls_of(self, module: "ModuleType") -> None:
        try:
            ring = _worker_module("call_ring")
            sys.modules.setdefault(_CALL_RING, ring)
            ring = sys.modules[_CALL_RING]
            ring.tell_when_begun(self._tell)
            digest_of = _own_module("core", "matching", "call_digest").digest_of
            _worker_module("torch_calls").enter_calls(module, ring, digest_of, self)
        except Exception as error:  # noqa: BLE001 - a torch that we do not know: the program goes on
            self.tell_ledger_is_off(f"is unknown to rankwise ({type(error).__name__}: {error})")

    def _tell(self) -> None:
        if self.reporter is not None:
            self.reporter.tell_calls_begin()

    def answer_for_recorder(self, recorded: "Callable[[], str]") -> None:
        """Let the reporter of the process, which may be a fork, do that."""
        if self.reporter is not None:
            self.reporter.answer_for_recorder(recorded)

    def tell_ledger_is_off(self, why: str) -> None:
        """The same, at once or once there is one: a server may import torch for its forks."""
        torch = sys.modules.get("torch")
        self.why_off = f"is off: torch {getattr(torch, '__version__', '')} {why}"
        self.tell_ledger_lacks(self.why_off)

    def tell_ledger_lacks(self, what: str) -> None:
        """The same."""
        if self.reporter is not None:
            self.reporter.tell_ledger_lacks(what)

    def tell_last_recorded(self) -> None:
        """The same."""
        if self.reporter is not None:
            self.reporter.tell_last_recorded()


_call_finder = _CallFinder()


def take_descriptors() -> dict[str, int]:
    """Take our descriptors out of the environment, so that the program's children get none."""
    descriptors: dict[str, int] = {}
    for variable in OWN_DESCRIPTORS:
        number = os.environ.pop(variable, None)
        if number is not None:
            descriptors[variable] = int(number)
            os.set_inheritable(int(number), False)  # noqa: FBT003 - the standard library's signature
    return descriptors


def run_and_exit(program: "Program", descriptors: "Mapping[str, int]") -> "NoReturn":
    """Run a program as `run` does, and end the process almost as an interpreter ends.

    For forks, and for functions. Everything that a program can observe of an interpreter's end
    happens here: threads are waited for, exit functions run, the program's modules are destroyed,
    buffers are flushed. Modules that were there before stay, since forks share their memory.
    """
    known = frozenset(sys.modules)
    code, uncaught = run_to_code(program, descriptors)
    was_interrupted = isinstance(uncaught, KeyboardInterrupt)
    del uncaught  # with its traceback, which has all that the program's functions held
    if not _finish():
        code = _OUTPUT_LOST
    if program[0] != "function":
        try:
            _destroy_modules(known)
        except BaseException as error:  # noqa: BLE001 - the program is over: its code counts
            _show(error)
        if not _flush_streams():
            code = _OUTPUT_LOST
    if was_interrupted:  # the parent is to see that, as it would see it of an interpreter
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        os.kill(os.getpid(), _signal.SIGINT)
    os._exit(code)


def _yield_to_threads_of_torch() -> None:
    """Let threads of torch have the interpreter once before it ends.

    A thread of gloo drops the tensors of the last collective after its waiter went on.
    Before Python 3.14 the process aborts if such a thread asks for the interpreter while that ends:
    "terminate called without an active exception", in two of five runs of a program whose DDP
    model is a global name.
    """
    # The thread is gloo's own. It helps to be without the interpreter for longer than a thread
    # needs to take it.
    time.sleep(0.002)  # why: nothing tells whether such a thread is still about to ask


def stamp_of_script(status: os.stat_result) -> bytes:
    """Return what a compiled script stands for: this file, this interpreter, these settings."""
    file = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return f"{_files.MAGIC_NUMBER.hex()} {sys.flags.optimize} {file}\n".encode("ascii")


def run_to_code(
    program: "Program",
    descriptors: "Mapping[str, int]",
    reporter: "Reporter | None" = None,
    passing: "tuple[type[BaseException], ...]" = (),
) -> "tuple[int, BaseException | None]":
    """Run a program as `run` does; return its exit code, and what it raised, which was shown.

    Exceptions of the types in `passing` are none of the program's, and go through.
    """
    code = 0
    uncaught: BaseException | None = None
    try:
        run(program, descriptors, reporter)
    except passing:
        raise
    except SystemExit as ending:
        code = _exit_code(ending)
    except BaseException as error:  # noqa: BLE001 - this is the bottom of the process
        code, uncaught = _own_exit_code(error), error
    if uncaught is not None:  # shown here, and not above, or it would become the context of another
        _show(uncaught)
    return code, uncaught


def _own_exit_code(error: BaseException) -> int:
    """An exception of rankwise in a simulated rank may have an exit code of its own.

    A library may have wrapped it: torch's pipelines raise RuntimeError from it.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if (code := getattr(cause, "rankwise_exit_code", None)) is not None:
            return int(code)
        seen.append(cause)
        cause = cause.__cause__
    return 1


def without_our_frames(traceback: "TracebackType | None") -> "TracebackType | None":
    """Drop the frames at the bottom that are not the program's."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OUR_FILES:
        traceback = traceback.tb_next
    return traceback


def _time_of(error: BaseException) -> "tuple[int, int]":
    """Return when it was raised: now, but of one that `rankwise.recover` has held back before.

    An exception soon after a program has destroyed torch's groups, by `finally` say, explains what
    its peers raised meanwhile, so it counts from then on.
    """
    noted: tuple[int, int] | None = getattr(error, "_rankwise_raised_at", None)
    now, left_at = time.monotonic_ns(), _call_finder.left_at
    if noted is None and left_at is not None and now - left_at[0] < _SOON_NS:
        noted = left_at
    return noted or (now, time.time_ns())


def _place_of_exit(ending: SystemExit) -> str:
    """Return where the program has ended itself: `train.py:7, in main`; empty if nowhere.

    Where a library has, as argparse does, it is the line that called that.
    """
    place = ""
    frame = without_our_frames(ending.__traceback__)
    while frame is not None:
        code = frame.tb_frame.f_code
        if not code.co_filename.startswith(_LIBRARIES) and "-packages/" not in code.co_filename:
            name = "" if code.co_name == "<module>" else f", in {code.co_name}"
            place = f"{os.path.basename(code.co_filename)}:{frame.tb_lineno}{name}"
        frame = frame.tb_next
    return place


def _end_at_the_call(error: BaseException) -> None:
    """Let a traceback from a collective, a fault or Ctrl-C end where the program called.

    When a node dies, every rank elsewhere fails in one: how that came to know tells users nothing.
    """
    is_ours = type(error).__module__ == "rankwise.base.errors"
    is_sent = isinstance(error, KeyboardInterrupt) or hasattr(error, "_rankwise_is_of_a_fault")
    if not is_ours and not is_sent:
        return
    call = frame = error.__traceback__
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(_CARRYING_OUT):
            call = frame
        frame = frame.tb_next
    if call is not None:
        call.tb_next = None


def _leave_out_entering(error: BaseException) -> None:
    """Take what stands between out of a traceback: the program called torch, or Python."""
    frame = error.__traceback__
    while frame is not None:
        following = frame.tb_next
        if following is not None and following.tb_frame.f_code.co_filename in _ENTERING:
            frame.tb_next = following.tb_next
        else:
            frame = following


def quoted(text: str) -> str:
    """Return the JSON of a string, as `json.dumps` does, which a dying process may fail to import.

    Surrogates that stand alone are written as such; JSON allows that, and readers replace them.
    """
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    if character in '"\\':
        return "\\" + character
    if 32 <= code < 127:
        return character
    if character == "\n":
        return "\\n"
    if code > 0xFFFF:
        code -= 0x10000
        return f"\\u{0xD800 | code >> 10:04x}\\u{0xDC00 | code & 0x3FF:04x}"
    return f"\\u{code:04x}"


def _run_script(
    reporter: Reporter, path: str, arguments: list[str], payload_fd: "int | None"
) -> None:
    sys.argv = [path, *arguments]
    if path == "-":
        _run_standard_input(reporter, payload_fd)
        return
    location = path
    if not path.startswith("/"):  # made absolute, and not normal, as Python does
        location = os.getcwd() if path == "." else f"{os.getcwd()}/{path}"
    code = _compiled_before(payload_fd, location)
    # A directory or an archive with a `__main__.py`, which are not compiled before.
    if code is None and _is_importable(location):
        sys.path.insert(0, location)
        _renew_main()
        reporter.announce()
        _run_as_main("__main__", alter_argv=False)
        return
    main = _renew_main()
    source = b""
    try:
        if code is None:
            with open(location, "rb", buffering=0) as file:
                source = file.read()
    except OSError as error:
        python = getattr(sys, "orig_argv", [sys.executable])[0]
        problem = f"[Errno {error.errno}] {error.strerror}"
        print(f"{python}: can't open file {location!r}: {problem}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    is_compiled = source.startswith(_files.MAGIC_NUMBER)
    loader = (_files.SourcelessFileLoader if is_compiled else _files.SourceFileLoader)(
        "__main__", location
    )
    main.update(__file__=location, __cached__=None, __loader__=loader)
    reporter.announce()
    if code is None:
        code = loader.get_code("__main__") if is_compiled else _compiled(source, location)
    exec(code, main)  # noqa: S102 - running the program is what this is for
    for name in ("__file__", "__cached__"):  # as Python does before it calls exit functions
        main.pop(name, None)


def _run_standard_input(reporter: Reporter, payload_fd: "int | None") -> None:
    """Run the program that the launcher has read, as `python -` runs what it reads itself."""
    import linecache  # noqa: PLC0415 - only such programs

    assert payload_fd is not None, "the launcher hands it over"
    source = os.pread(payload_fd, os.fstat(payload_fd).st_size, 0)
    os.close(payload_fd)
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path.insert(0, "")
    main = _renew_main()
    reporter.announce()
    code = _compiled(source, "<stdin>")
    # Tracebacks show its lines, which are in no file. Without a time, they count as current.
    lines = source.decode("utf-8", "replace").splitlines(keepends=True)
    linecache.cache["<stdin>"] = (len(source), None, lines, "<stdin>")
    exec(code, main)  # noqa: S102 - running the program is what this is for


def _compiled_before(payload_fd: "int | None", location: str) -> "Any":
    """Return the script as the launcher has compiled it for all workers; None if it must be anew.

    `compile` takes a millisecond the first time, and as long as the script is large. A script that
    has changed since, or another interpreter, has another stamp.
    """
    if payload_fd is None:
        return None
    payload = os.pread(payload_fd, os.fstat(payload_fd).st_size, 0)
    os.close(payload_fd)
    try:
        stamp = stamp_of_script(os.stat(location))
    except OSError:
        return None  # it has gone since
    if not payload.startswith(stamp):
        return None
    code = marshal.loads(memoryview(payload)[len(stamp) :])  # noqa: S302 - our launcher made it
    return code if code.co_filename == location else None


def _compiled(source: bytes, location: str) -> "Any":
    """Compile a script; what is none, a program for the machine perhaps, is refused by its name.

    `compile` itself does not name the file in which it has found a null byte.
    """
    at = source.find(0)
    if at >= 0:
        text = source[:at].rpartition(b"\n")[2].decode("utf-8", "replace")
        place = (location, source.count(b"\n", 0, at) + 1, None, text)
        raise SyntaxError("source code cannot contain null bytes", place)
    return compile(source, location, "exec", dont_inherit=True)


def _run_module(reporter: Reporter, name: str, arguments: list[str]) -> None:
    sys.argv = ["-m", *arguments]
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path.insert(0, os.getcwd())
    _renew_main()
    reporter.announce()
    _run_as_main(name, alter_argv=True)


def _run_as_main(name: str, *, alter_argv: bool) -> None:
    import runpy  # noqa: PLC0415 - the interpreter imports it as well, in these cases only

    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # noqa: SLF001


def _renew_main() -> "dict[str, Any]":
    """Return the names of a `__main__` as an interpreter has it that has just started.

    It is another module, since the first one may be set aside.
    """
    sys.modules["__main__"] = module = type(sys)("__main__")
    main = module.__dict__
    main.update(
        __name__="__main__",
        __doc__=None,
        __package__=None,
        __loader__=BuiltinImporter,
        __spec__=None,
        __builtins__=builtins,
    )
    if sys.version_info < (3, 14):
        main["__annotations__"] = {}
    return main


def _is_importable(path: str) -> bool:
    """Tell whether Python would look for a `__main__` module inside this path."""
    for hook in sys.path_hooks:
        try:
            sys.path_importer_cache[path] = hook(path)
        except ImportError:
            continue
        return True
    return False


def _function() -> "ModuleType":
    """Return `function.py`: the fork server's, or our own, which no program finds."""
    return sys.modules.get("rankwise.drivers.real.worker.function") or _worker_module("function")


def _worker_module(name: str) -> "ModuleType":
    """Load a file beside this one."""
    return _own_module("drivers", "real", "worker", name)


def _own_module(*parts: str) -> "ModuleType":
    """Load a file of rankwise by its path: it may not be installed where this runs."""
    module = type(_files)(f"rankwise-{parts[-1]}")
    location = os.path.join(_PACKAGE, *parts) + ".py"
    _files.SourceFileLoader(module.__name__, location).exec_module(module)
    return module


def _hook_without_our_frames(hook: "Callable[..., Any]") -> "Callable[..., Any]":
    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: "TracebackType | None"
    ) -> None:
        sys.excepthook = hook
        sys.last_traceback = error.__traceback__ = without_our_frames(traceback)
        is_shown_briefly = hook is sys.__excepthook__ and _is_one_of_many() and not error.args
        if kind is KeyboardInterrupt and is_shown_briefly:
            print(_interrupt_in_a_line(error), file=sys.stderr)  # noqa: T201
        elif hook is sys.__excepthook__ and _is_of_a_cell(error.__traceback__):
            print(_format(error), end="", file=sys.stderr)  # noqa: T201
        else:
            hook(kind, error, error.__traceback__)

    return excepthook


def _is_of_a_cell(traceback: "TracebackType | None") -> bool:
    """Whether some of its lines are in memory only, where Python's own hook does not find them."""
    linecache = sys.modules.get("linecache")
    while linecache is not None and traceback is not None:
        entry = linecache.cache.get(traceback.tb_frame.f_code.co_filename, ())
        if len(entry) == 4 and entry[1] is None:
            return True
        traceback = traceback.tb_next
    return False


def _is_one_of_many() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"


def _interrupt_in_a_line(error: BaseException) -> str:
    """Where Ctrl-C met this rank: the tracebacks of sixteen ranks would fill three screens.

    A rank that waits for others in a collective is where the program called that.
    """
    place, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not place or not code.co_filename.startswith(_OUR_PACKAGE):
            place = f" in {code.co_name}, {code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return f"KeyboardInterrupt{place}"


def _show(error: BaseException) -> None:
    """Show an exception by means of `sys.excepthook`, as an interpreter does at its end."""
    problem: BaseException | None = None
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as caught:  # noqa: BLE001 - a hook may do anything
        problem = caught
    if problem is not None:
        problem.__traceback__ = without_our_frames(problem.__traceback__)
        print("Error in sys.excepthook:", file=sys.stderr)  # noqa: T201
        sys.__excepthook__(type(problem), problem, problem.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)  # noqa: T201
        sys.__excepthook__(type(error), error, error.__traceback__)


def _missing_hook(*error: "Any") -> None:
    """Show an exception as Python does when a program has deleted `sys.excepthook`."""
    print("sys.excepthook is missing", file=sys.stderr)  # noqa: T201
    sys.__excepthook__(*error)


def _exit_code(ending: SystemExit) -> int:
    """Return the exit code that Python gives to a SystemExit, saying what it says on the way."""
    if ending.code is not None and not isinstance(ending.code, int):
        print(ending.code, file=sys.stderr)  # noqa: T201
    return _code_of(ending)


def _code_of(ending: SystemExit) -> int:
    if ending.code is None:
        return 0
    return ending.code & 0xFF if isinstance(ending.code, int) else 1


def _finish() -> bool:
    """Do what an interpreter does between the program's last line and the process's end.

    Returns:
        Whether all that was printed could be written.
    """
    import atexit  # noqa: PLC0415 - always in memory by now, but a cost to workers that end alone

    threading = sys.modules.get("threading")
    for step in (
        *([threading._shutdown] if threading else []),  # noqa: SLF001 - as the interpreter does
        atexit._run_exitfuncs,  # noqa: SLF001 - the same
    ):
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - the later steps have to happen all the same
            _show(error)
    is_written = _flush_streams()
    _flush_c_streams()
    return is_written


def _destroy_modules(known: "frozenset[str]") -> None:
    """Destroy what the program has made and loaded, in the order in which an interpreter does it.

    Files that it has left open are written, and `__del__` is called. Threads that are left are
    daemons, which an interpreter stops at this point.
    """
    import io  # noqa: PLC0415 - always in memory, but a cost to workers that end alone
    import weakref  # noqa: PLC0415 - the same

    sys.setswitchinterval(_NEVER_S)
    gc.callbacks.clear()  # an interpreter calls none at its end; theirs may need what is gone
    threading = sys.modules.get("threading")
    if threading is not None:
        threading.excepthook = _ignore  # type: ignore[attr-defined]  # a daemon may fail now
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    # The collector may close a file before the text that waits for it is written.
    for each in gc.get_objects():
        # Its own type, and not its class: weak proxies and mocks have another's.
        if issubclass(type(each), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            _flushing_error(each)
    left = []
    for name in [name for name in sys.modules if name == "__main__" or name not in known]:
        module: Any = sys.modules[name]
        sys.modules[name] = None  # type: ignore[assignment]  # as an interpreter does
        try:  # noqa: SIM105 - `contextlib` may not be in memory
            left.append(weakref.ref(module))
        except TypeError:
            pass  # a program may have put anything there
    module = None
    gc.collect()
    for reference in reversed(left):
        module = reference()
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            private = [name for name in names if name[:1] == "_" and name[:2] != "__"]
            for name in [*private, *(name for name in names if name != "__builtins__")]:
                names[name] = None
    gc.collect()


def _ignore(_: object) -> None:
    """Do nothing."""


def _flush_streams() -> bool:
    """Write out what Python code has printed; tell whether all of it could be written."""
    lost = _flushing_error(sys.stdout)
    if lost is None:
        return _flushing_error(sys.stderr) is None
    try:
        print(f"Exception ignored in: {sys.stdout!r}\n{_line_of(lost)}", file=sys.stderr)  # noqa: T201
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - the exit code says it, wherever stderr leads
        return False
    return False


def _flushing_error(stream: "Any") -> "BaseException | None":
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except BaseException as error:  # noqa: BLE001 - a program may have put anything there
        return error
    return None


def _flush_c_streams() -> None:
    """Write out what C code has printed into buffers of its own."""
    ctypes = sys.modules.get("_ctypes")
    if ctypes is not None:
        flush = ctypes.dlsym(ctypes.dlopen(None, os.RTLD_NOW), "fflush")
        ctypes.call_function(flush, (None,))


def _name_of(kind: type[BaseException]) -> str:
    """Name an exception's class as a traceback does."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _line_of(error: BaseException) -> str:
    """Return the last line of a traceback."""
    text = _text_of(error)
    return f"{_name_of(type(error))}: {text}" if text else _name_of(type(error))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as problem:  # noqa: BLE001 - a broken exception is still a failure
        return f"<its text cannot be had: {type(problem).__name__}>"


def _format(error: BaseException) -> str:
    try:
        import traceback  # noqa: PLC0415 - takes longer than starting a worker

        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:  # noqa: BLE001 - out of memory, out of descriptors, …
        return _format_plainly(error)


def _format_plainly(error: BaseException) -> str:
    """Format a traceback out of what is in memory: no lines of source, no chained exceptions."""
    try:
        lines = ["Traceback (most recent call last):"] if error.__traceback__ else []
        frame = error.__traceback__
        while frame is not None:
            code = frame.tb_frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.tb_lineno}, in {code.co_name}')
            frame = frame.tb_next
        lines.append(_line_of(error))
        return "\n".join(lines) + "\n"
    except BaseException as problem:  # noqa: BLE001 - not even memory is left
        return f"<its traceback cannot be had: {type(problem).__name__}>"


def _cut(text: str, limit: int) -> str:
    """Shorten a text in its middle, since both its beginning and its end matter."""
    if len(text) <= limit:
        return text
    return (
        f"{text[: limit // 2]}\n… {len(text) - limit} characters left out …\n{text[-limit // 2 :]}"
    )


def _write_error_file(
    path: str, error: BaseException, summary: str, traceback: str, wall_ns: int
) -> None:
    """Write torch's error file, all of it or nothing.

    The text of torch's `record` about this exception stays: it may say more. So does what it has
    copied for a launcher inside this worker, whose own exception says less.
    """
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            if type(error).__name__ == "ChildFailedError" or summary in file.read():
                return
    except OSError:
        pass  # there is none, which is usual
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="ascii") as file:
            file.write(
                f'{{"message": {{"message": {summary}, "extraInfo": {{"py_callstack": {traceback}, '
                f'"timestamp": "{wall_ns // 1_000_000_000}"}}}}}}'
            )
        os.replace(temporary, path)
    except OSError:
        # The report pipe has told already; a full disk must not hide the exception itself.
        try:  # noqa: SIM105 - `contextlib` may not be in memory
            os.unlink(temporary)
        except OSError:
            pass  # it could not even be made


if __name__ == "__main__":
    run_as_started()
