"""The end of a worker, and of a gang: the words in which failures are told.

These are values, not exceptions: they travel from the gang machine through the journal to the
report. `rankwise.base.errors.WorkersFailed` carries them where an exception is due.
"""

from enum import StrEnum

import msgspec

from rankwise.base.units import Instant

SIGNAL_NAMES: dict[int, str] = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS",
    8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE",
    14: "SIGALRM", 15: "SIGTERM", 16: "SIGSTKFLT", 17: "SIGCHLD", 18: "SIGCONT", 19: "SIGSTOP",
    20: "SIGTSTP", 21: "SIGTTIN", 22: "SIGTTOU", 23: "SIGURG", 24: "SIGXCPU", 25: "SIGXFSZ",
    26: "SIGVTALRM", 27: "SIGPROF", 28: "SIGWINCH", 29: "SIGIO", 30: "SIGPWR", 31: "SIGSYS",
}  # fmt: skip
"""Linux signal numbers, spelled here because machines may not import `signal`."""

NO_RANK = -1
"""The rank of a failure that is none of a rank."""
TIME_LIMIT_SIGNAL = 14
"""SIGALRM, the alarm clock: by which a run's own time limit asks it to stop. Ranks get SIGTERM."""


def signal_name(number: int) -> str:
    """`SIGSEGV`; `SIGRTMIN+6` for real-time signals, `signal 99` for what is none."""
    if number in SIGNAL_NAMES:
        return SIGNAL_NAMES[number]
    return f"SIGRTMIN+{number - 34}" if 34 <= number <= 64 else f"signal {number}"


class ExitStatus(msgspec.Struct, frozen=True):
    """How a process ended: `code` is its exit code, or minus the signal that killed it."""

    code: int

    @property
    def ok(self) -> bool:
        """True if the process ended as a success."""
        return self.code == 0

    @property
    def signal_number(self) -> int | None:
        """The signal that killed the process, if one did."""
        return -self.code if self.code < 0 else None

    def may_be_by(self, signals: tuple[int, ...]) -> bool:
        """True if one of the signals may explain the end: as a kill, or as code 128 + signal."""
        return any(self.code in (-signal, 128 + signal) for signal in signals)

    @property
    def shell_code(self) -> int:
        """The code that a shell would show: 128 plus the signal's number after a signal."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def in_words(self) -> str:
        """The end of the process in words: `ended with exit code 3`, `was killed by SIGKILL`."""
        number = self.signal_number
        if number is None:
            return f"ended with exit code {self.code}"
        return f"was killed by {SIGNAL_NAMES.get(number, f'signal {number}')}"

    @property
    def failure_cause(self) -> "FailureCause":
        """Why a process has failed that ended so, by itself and without another word."""
        return FailureCause.EXITED if self.code >= 0 else FailureCause.SIGNALED

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"signal {-self.code} ({SIGNAL_NAMES.get(-self.code, f'SIG{-self.code}')})"


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An exception as its worker reported it, in text.

    Attributes:
        type: the exception's qualified class name, without `builtins.`; empty where an exception is
            known of, but not which.
        message: `str(exception)`.
        traceback: the formatted traceback, as Python would have printed it.
        raised_at: when the worker caught it, on the machine's monotonic clock, nanoseconds.
        wall_ns: the same moment as nanoseconds since 1970, for people.
        tensors: what the tensors of the rank held, of an error of torch that a GPU has no more
            memory; in a sentence.
    """

    type: str
    message: str
    traceback: str
    raised_at: Instant
    wall_ns: int
    tensors: str = ""

    @property
    def in_a_line(self) -> str:
        """Its class and what it says: `ValueError: no such thing`."""
        return ": ".join(filter(None, (self.short_type, self.message)))

    @property
    def short_type(self) -> str:
        """The name of its class without the module's."""
        return self.type.rpartition(".")[2]


def record_of(
    error: BaseException, trace: str, raised_at: Instant, wall_ns: int = 0
) -> ErrorRecord:
    """An exception in text, with its traceback.

    The bootstrap of a rank writes the same, and cannot use this: it must not import anything.
    """
    kind = type(error)
    is_plain = kind.__module__ in {"builtins", "__main__"}
    return ErrorRecord(
        type=_encodable(
            kind.__qualname__ if is_plain else f"{kind.__module__}.{kind.__qualname__}"
        ),
        message=text_of(error),
        traceback=_encodable(trace),
        raised_at=raised_at,
        wall_ns=wall_ns,
    )


