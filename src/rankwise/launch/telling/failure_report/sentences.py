"""Failures in words: signals, exit codes, ranks, and one sentence for each failure."""

import re

from rankwise.base.failure import (
    SIGNAL_NAMES,
    ErrorRecord,
    ExitStatus,
    Failure,
    FailureCause,
    signal_name,
)
from rankwise.base.wording import BY_SIGNAL
from rankwise.launch.telling.failure_report.stacks import place_in_program
from rankwise.launch.telling.failure_report.text import LINE_LENGTH_MAX, first_line, printable
from rankwise.launch.telling.failure_report.tracebacks import is_cut_off_from_loader

_MEANINGS = {
    1: "hang-up: its terminal or session went away",
    2: "interrupt, as by Ctrl-C",
    3: "quit, as by Ctrl-\\",
    4: "illegal instruction",
    5: "trace trap",
    6: "abort",
    7: "bus error",
    8: "arithmetic error",
    11: "segmentation fault",
    13: "broken pipe",
    14: "alarm clock",
    15: "request to terminate",
    24: "CPU time limit",
    25: "file size limit",
    31: "forbidden system call",
}

# As in "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer".
_SOURCE_OF_LIBRARY = re.compile(r"^\s*\[[\w./+-]+\.(?:cc|cpp|cu|h|hpp):\d+\]\s*")

_EXIT_CODES = {
    120: "Python could not flush stdout or stderr at the end",
    126: "the command was found, but cannot be executed",
    127: "command not found",
}

_SIGKILL = 9
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n"
_AFTER_FRAMES = re.compile(r"^  .*\n(?=\S)", re.MULTILINE)


def describe_signal(number: int) -> str:
    """`SIGSEGV (segmentation fault)`."""
    name, meaning = signal_name(number), _MEANINGS.get(number)
    return f"{name} ({meaning})" if meaning else name


def exit_in_words(status: ExitStatus) -> str:
    """`exit code 3`, `exit code 137 (128 + 9: …)`, `signal 11: SIGSEGV (segmentation fault)`."""
    if status.signal_number is not None:
        return f"signal {status.signal_number}: {describe_signal(status.signal_number)}"
    explained = explain_exit_code(status.code)
    return f"exit code {status.code} ({explained})" if explained else f"exit code {status.code}"


def explain_exit_code(code: int) -> str:
    """What a code means by convention; empty for the many that mean what the program likes."""
    if code in _EXIT_CODES:
        return _EXIT_CODES[code]
    number = code - 128
    if number in SIGNAL_NAMES:
        return f"128 + {number}: a child process probably died of {signal_name(number)}"
    return ""


def rank_of(failure: Failure) -> int:
    """The rank in the whole job; the local rank as long as the other is unknown."""
    return failure.rank if failure.rank >= 0 else failure.local_rank


def error_in_words(error: ErrorRecord) -> str:
    """`ValueError: bad shape`: the type as Python would print it, the message's first line.

    A message that carries another process's traceback, as those of torch's data loaders do, begins
    with where it was caught; the exception that was raised there follows.
    """
    if error.type.startswith("rankwise."):
        name = error.type.rpartition(".")[2]  # where rankwise keeps its classes helps no reader
    else:
        name = printable(error.type.removeprefix("__main__.").removeprefix("builtins."), 200)
    message = first_line(_without_source_of_library(error.message), _length_max(error))
    _, is_carried, traceback = error.message.rpartition("Traceback (most recent call last):\n")
    lines = traceback.splitlines() if is_carried else []
    if raised := next((line for line in lines if line.strip() and not line[0].isspace()), ""):
        message += f" {first_line(raised)}"
    told = f"{name}: {message}" if message else name
    if is_cut_off_from_loader(error):
        told += " (a worker of its data loader has died)"
    cause = _first_cause(error.traceback)
    return f"{told} (because of {cause})" if cause and cause not in told else told


def _without_source_of_library(message: str) -> str:
    """Of an error of gloo: its first sentence, without the line of its own source; else all."""
    bare = _SOURCE_OF_LIBRARY.sub("", message, count=1)
    if bare == message:
        return message
    sentence, is_cut, _ = bare.partition(". ")
    return f"{sentence} ..." if is_cut else bare


