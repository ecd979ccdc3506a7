"""What to do next, for causes that are common and not obvious.

A hint is worth its line only when it is nearly always right and says more than the error itself
does. The catalogue is therefore short; where nothing fits, nothing is said.

The knowledge of rankwise is in values of the failure: its cause, its exit, how ranks are out of
step, the class of an exception. Texts are read only where they come from others (torch, gloo, the C
library, a program's stderr): there is nothing else to go by (ADR 0089). Errors of the system are
known by their numbers too: their words are in the user's language.
"""

import errno
import os
import re
from collections.abc import Callable, Sequence

import msgspec

from rankwise.base.errors import DEVICE_FULL_EXIT_CODE
from rankwise.base.failure import Failure, FailureCause, MismatchKind
from rankwise.launch.telling.failure_report.tracebacks import is_cut_off_from_loader

_SIGKILL, _SIGBUS, _SIGILL, _SIGTERM, _SIGXCPU = 9, 7, 4, 15, 24
_PEER_GONE = re.compile(
    r"connection (?:was )?(?:closed|reset) by (?:the )?(?:remote )?peer|broken pipe"
    r"|connection refused|socket (?:timeout|closed)|ncclRemoteError"
    rf"|\[Errno (?:{errno.EPIPE}|{errno.ECONNRESET}|{errno.ECONNREFUSED})\]",
    re.IGNORECASE,
)
"""What gloo, NCCL and the C library say of a connection whose other end has gone."""
_DEVICE_FULL = "torch.OutOfMemoryError"
_PEER_DIED = "rankwise.base.errors.PeerDied"
_FORK = re.compile(r"\bfork|posix_spawn|\bPopen\b|_execute_child")
_TEXT_MAX = 20_000


class _Hint(msgspec.Struct, frozen=True):
    applies: Callable[[Failure], bool]
    advice: str


def hint_for(failure: Failure) -> str:
    """The first hint that fits; empty when none does."""
    return next((hint.advice for hint in _CATALOGUE if hint.applies(failure)), "")


def is_peer_gone(failure: Failure) -> bool:
    """Whether it failed since another process had gone away: a consequence, hardly ever a cause."""
    error = failure.error
    if error is None:
        return False
    says_so = error.type == _PEER_DIED or _PEER_GONE.search(_last_words(error.message))
    # A worker of its own data loader is no peer; few exceptions have to be asked for that.
    return bool(says_so) and not is_cut_off_from_loader(error)


def _says(*words: str, number: int | None = None) -> Callable[[Failure], bool]:
    """Look for words, or an errno, in the error, or in the end of stderr when there is none."""
    if number is not None:
        words += (rf"\[Errno {number}\]",)
    pattern = re.compile("|".join(words), re.MULTILINE)
    return lambda failure: bool(pattern.search(_text_of(failure)))


def _text_of(failure: Failure) -> str:
    if failure.error is not None:
        return f"{failure.error.type}: {_last_words(failure.error.message)}"
    return _last_words("\n".join([failure.detail, *failure.stderr_tail[-20:]]))


def _last_words(text: str) -> str:
    return text[-_TEXT_MAX:]


def _died_of(signal: int) -> Callable[[Failure], bool]:
    """Of a signal from elsewhere: what rankwise ends itself needs no hint."""
    return lambda failure: (
        failure.cause is FailureCause.SIGNALED
        and not failure.signal_sender
        and failure.exit is not None
        and failure.exit.signal_number == signal
    )


def _exited_with(code: int) -> Callable[[Failure], bool]:
    return lambda failure: failure.exit is not None and failure.exit.code == code


_THREAD_REFUSED = _says(
    "can't start new thread",
    "(?:fork|pthread_create|thread).*: Resource temporarily unavailable",
)


def _could_not_fork(failure: Failure) -> bool:
    """Whether a process was refused; sockets that are not ready say the same, and mean another."""
    if failure.error is None:
        reasons = (f"[Errno {errno.EAGAIN}]", os.strerror(errno.EAGAIN))
        is_refused = any(reason in failure.detail for reason in reasons)
        return failure.cause is FailureCause.NOT_STARTED and is_refused
    is_refused = failure.error.type == "BlockingIOError"
    return is_refused and bool(_FORK.search(_last_words(failure.error.traceback)))


_SAME_CALLS = (
    "all ranks must call the same collectives in the same order: look for a branch, or a loop, "
    "that {} takes differently"
)


def _is_mismatch(kind: MismatchKind) -> Callable[[Failure], bool]:
    return lambda failure: failure.mismatch is not None and failure.mismatch.kind is kind


def _calls_of_circle(failure: Failure) -> tuple[str, ...]:
    """In what each of those stands that wait for each other: `send`, `recv`, or an operation."""
    is_circle = _is_mismatch(MismatchKind.CIRCLE)(failure)
    return failure.mismatch.operations if is_circle and failure.mismatch is not None else ()


