"""Where in the user's program: the line that a report names.

Lines of rankwise, of Python's library and of what is installed lie between the user's line and the
operation, torch's most of all. A place is kept as a code object and the offset of an instruction;
its line and its words are looked for on request.
"""

import sys
from functools import cache
from types import CodeType, FrameType

import msgspec

from rankwise.simranks.world.modules import is_shared

OUR_PACKAGE = __file__.rpartition("/simranks/")[0]


class CallSite(msgspec.Struct, frozen=True, gc=False):
    """A line of a program, as the instruction of it that has called something."""

    code: CodeType
    instruction: int

    @property
    def line(self) -> int:
        """Its number."""
        spans = self.code.co_lines()
        found = (line for begin, end, line in spans if begin <= self.instruction < end)
        return next(found, None) or self.code.co_firstlineno

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line} in {self.code.co_name}"


def place_of(frame: FrameType | None) -> CallSite | None:
    """The innermost line of the user's among these frames, or the innermost that is not ours."""
    foreign = None
    while frame is not None:
        code = frame.f_code
        owner = owner_of(code.co_filename)
        if owner == "user":
            return CallSite(code, frame.f_lasti)
        if owner == "library" and foreign is None:
            foreign = frame
        frame = frame.f_back
    return None if foreign is None else CallSite(foreign.f_code, foreign.f_lasti)


def places_of(frame: FrameType | None) -> list[CallSite]:
    """The user's lines among these frames, innermost first; without any, what `place_of` gives."""
    innermost = place_of(frame)
    places: list[CallSite] = []
    while frame is not None:
        if owner_of(frame.f_code.co_filename) == "user":
            places.append(CallSite(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return places or ([] if innermost is None else [innermost])


def is_in_import(frame: FrameType | None) -> bool:
    """Whether the innermost line of the user's imports a library, whose code runs right now."""
    has_imported = False
    while frame is not None:
        file = frame.f_code.co_filename
        if owner_of(file) == "user":
            break
        has_imported |= file == "<frozen importlib._bootstrap>"
        frame = frame.f_back
    return has_imported


def place_of_caller(interface: tuple[str, ...]) -> CallSite | None:
    """The user's line that has called an interface; None if a library has called it.

    `interface` are the ends of the names of its files.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # as below
    while frame is not None:
        file = frame.f_code.co_filename
        owner = owner_of(file)
        if owner == "user":
            return CallSite(frame.f_code, frame.f_lasti)
        if owner == "library" and not file.endswith(interface):
            return None
        frame = frame.f_back
    return None


def place_here() -> CallSite | None:
    """The same, of the caller."""
    return place_of(sys._getframe(1))  # noqa: SLF001  # the only way that costs no stack


@cache
def owner_of(file: str) -> str:
    """The owner of a file: `rankwise`, `library` or `user`."""
    if file.startswith((f"{OUR_PACKAGE}/", "<frozen ")):
        return "rankwise"
    is_of_library = is_shared(file) or file.startswith("<eval_with_key>")  # a graph of torch.fx
    return "library" if is_of_library else "user"
