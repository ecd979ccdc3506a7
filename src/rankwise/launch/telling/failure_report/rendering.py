"""A report laid out: as plain lines, or in a box on a terminal.

The box has a rule above, a rule below and one at the left of what rankwise says. Nothing stands at
the right, and what is quoted from the program (tracebacks, stacks, stderr) has no rule at all: it
can be selected with a mouse and pasted as it was. Quoted lines and paths are never broken; the
terminal wraps them, and joins them again when they are copied. Only rankwise's own sentences are
wrapped at words.

This is done by hand, since what rich would add here is a wrapping that breaks paths, for 20 ms of
imports in the moment when the user waits for the reason.
"""

import sys
import unicodedata
from collections.abc import Iterable, Mapping
from typing import TextIO

import msgspec

from rankwise.launch.telling.failure_report.model import Block, FailureReport, RootCause

WIDTH_MAX = 110
_WIDTH_MIN = 20
_WIDTH_UNKNOWN = 80


class TerminalStyle(msgspec.Struct, frozen=True, kw_only=True):
    """What the terminal can show."""

    width: int = _WIDTH_UNKNOWN
    colour: bool = False
    unicode: bool = True


def look_of(stream: TextIO, environment: Mapping[str, str]) -> TerminalStyle:
    """Find out what the terminal behind a stream can show; NO_COLOR and TERM=dumb are heeded."""
    is_dumb = environment.get("TERM", "dumb") in {"dumb", ""}
    return TerminalStyle(
        width=_terminal_width(stream, environment),
        colour=stream.isatty() and not is_dumb and not environment.get("NO_COLOR"),
        unicode=_can_encode(stream, "╭─│├╰"),
    )


def plain_text(report: FailureReport) -> str:
    """The report as lines without any decoration, for exceptions, files and pipes."""
    lines = [report.summary, *(f"  {note}" for note in report.notes)]
    if report.root_cause is not None:
        lines += _plain_lines(report.root_cause)
    return "\n".join(lines)


def boxed_text(report: FailureReport, look: TerminalStyle) -> str:
    """The report for a terminal, the root cause in a box, each line ended by a newline."""
    return _Box(look).draw(report)


def write_report(report: FailureReport, stream: TextIO, environment: Mapping[str, str]) -> None:
    """Write the report to a stream: boxed on a terminal, plain lines anywhere else."""
    if stream.isatty():
        text = boxed_text(report, look_of(stream, environment))
    else:
        text = plain_text(report) + "\n"
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _plain_lines(cause: RootCause) -> list[str]:
    lines = [f"root cause: {cause.headline}"]
    width = max((len(field.name) for field in cause.fields), default=0) + 1
    for field in cause.fields:
        names = [f"{field.name}:", *[""] * (len(field.values) - 1)]
        lines += [
            f"  {name:<{width}} {value}" for name, value in zip(names, field.values, strict=True)
        ]
    lines += lines_of_blocks(cause.blocks)
    return [*lines, f"  hint: {cause.hint}"] if cause.hint else lines


def lines_of_blocks(blocks: Iterable[Block]) -> list[str]:
    """Blocks as lines without any decoration."""
    lines = []
    for block in blocks:
        title = f"  {block.title}:" if block.lines else f"  {block.title}"
        lines += [title, *(f"    {line}".rstrip() for line in block.lines)]
    return lines


class _Box:
    """Draws one report."""

    def __init__(self, look: TerminalStyle) -> None:
        self._look = look
        self._width = max(_WIDTH_MIN, min(look.width, WIDTH_MAX))
        self._lines: list[str] = []
        self._bar = self._rule_style("│" if look.unicode else "|")

    def draw(self, report: FailureReport) -> str:
        self._sentence(report.summary, first="", following="", style="1")
        for note in report.notes:
            self._sentence(note, first="  ", following="    ")
        if report.root_cause is not None:
            self._root_cause(report.root_cause)
        return "".join(f"{line.rstrip()}\n" for line in self._lines)

    def _root_cause(self, cause: RootCause) -> None:
        self._rule("╭", "root cause")
        bar = f"{self._bar} "
        self._sentence(cause.headline, first=bar, following=bar, style="1;31")
        name_width = max((len(field.name) for field in cause.fields), default=0)
        for field in cause.fields:
            names = [field.name, *[""] * (len(field.values) - 1)]
            for name, value in zip(names, field.values, strict=True):
                padding = " " * (name_width - len(name))
                self._lines.append(f"{bar}  {self._style('2', name)}{padding}  {value}")
        for block in cause.blocks:
            self._block(block)
        if cause.hint:
            if cause.blocks:
                self._rule("├", "hint")
                self._sentence(cause.hint, first=bar, following=bar)
            else:
                self._sentence(f"hint: {cause.hint}", first=bar, following=bar)
        self._rule("╰", "")

    def _block(self, block: Block) -> None:
        self._rule("├", block.title)
        self._lines += block.lines

    def _rule(self, corner: str, title: str) -> None:
        dash = "─" if self._look.unicode else "-"
        if not self._look.unicode:
            corner = "+"
        if not title:
            self._lines.append(self._rule_style(corner + dash * (self._width - 1)))
            return
        rest = dash * max(0, self._width - 4 - _columns(title))
        self._lines.append(
            f"{self._rule_style(corner + dash)} {self._style('1', title)} {self._rule_style(rest)}"
        )

    def _sentence(self, text: str, first: str, following: str, style: str = "") -> None:
        """Wrap at words; a word that is too long is left whole for the terminal to wrap."""
        indent, line = first, ""
        for word in text.split(" "):
            room = self._width - (2 if self._bar in indent else len(indent))
            if line and _columns(line) + 1 + _columns(word) > room:
                self._lines.append(indent + self._style(style, line.rstrip()))
                indent, line = following, word
            else:
                line = f"{line} {word}" if line else word
        self._lines.append(indent + self._style(style, line.rstrip()))

    def _rule_style(self, text: str) -> str:
        return self._style("31", text)

    def _style(self, codes: str, text: str) -> str:
        return f"\x1b[{codes}m{text}\x1b[0m" if self._look.colour and codes and text else text


def _columns(text: str) -> int:
    """How many columns a terminal needs: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.combining(character)
        else 2
        if unicodedata.east_asian_width(character) in "WF"
        else 1
        for character in text
    )


def _terminal_width(stream: TextIO, environment: Mapping[str, str]) -> int:
    import os  # noqa: PLC0415

    columns = environment.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH_UNKNOWN
    except (OSError, ValueError, AttributeError):
        return _WIDTH_UNKNOWN


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or sys.getdefaultencoding())
    except (UnicodeError, LookupError):
        return False
    return True