_CATALOGUE: Sequence[_Hint] = (
    _Hint(
        _is_mismatch(MismatchKind.MISFIT),
        "a receive needs as many elements as its send, of the same dtype",
    ),
    _Hint(
        lambda failure: sorted(_calls_of_circle(failure)) == ["recv", "send"],
        "receives match sends of their tag, in order and with equal sizes: compare both calls",
    ),
    _Hint(
        lambda failure: "send" in _calls_of_circle(failure),
        "a send may wait for its receive: let one of these ranks receive first, or give both to "
        "batch_isend_irecv",
    ),
    _Hint(
        lambda failure: {*_calls_of_circle(failure)} == {"recv"},
        "all of them receive: let one of these ranks send first",
    ),
    _Hint(
        lambda failure: failure.cause is FailureCause.OUT_OF_STEP and failure.was_stopped,
        "ps shows a suspended process with state T or t; kill -CONT resumes it",
    ),
    _Hint(
        lambda failure: failure.is_shared,
        _SAME_CALLS.format("one of these ranks"),
    ),
    _Hint(
        _is_mismatch(MismatchKind.ABSENCE),
        "if this rank is only slow, give a longer limit; else look for a branch, or a loop, that"
        " it takes differently",
    ),
    _Hint(
        lambda failure: failure.cause is FailureCause.OUT_OF_STEP,
        _SAME_CALLS.format("this rank"),
    ),
    _Hint(
        lambda failure: failure.out_of_memory is True,
        "use a smaller batch, fewer ranks or fewer data-loader workers, or raise the memory limit",
    ),
    _Hint(
        _died_of(_SIGXCPU),
        "it has reached its limit of CPU time: see ulimit -t",
    ),
    _Hint(
        lambda failure: failure.cpu_seconds_max is not None,
        "the kernel kills a process at its limit of CPU time: see ulimit -t",
    ),
    _Hint(
        lambda failure: _died_of(_SIGKILL)(failure) and failure.out_of_memory is None,
        "the kernel's log says whether it ran out of memory: dmesg | grep -i 'out of memory'",
    ),
    _Hint(
        _died_of(_SIGKILL),
        "look for a time limit of the scheduler, a watchdog, or a colleague",
    ),
    _Hint(
        _died_of(_SIGTERM),
        "rankwise did not send this SIGTERM: look for a scheduler, or a kill in the program",
    ),
    _Hint(
        # The error is of torch's own type, as on a real device: the exit code tells them apart.
        lambda failure: (
            _exited_with(DEVICE_FULL_EXIT_CODE)(failure)
            and failure.error is not None
            and _DEVICE_FULL in f"{failure.error.type} {failure.error.traceback}"
        ),
        "use a smaller batch, shard or recompute more, or choose a machine with more memory",
    ),
    _Hint(
        _says(
            "CUDA out of memory", r"torch\.(?:cuda\.)?OutOfMemoryError", "CUDA error: out of mem"
        ),
        "use a smaller batch, or recompute more; nvidia-smi shows other users, and for memory that"
        " is reserved and unused there is PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    _Hint(
        _says("CUDA kernel errors might be asynchronously reported"),
        "the error is of an earlier kernel, which runs asynchronously: with CUDA_LAUNCH_BLOCKING=1"
        " the traceback ends at its line",
    ),
    _Hint(
        _says(
            "Torch not compiled with CUDA enabled",
            "_cuda_setDevice",
            "No CUDA GPUs are available",
            "Found no NVIDIA driver",
            "doesn't have NCCL built in",
        ),
        "torch finds no GPU here; --on sim --device cuda runs a script for CUDA without one, in"
        " its ranks; processes that they start have none: use --nproc-per-node, not mp.spawn",
    ),
    _Hint(
        _says(
            "^MemoryError",
            "Cannot allocate memory",
            "DefaultCPUAllocator: can't allocate",
            number=errno.ENOMEM,
        ),
        "memory is short: use a smaller batch or fewer ranks, and see ulimit -v",
    ),
    _Hint(
        _died_of(_SIGBUS),
        "often /dev/shm is full (df /dev/shm), or a mapped file was cut short",
    ),
    _Hint(
        _died_of(_SIGILL),
        "the program, or a library that it loads, was built for another CPU",
    ),
    _Hint(
        _says("[Aa]ddress already in use", "EADDRINUSE", number=errno.EADDRINUSE),
        "ss -ltnp shows its owner; without --master-port, rankwise takes a free port",
    ),
    _Hint(
        _says("No space left on device", number=errno.ENOSPC),
        "a disk, or /dev/shm, is full: df -h",
    ),
    _Hint(
        _says("Too many open files", number=errno.EMFILE),
        "raise the limit of open files: ulimit -n",
    ),
    _Hint(
        lambda failure: _could_not_fork(failure) or _THREAD_REFUSED(failure),
        "too many processes or threads: see ulimit -u, and pids.max of the control group",
    ),
    _Hint(
        _says("^ModuleNotFoundError"),
        "is it installed for the Python that runs the workers, and is its folder in PYTHONPATH?",
    ),
    _Hint(
        _exited_with(127),
        "check the spelling, PATH, and the first line (#!) of the script",
    ),
    _Hint(
        _exited_with(126),
        "it needs the run bit (chmod +x) and must fit this machine",
    ),
    _Hint(
        lambda failure: failure.error is not None and is_cut_off_from_loader(failure.error),
        "the lines above may show why that worker died, and dmesg, if memory was short",
    ),
    _Hint(
        is_peer_gone,
        "it lost another rank: one that ended early with exit code 0, or one on another node",
    ),
)
