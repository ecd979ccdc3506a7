"""Parse the output of faulthandler as far as reports need it.

The text is a preamble (`Fatal Python error: Segmentation fault`), then a block per thread, then
perhaps a list of extension modules. A block is a title and its frames, the innermost first. Titles
differ between releases of Python, and newer ones add a block with the stack of C. The words at the
end of the title identify a block.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from rankwise.launch.telling.failure_report.text import printable_lines, shorten_lines
from rankwise.launch.telling.failure_report.tracebacks import (
    BOOT_DIRECTORY,
    folded_in_words,
    folded_library,
)

_TITLE_END = " (most recent call first):"
_OUTER = re.compile(
    r'  File "(?:<frozen runpy>|[^"]*/runpy\.py|[^"]*'
    + BOOT_DIRECTORY
    + r'|[^"]*/rankwise/drivers/real/hosting/)'
)
_FRAME = re.compile(r'  File "(?P<path>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3\.\d+/|/rankwise/(?:collectives|drivers)/|^<"
)
_IMPORTING = re.compile(r'  File "<frozen importlib')
_SYNCHRONIZES = re.compile(r'/torch/cuda/[^"]+", line \d+ in (?:wait_|wait|synchronize)')
_COPIES_TO_HOST = re.compile(r"\.(item|tolist|cpu|numpy|nonzero)\(")
"""Methods of tensors that wait until the GPU has computed the tensor."""
_FRAMES_OF_HANGING_MAX = 8
_HEAD_LINES, _TAIL_LINES = 80, 20


class ThreadStack(msgspec.Struct, frozen=True):
    """One block: its title line and its frames, the innermost first, ours taken off."""

    title: str
    frames: tuple[str, ...]
    is_current: bool


class Stacks(msgspec.Struct, frozen=True):
    """All that was printed at one moment."""

    preamble: tuple[str, ...]
    threads: tuple[ThreadStack, ...]

    @property
    def main(self) -> ThreadStack | None:
        """The thread that handled the signal, if that is the program's: the main one, or who died.

        Failing that the last: faulthandler goes from the youngest to the oldest.
        """
        current = next((thread for thread in self.threads if thread.is_current), None)
        if current is not None and not _is_ours(current):
            return current
        threads = [thread for thread in self.threads if thread.title.startswith("Thread 0x")]
        return threads[-1] if threads else current


def read_stacks(text: str) -> Stacks:
    """Take faulthandler's text apart; text of another form ends up in the preamble."""
    preamble: list[str] = []
    blocks: list[tuple[str, list[str]]] = []
    for line in printable_lines(text):
        if line.endswith(_TITLE_END):
            blocks.append((line, []))
        elif blocks and line.startswith("  "):
            blocks[-1][1].append(line)
        elif line.strip() and not line.startswith("Extension modules: "):
            preamble.append(line)
    return Stacks(
        tuple(preamble),
        tuple(
            ThreadStack(title, _without_outer_frames(frames), title.startswith("Current thread 0x"))
            for title, frames in blocks
        ),
    )


def fatal_lines(text: str) -> list[str]:
    """The stacks of all threads at a fatal signal, for showing: that of the signal first.

    Other threads that run nothing but code of ours are told in a line.
    """
    stacks = read_stacks(text)
    main = stacks.main
    lines, own = list(stacks.preamble), 0
    # Python 3.14 tells the C stack of the same thread last.
    for thread in sorted(
        stacks.threads, key=lambda each: (each is not main, not each.title.startswith("Current"))
    ):
        if thread is not main and _is_ours(thread):
            own += 1
        else:
            lines += [thread.title, *thread.frames]
    if own:
        lines.append(f"... ({own} thread{'s' * (own > 1)} of rankwise)")
    return shorten_lines(lines, _HEAD_LINES, _TAIL_LINES)


def innermost_frames(text: str) -> tuple[str, ...]:
    """Where a hanging worker stands: the innermost frames of its main thread."""
    main = read_stacks(text).main
    if main is None:
        return ()
    # Of what is no frame, "Garbage-collecting" tells nothing, and "<no Python frame>" neither.
    lines = [line for line in main.frames if _FRAME.match(line) and not _IMPORTING.match(line)]
    frames = _fold(lines)
    shown, rest = frames[:_FRAMES_OF_HANGING_MAX], frames[_FRAMES_OF_HANGING_MAX:]
    if not any(map(_is_of_program, shown)):
        # Deep in an import, say: the line of the program is what tells people where that is.
        place = next((place for place, frame in enumerate(rest) if _is_of_program(frame)), None)
        if place is not None:
            shown += [*_left_out(place), rest[place]]
            rest = rest[place + 1 :]
    return (*shown, *_left_out(len(rest)))