def text_of(error: BaseException) -> str:
    """The text of an exception; also of one that cannot be printed."""
    try:
        return _encodable(str(error))
    except Exception as trouble:  # noqa: BLE001  # whatever a foreign class does when it is printed
        return f"<its text cannot be had: {type(trouble).__name__}>"


def _encodable(text: str) -> str:
    """A text without half surrogates, which names of odd files have."""
    return text.encode("utf-8", "backslashreplace").decode()


class FailureCause(StrEnum):
    """Why a worker counts as failed."""

    RAISED = "raised"
    """It reported an uncaught exception."""
    EXITED = "exited"
    """It ended with a non-zero exit code and reported nothing."""
    SIGNALED = "signaled"
    """It was killed by a signal that rankwise did not send."""
    STOPPED = "stopped"
    """It ended, in whatever way, because rankwise had told it to stop."""
    HUNG = "hung"
    """It made no progress for longer than the hang timeout."""
    OUT_OF_STEP = "out-of-step"
    """It has not come to a collective, or called another one, so that others waited in vain."""
    NOT_STARTED = "not-started"
    """It could not be started."""
    GUARDIAN_LOST = "guardian-lost"
    """The process that owned it died, and took it along."""
    STORE_LOST = "store-lost"
    """No rank is to blame: the store of the nodes is gone, and what ranks tell follows from that.

    Its `local_rank` and its `rank` are `NO_RANK`.
    """


class MismatchKind(StrEnum):
    """How the collective calls and messages of ranks do not meet."""

    DISAGREEMENT = "disagreement"
    """Ranks have come to one call with different things."""
    DEPARTURE = "departure"
    """A rank has ended without a call in which others wait."""
    ABSENCE = "absence"
    """A rank lives and has not come to a call in which others wait."""
    CIRCLE = "circle"
    """Ranks wait for each other, each in another call."""
    MISFIT = "misfit"
    """A message has another size or type than its receive takes."""


class Mismatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why ranks are out of step, as a value: advice depends on it, and no text is read for it."""

    kind: MismatchKind
    operations: tuple[str, ...] = ()
    """Of a circle: the operation in which each of its ranks stands, such as `send`."""


class CallOfRanks(msgspec.Struct, frozen=True, array_like=True):
    """A call that blame is about, as values that are equal for the same call."""

    ranks: tuple[int, ...]
    """Those that have come to it in the same way."""
    group: str
    """The group's key; empty for a message."""
    number: int
    operation: str
    checksum: int
    """Of the call's signature (`core.matching`)."""
    place: str
    """The line of the program."""
    peer: int
    """The rank at the other end of a message."""


class BlameIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """Identity of blame: two looks have found the same blame if their identities are equal.

    The sentence about it is for people, and is not compared.
    """

    blamed: tuple[int, ...]
    """Ranks of the job."""
    mismatch: Mismatch | None = None
    calls: tuple[CallOfRanks, ...] = ()
    """Those in which ranks wait or disagree, and the last one of a rank that is gone."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's failure, with all that is known about it.

    The gang machine fills in the first group; its driver adds the second, which is about
    the world around the worker.
    """

    local_rank: int
    """Its place on its node; of a child of a chip worker, its number among the children."""
    attempt: int
    cause: FailureCause
    at: Instant
    """When it failed: when the exception was raised if it reported one, else when it ended."""
    exit: ExitStatus | None = None
    pid: int | None = None
    error: ErrorRecord | None = None
    detail: str = ""
    """One sentence more: why it could not be started, how long it was silent."""
    accused: tuple[int, ...] = ()
    """Of one that is out of step, or for which others that hang wait: all ranks of the job that are
    so together. If which of several began it is unknown, all of them are equally to blame."""
    mismatch: Mismatch | None = None
    """How it is out of step, where the calls of ranks were compared; `detail` is its sentence."""
    ended_by_us: bool = False
    """True if its process ended by a signal that rankwise had sent."""
    seen_dying: bool = False
    """True if it was seen dying of a signal, such as while its core was written."""

    rank: int = -1
    host: str = ""
    role: str = ""
    wall_ns: int = 0
    """`at` as nanoseconds since 1970."""
    signal_sender: str = ""
    """The sender of the signal that it died of, where that is known: on simulated ranks."""
    was_stopped: bool = False
    """True if a signal such as SIGSTOP, or a debugger, had stopped it when it was told to end."""
    out_of_memory: bool | None = None
    """True if the kernel's out-of-memory killer did it; None when that cannot be known."""
    cpu_seconds_max: int | None = None
    """The CPU time it was allowed, if it was killed by a signal that the kernel sends for that."""
    stacks: str = ""
    """Python stacks of all its threads: at a fatal signal, or when it was found hanging or out of
    step."""
    waits_for: str = ""
    """The operation that it waited for when it was found hanging, where that can be known."""
    thread_error: str = ""
    """The exception of a thread other than the main one, as Python has printed it."""
    stderr_tail: tuple[str, ...] = ()
    stdout_tail: tuple[str, ...] = ()
    log_paths: tuple[str, ...] = ()
    error_file: str = ""
    gpus: tuple[str, ...] = ()
    """Reports of the GPUs of its node until then: errors, slow clocks; a sentence each."""

    @property
    def is_shared(self) -> bool:
        """True if several ranks are out of step, and which of them is to blame is unknown."""
        return self.cause is FailureCause.OUT_OF_STEP and len(self.accused) > 1

    def is_as_much_to_blame_as(self, root: "Failure") -> bool:
        """True if it is that root cause, or is accused of the same."""
        return self is root or (len(self.accused) > 1 and self.accused == root.accused)