def _length_max(error: ErrorRecord | None) -> int:
    """The length limit of a sentence. One of rankwise ends in what to do, so it is not cut."""
    is_own = error is None or error.type.startswith("rankwise.")
    return LINE_LENGTH_MAX if is_own else 300


def _first_cause(traceback: str) -> str:
    """The exception that others were raised `from`, the first of them: `OSError: no record 17`."""
    chain, is_caused, _ = traceback.partition(_CAUSED)
    # The text after the last frame begins with the exception, and may have several lines.
    raised = _AFTER_FRAMES.split(chain)[-1] if is_caused else ""
    return first_line(raised.strip())


def headline(failure: Failure) -> str:
    """What happened, in one sentence: `rank 2 failed: ValueError: bad shape`."""
    who, detail = f"rank {rank_of(failure)}", first_line(failure.detail, LINE_LENGTH_MAX)
    because = f": {detail}" if detail else ""
    match failure.cause:
        case FailureCause.RAISED:
            told = f": {error_in_words(failure.error)}" if failure.error else because
            return f"{who} failed{told}{_oom_in_words(failure)}"
        case FailureCause.EXITED:
            return f"{who} {_exited_in_words(failure.exit)}{because}"
        case FailureCause.SIGNALED:
            return f"{who} {_killed_in_words(failure)}"
        case FailureCause.STOPPED:
            ending = f" ({exit_in_words(failure.exit)})" if failure.exit else ""
            return f"{who} ended after the request to stop{ending}"
        case FailureCause.HUNG:
            return f"the gang hung: {detail or 'no progress'}"
        case FailureCause.OUT_OF_STEP:
            is_placed = failure.error is None and not failure.is_shared
            place = place_in_program(failure.stacks) if is_placed else ""
            # Only to say a place once: a disagreement names the lines of its calls already.
            is_named = not place or place.partition(",")[0] in detail
            text = detail if is_named else f"{detail}: it is at {place}"
            return f"{text}; {who} is {BY_SIGNAL}" if failure.was_stopped else text
        case FailureCause.NOT_STARTED:
            return f"{who} could not be started{because}"
        case FailureCause.GUARDIAN_LOST:
            fate = "the rank had not started" if failure.pid is None else "its ranks ended with it"
            return f"{detail or 'the guardian has died'}; {fate}"
        case FailureCause.STORE_LOST:
            return detail


def _oom_in_words(failure: Failure) -> str:
    """Of a rank that raised: what it has lost to the kernel's OOM killer."""
    if not failure.out_of_memory:
        return ""
    return f": the kernel's OOM killer did it ({first_line(failure.detail)})"


def one_line(failure: Failure) -> str:
    """The failure in a short line for notices: `rank 2 failed (ValueError: bad shape)`."""
    if failure.cause is FailureCause.RAISED and failure.error is not None:
        told = f"rank {rank_of(failure)} failed ({error_in_words(failure.error)})"
        return printable(f"{told}{_oom_in_words(failure)}", _length_max(failure.error))
    return printable(headline(failure), _length_max(failure.error))


def _exited_in_words(status: ExitStatus | None) -> str:
    if status is None:
        return "ended"
    if status.signal_number is not None:
        return f"was killed by {describe_signal(status.signal_number)}"
    explained = explain_exit_code(status.code)
    return f"exited with code {status.code}{f' ({explained})' if explained else ''}"


def _killed_in_words(failure: Failure) -> str:
    number = failure.exit.signal_number if failure.exit is not None else None
    detail = first_line(failure.detail)
    evidence = f" ({detail})" if detail else ""
    if number is None:
        return f"was killed{evidence}"
    if failure.signal_sender:
        return f"was killed by {describe_signal(number)}, sent by {failure.signal_sender}"
    if number != _SIGKILL:
        return f"was killed by {describe_signal(number)}{evidence}"
    limit = failure.cpu_seconds_max
    match failure.out_of_memory:
        case True:
            return f"was killed by SIGKILL: the kernel's OOM killer did it{evidence}"
        case False if limit is not None:
            return f"was killed by SIGKILL, perhaps at its limit of {limit} s of CPU time{evidence}"
        case False:
            return (
                f"was killed by SIGKILL, not by the OOM killer: another process sent it{evidence}"
            )
        case None:
            return f"was killed by SIGKILL; whether by the OOM killer is unknown{evidence}"