def is_in_cuda(text: str) -> bool:
    """Whether the main thread waits in a function of `torch.cuda` that synchronizes."""
    return bool(_SYNCHRONIZES.search(_innermost(text)))


def copy_to_host(text: str) -> str:
    """The method in the main thread's line that waits for a GPU if its tensor is there.

    Stacks of Python lack the functions of C, so the line's source tells: `.item()`, for example.
    """
    import linecache  # noqa: PLC0415 - only for hangs

    frame = _FRAME.match(_innermost(text))
    source = "" if frame is None else linecache.getline(frame["path"], int(frame["line"]))
    methods = {found[1] for found in _COPIES_TO_HOST.finditer(source)}
    return f".{methods.pop()}()" if len(methods) == 1 else ""


def _innermost(text: str) -> str:
    main = read_stacks(text).main
    frames = () if main is None else main.frames
    return next((line for line in frames if _FRAME.match(line)), "")


def frames_of_rank(text: str) -> tuple[str, ...]:
    """Where a hanging worker stands: its main thread, and what else of the program it runs.

    Threads that run nothing but libraries are told in a line each, alike ones together; our own are
    not told.
    """
    stacks = read_stacks(text)
    lines, idle = list(innermost_frames(text)), list[str]()
    for thread in stacks.threads:
        frames = [line for line in thread.frames if _FRAME.match(line)]
        if thread is stacks.main or not frames:
            continue
        own = [place for place, frame in enumerate(frames) if _is_of_program(frame)]
        if own:  # what lies outside of the program has started the thread
            shown = _fold(frames[: own[-1] + 1])[:_FRAMES_OF_HANGING_MAX]
            lines += ["  another thread:", *(f"  {frame}" for frame in shown)]
        elif not any(BOOT_DIRECTORY in frame for frame in frames):
            idle.append(_place_in_words(frames[0]))
    for place in dict.fromkeys(idle):
        count = idle.count(place)
        who = "another thread" if count == 1 else f"{count} other threads"
        lines.append(f"  ... ({who} at {place})")
    return tuple(lines)


def folded_stacks(text: str) -> str:
    """All stacks as faulthandler or py-spy tells them, but torch and rankwise in a line each."""
    return "\n".join(_folded(text.splitlines()))


def _is_ours(thread: ThreadStack) -> bool:
    return bool(thread.frames) and all(map(_OUTER.match, thread.frames))


def _left_out(count: int) -> list[str]:
    return [f"  ... ({count} more frames)"] if count else []


def _is_of_program(frame: str) -> bool:
    found = _FRAME.match(frame)
    return found is not None and not _LIBRARY.search(found["path"])


def _fold(frames: Sequence[str]) -> list[str]:
    """Tell in a line how torch or rankwise work inside: what matters is who called them."""
    folded = _folded(frames)
    return folded if any(map(_FRAME.match, folded)) else list(frames)


def _folded(lines: Iterable[str]) -> list[str]:
    folded: list[str] = []
    for library, group in groupby(lines, folded_library):
        together = list(group)
        folded += [folded_in_words(len(together), library)] if library else together
    return folded


def place_in_program(text: str) -> str:
    """Where a worker stands in its program, as `loader.py:31, in read`; libraries do not count."""
    main = read_stacks(text).main
    frames = [match for line in main.frames if (match := _FRAME.match(line))] if main else []
    own = (frame for frame in frames if not _LIBRARY.search(frame["path"]))
    frame = next(own, None)
    return "" if frame is None else _place_in_words(frame[0])


def _place_in_words(line: str) -> str:
    frame = _FRAME.match(line)
    assert frame is not None, "asked for a frame"
    name = "" if frame["name"] == "<module>" else f", in {frame['name']}"
    return f"{frame['path'].rpartition('/')[2]}:{frame['line']}{name}"


def _without_outer_frames(frames: Sequence[str]) -> tuple[str, ...]:
    """Take off the outermost frames, which are ours; a stack of nothing else is left alone."""
    end = len(frames)
    while end and _OUTER.match(frames[end - 1]):
        end -= 1
    return tuple(frames[:end] if end else frames)