def what_it_did(failure: Failure) -> str:
    """How a rank failed, for people, in a few words after its name."""
    if failure.cause is FailureCause.HUNG:
        return "hung"  # its exit only tells how it was ended
    if failure.cause is FailureCause.OUT_OF_STEP:
        return f"was out of step: {failure.detail}"  # the same
    what = _raised(failure.error) if failure.error is not None else str(failure.exit or "")
    what = what or failure.detail
    return f"failed: {what}" if what else "failed"


def _raised(error: ErrorRecord) -> str:
    """The type of an exception; of rankwise's own the message too: it names a peer that died."""
    if not error.type.startswith("rankwise."):
        return error.type
    head, _, _ = error.message.partition("\n")
    return f"{error.short_type}: {head}"


def failure_in_words(failure: Failure, host: str = "") -> str:
    """The headline of a failure: `rank 3 on node-7 failed: ValueError`.

    Of ranks that are out of step together none is named before the others.
    """
    if failure.is_shared:
        return failure.detail
    where = f" on {host}" if host else ""
    return f"rank {failure.rank}{where} {what_it_did(failure)}"


class OutcomeStatus(StrEnum):
    """How a gang's life ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    """A stop was requested, and it ended."""


class Absence(StrEnum):
    """Why a node has taken no part in a run."""

    ANOTHER_JOB = "another job"
    """The others run something else, or in another way."""
    TOO_LATE = "too late"
    """The run succeeded before it had a place for the node, which was no spare."""


class EarlierAttempt(msgspec.Struct, frozen=True):
    """An attempt that another one has followed.

    Attributes:
        number: which it was, from 0; among several nodes that of the round.
        wall_ns: when it was over, as nanoseconds since 1970.
        why: it ended, in a sentence.
    """

    number: int
    wall_ns: int
    why: str


class Stood(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stood when the run's time limit was over.

    Attributes:
        rank: which one.
        waits_for: what it waited for, where that can be known.
        stacks: the Python stacks of all its threads, if they could be had.
    """

    rank: int
    waits_for: str = ""
    stacks: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a gang.

    Attributes:
        status: how its life ended.
        attempts: how many times it was started.
        failures: those of the last attempt, the root cause first; empty on success.
        stop_signal: the signal that asked it to stop, if one did.
        survivors: processes that live on because not even SIGKILL ends them (pids).
        detail: one sentence more: why restarts that were left were not used.
        size: how many workers the job had on all nodes; None where this node is the only one.
        failed: how many of them failed by themselves; None where `failures` has them all.
        earlier: the attempts before the last one.
        absence: why no worker of this node ever ran, though nothing failed on it; None elsewhere.
        stood: where the ranks of this node stood when its time limit stopped the run.
        awaited: the rank that kept the others waiting then, in a sentence; empty if none is known.
        lateness: a sentence on the rank that made the others wait in collectives; empty where none
            did so for a notable part of the run.
    """

    status: OutcomeStatus
    attempts: int
    failures: tuple[Failure, ...] = ()
    stop_signal: int | None = None
    survivors: tuple[int, ...] = ()
    detail: str = ""
    size: int | None = None
    failed: int | None = None
    earlier: tuple[EarlierAttempt, ...] = ()
    absence: Absence | None = None
    stood: tuple[Stood, ...] = ()
    awaited: str = ""
    lateness: str = ""
