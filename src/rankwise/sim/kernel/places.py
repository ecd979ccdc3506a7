"""Where in the user's code? Lines are told of stacks, of suspended generators and of exceptions.

Code of this package, of the import system and of `with` lies between the user's code and the
error; it is named only where there is nothing else.
"""

import contextlib
import importlib
import os.path
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import NamedTuple

from rankwise.sim.kernel.futures import Steps

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep  # noqa: PTH100, PTH120 (compared as text with file names of code objects)
_COMPILED = os.path.join("rankwise", "sim") + os.sep  # noqa: PTH118 (the same)
"""How compiled code calls itself in tracebacks: tools/compile_kernel.py knows no other folder."""
_NOT_THE_USERS = (_PACKAGE, _COMPILED, "<frozen ", importlib.__file__, contextlib.__file__)


def _is_users(file: str) -> bool:
    return not file.startswith(_NOT_THE_USERS)


class SourceLine(NamedTuple):
    """A line of source."""

    file: str
    number: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether the user wrote it, or at least not we."""
        return _is_users(self.file)

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


def where_of(frames: Iterable[FrameType]) -> str:
    """Name the innermost line of user code among `frames`, which come innermost first."""
    lines = [_line_at(frame) for frame in frames]
    users = next((line for line in lines if line.is_users), None)
    return str(users or (lines[0] if lines else ""))


def users_line_among(frames: Iterable[FrameType]) -> str:
    """The same; empty if there is no user code among them."""
    return next((str(line) for line in map(_line_at, frames) if line.is_users), "")


def users_line() -> SourceLine | None:
    """The line of user code that is being carried out; None where there is none."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (there is no other way to the caller)
    while frame is not None:
        # Compared first, since nearly all frames on the way are ours, and this is on hot paths.
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return _line_at(frame)
        frame = frame.f_back
    return None


def _line_at(frame: FrameType) -> SourceLine:
    return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def line_of(error: BaseException, file: str | None = None) -> SourceLine | None:
    """The innermost line of user code that an exception came through; None if it met none.

    With `file`, only lines of that file count: what its author can see, if a library has raised.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return SourceLine(error.filename, error.lineno, "the module")
    lines = [
        line
        for line in lines_of_traceback(error.__traceback__)
        if line.is_users and file in {None, line.file}
    ]
    return lines[-1] if lines else None


def traceback_in_text(error: BaseException) -> str:
    """An exception as Python would have printed it, without our own frames.

    A traceback of nothing else is left alone.
    """
    whole = traceback.TracebackException.from_exception(error)
    unseen = [whole]
    while unseen:
        shown = unseen.pop()
        users = [entry for entry in shown.stack if _is_users(entry.filename)]
        shown.stack = traceback.StackSummary.from_list(users or shown.stack)
        unseen += filter(None, (shown.__cause__, shown.__context__, *(shown.exceptions or ())))
    return "".join(whole.format())


def stack_in_text(lines: Iterable[SourceLine]) -> str:
    """Lines that come innermost first, in the form that faulthandler has."""
    frames = [f'  File "{each.file}", line {each.number} in {each.function}\n' for each in lines]
    return "".join(["Current thread 0x0 (most recent call first):\n", *frames]) if frames else ""


def users_lines_among(frames: Iterable[FrameType]) -> list[SourceLine]:
    """The lines of user code among `frames`, in their order."""
    return [line for line in map(_line_at, frames) if line.is_users]


def lines_of_traceback(trace: TracebackType | None) -> Iterator[SourceLine]:
    """The lines that an exception came through, outermost first."""
    while trace is not None:
        code = trace.tb_frame.f_code
        yield SourceLine(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next


def frames_of_stack(innermost: FrameType | None) -> list[FrameType]:
    """List a stack's frames, innermost first."""
    frames = []
    while innermost is not None:
        frames.append(innermost)
        innermost = innermost.f_back
    return frames


def frames_of_generator(generator: Steps) -> list[FrameType]:
    """List the frames of a suspended generator and of those that it delegates to."""
    frames: list[FrameType] = []
    inner: object = generator
    while inner is not None:
        frame = getattr(inner, "gi_frame", None)
        if frame is None:
            break
        frames.append(frame)
        inner = getattr(inner, "gi_yieldfrom", None)
    frames.reverse()
    return frames
