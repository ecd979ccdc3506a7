"""Tracebacks: made short, freed of our own frames, compared with each other and with stderr.

A traceback is text here, never taken apart more than needed: exception groups, notes, chains and
syntax errors all keep the form that Python gave them.

Two failures count as *the same* when their tracebacks are equal once that is taken out which
differs from rank to rank without meaning anything: addresses (`0x7f…`), and the number after a
word that counts processes or devices (`rank 3`, `cuda:3`, `pid 4711`, `port 29500`). Every other
number stays, since `shape 3` against `shape 4` may be the very clue.

A rank may fail since a worker process of its own data loader has died. torch says so where it
notices first. Where it does not, a rank that fetches what such a worker had sent cannot reach it
any more, and raises that a connection was reset, as if another rank were gone: its traceback tells.
"""

import functools
import re
from collections.abc import Sequence
from itertools import groupby

from rankwise.base.failure import ErrorRecord, Failure, FailureCause
from rankwise.launch.telling.failure_report.text import printable_lines, shorten_lines

BOOT_DIRECTORY = "rankwise/drivers/real/worker/"
"""Frames of files below this are ours: they run the user's program."""

_KILLED = re.compile(r"DataLoader worker \(pid.{0,40}\) is killed by signal: Killed")
_FETCHING = re.compile(
    r'File "[^"]*torch/utils/data/dataloader\.py".*'
    r'File "[^"]*multiprocessing/resource_sharer\.py", line \d+, in detach',
    re.DOTALL,
)
_CUT_OFF = ("ConnectionResetError", "ConnectionRefusedError", "FileNotFoundError", "EOFError")
_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<path>[^"]*)", line \d+, in ')
_WHOLE_FRAME = re.compile(r'^  File "[^"]*", line \d+, in .*$', re.MULTILINE)
_RUNPY = re.compile(r"<frozen runpy>|/runpy\.py$")
_THREADING = re.compile(r"/python3[.\d]*t?/threading\.py$")
"""Begins threads, which no main thread does."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_NUMBERED = re.compile(
    r"\b((?:local_?|global_?)?rank|worker|cuda|gpu|device|pid|process|port)([\s:=#\[]{0,3})\d+",
    re.IGNORECASE,
)
_TORCH_PREFIX = re.compile(r"\[rank\d+\]: ?")
"""What torch writes before each line of a traceback, once its process group is there."""
_SUGGESTION = re.compile(r"\. Did you (?:mean: '[^']*'|forget to import '[^']*')\?$")
"""What Python adds to the name of what is not there: Python 3.11 only where it prints."""
_FOLDED = re.compile(
    r'(?:  File "[^"]*|    .*\([^()]*)/'  # as Python tells a frame, and as py-spy does
    r"(?:(?:site|dist)-packages/(torch|rankwise)|(torch)/distributed"
    r"|(rankwise)/(?:collectives|drivers|launch|sim))/"
)
_THREAD = re.compile(r"^(?:\[rank\d+\]: ?)?Exception in thread .*:$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_HEAD_LINES, _TAIL_LINES = 40, 80
_BEGINNINGS = ('  File "', "  ... (")
_SHOWN_TWICE_MAX = 20
_HEAD_OF_SHOWN, _TAIL_OF_SHOWN = 7, 12
_COMPARED_MAX = 20_000


def traceback_lines(
    traceback: str, whole_is_in: str = "", *, is_shown_above: bool = False
) -> list[str]:
    """A traceback for showing: printable, without our frames, its middle left out when long.

    Frames of torch and rankwise are told in a line. Of one that the user sees anyway, since its
    rank has printed it, no more than 20 lines are shown again.
    """
    lines = folded_frames(without_boot_frames(printable_lines(traceback)))
    if is_shown_above and len(lines) > _SHOWN_TWICE_MAX:
        return _ends_of(lines)
    return shorten_lines(lines, _HEAD_LINES, _TAIL_LINES, whole_is_in)


def _ends_of(lines: list[str]) -> list[str]:
    """The outermost frames and the innermost ones, whole, and how much is left out."""
    begin, end = _HEAD_OF_SHOWN, len(lines) - _TAIL_OF_SHOWN
    while begin > 1 and not lines[begin].startswith(_BEGINNINGS):
        begin -= 1
    while end < len(lines) - 1 and not lines[end].startswith(_BEGINNINGS):
        end += 1
    return [
        *lines[:begin],
        f"  ... ({end - begin:,} lines left out; printed above) ...",
        *lines[end:],
    ]


def folded_library(frame: str) -> str:
    """The library whose frames are folded, if this line begins one of them."""
    found = _FOLDED.match(frame)
    return next(filter(None, found.groups()), "") if found else ""


def folded_in_words(count: int, library: str) -> str:
    """The line that stands for so many frames of a library."""
    return f"  ... ({count} frame{'s' if count > 1 else ''} of {library})"


def folded_frames(lines: Sequence[str]) -> list[str]:
    """Tell in a line how torch or rankwise work inside: what matters is who called them.

    Where all frames of a traceback are theirs, they stay.
    """
    shown: list[str] = []
    frames: list[list[str]] = []
    for line in (*lines, ""):
        if _FRAME.match(line):
            frames.append([line])
        elif frames and line.startswith(("    ", "  [Previous line repeated ")):
            frames[-1].append(line)
        else:
            shown += _folded(frames)
            shown.append(line)
            frames = []
    return shown[:-1]


def _folded(frames: Sequence[list[str]]) -> list[str]:
    libraries = [folded_library(frame[0]) for frame in frames]
    if all(libraries):
        return [line for frame in frames for line in frame]
    lines: list[str] = []
    for library, group in groupby(zip(libraries, frames, strict=True), lambda each: each[0]):
        together = [frame for _, frame in group]
        if library:
            lines.append(folded_in_words(len(together), library))
        else:
            lines += [line for frame in together for line in frame]
    return lines


def error_of_thread(lines: Sequence[str]) -> str:
    """The last exception that has ended a thread, as Python has printed it; empty for none.

    The thread that raised SystemExit prints nothing, and Python does not count it as failed.
    """
    begin = next((at for at in reversed(range(len(lines))) if _THREAD.match(lines[at])), None)
    if begin is None:
        return ""
    end = begin + 1
    while end < len(lines):
        line = _TORCH_PREFIX.sub("", lines[end])
        end += 1
        is_within = line.startswith((" ", _HEADER, *_CHAINED)) or not line
        if not is_within and not _is_chained(lines[end : end + 2]):
            break
    return "\n".join(_TORCH_PREFIX.sub("", line) for line in lines[begin:end])


def _is_chained(following: Sequence[str]) -> bool:
    """Whether the traceback of another exception follows, of which this one is the reason."""
    return len(following) == 2 and _TORCH_PREFIX.sub("", following[1]).startswith(_CHAINED)


def stack_of(traceback: str) -> str:
    """The frames of an exception as those of a thread are told: the innermost one first."""
    last = traceback.rpartition(_HEADER)[2]  # of those that are chained
    lines = [frame.replace(", in ", " in ") for frame in reversed(_WHOLE_FRAME.findall(last))]
    return "\n".join(["Current thread 0x0 (most recent call first):", *lines])


def without_boot_frames(lines: list[str]) -> list[str]:
    """Take out the outermost frames, which belong to the code that boots a worker.

    A traceback of nothing else is left alone: then it is our code that failed.
    """
    kept: list[str] = []
    at = 0
    while at < len(lines):
        kept.append(lines[at])
        at += 1
        if lines[at - 1] == _HEADER:
            at = _end_of_boot_frames(lines, at)
    return kept


def _end_of_boot_frames(lines: list[str], start: int) -> int:
    at = start
    while at < len(lines) and (frame := _FRAME.match(lines[at])):
        is_ours = BOOT_DIRECTORY in frame["path"] or _THREADING.search(frame["path"])
        if not is_ours and not (at > start and _RUNPY.search(frame["path"])):
            break
        at += 1
        while at < len(lines) and lines[at].startswith("    "):
            at += 1
    is_anything_left = at < len(lines) and lines[at].startswith("  ")
    return at if is_anything_left else start


def what_is_the_same(failure: Failure) -> object:
    """A key that is equal for two failures which tell the same story (see above)."""
    if failure.error is None:
        return (failure.cause, failure.exit, failure.out_of_memory, _normalised(failure.detail))
    error = failure.error
    if error.traceback:
        return _normalised(error.traceback)
    return (error.type, _normalised(error.message))


# Most ranks of a large gang fail with the very same text.
@functools.lru_cache(maxsize=16)
def _normalised(text: str) -> str:
    # Bounded, as a thousand ranks may bring a megabyte each: both ends tell tracebacks apart.
    if len(text) > _COMPARED_MAX:
        text = text[: _COMPARED_MAX // 2] + text[-_COMPARED_MAX // 2 :]
    return _NUMBERED.sub(r"\1\2N", _ADDRESS.sub("0xN", text)).strip()


def without_traceback(tail: list[str], traceback: str) -> list[str]:
    """The lines of stderr without the traceback that is shown anyway, even if cut at its top.

    The print and the report of a worker may differ by our frames, so either form counts, and by the
    rank that torch writes before each line, and by Python's suggestion, which stays.
    """
    whole = printable_lines(traceback)
    for lines in (whole, without_boot_frames(whole)):
        cut = _cut_out(tail, lines)
        if cut is not None:
            return cut
    return tail


def _cut_out(tail: list[str], block: list[str]) -> list[str] | None:
    wanted = [_SUGGESTION.sub("", line.rstrip()) for line in block]
    if not wanted:
        return None
    printed = [_TORCH_PREFIX.sub("", line.rstrip()) for line in tail]
    found = [_SUGGESTION.sub("", line) for line in printed]
    for end in range(len(found), 0, -1):
        overlap = min(end, len(wanted))
        starts_at = end - overlap
        is_whole = overlap == len(wanted) or starts_at == 0
        if is_whole and found[starts_at:end] == wanted[len(wanted) - overlap :]:
            is_new = printed[end - 1] not in (found[end - 1], block[-1].rstrip())
            return tail[:starts_at] + tail[end - is_new :]
    return None


def lost_loader(failure: Failure) -> bool:
    """Whether it raised since a data loader's worker of its own was killed, as by lack of memory.

    torch says so in an exception, or in the one from which that was raised.
    """
    error = failure.error
    if failure.cause is not FailureCause.RAISED or error is None:
        return False
    names_killed_worker = _KILLED.search(error.message) or _KILLED.search(error.traceback)
    return bool(names_killed_worker) or is_cut_off_from_loader(error)


def is_cut_off_from_loader(error: ErrorRecord) -> bool:
    """Whether it was raised since what a data loader's worker had sent was gone with it."""
    return error.type in _CUT_OFF and bool(_FETCHING.search(error.traceback))
