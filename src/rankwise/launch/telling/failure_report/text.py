r"""Foreign text made fit for a terminal and for a log.

Output and exceptions of a program may contain anything: colours, cursor movements, half characters,
a megabyte in one line, marks that turn the direction of writing. A report must show it and must not
obey it. Escape sequences, which are invisible, are removed; any other control character is shown as
its escape (`\x07`), as are the halves of surrogates that stand for undecodable bytes.
"""

import re

LINE_LENGTH_MAX = 2_000
"""Characters of one line that a report shows, at most."""

_ESCAPE_SEQUENCE = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: window titles, links
    r"|[PX^_][^\x1b]*\x1b\\"  # DCS and other strings
    r"|[ -/]+[0-~]"  # character sets
    r"|[0-OQ-WYZ\\`-~]"  # two characters
    r")"
)
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(line: str, length_max: int = LINE_LENGTH_MAX) -> str:
    """One line without anything that a terminal would obey, shortened in the middle."""
    line = shorten(line, length_max)
    if line.isascii() and line.isprintable():
        return line
    # The expansion of tabs counts columns, so the invisible has to go first.
    return _UNPRINTABLE.sub(_escaped, _ESCAPE_SEQUENCE.sub("", line).expandtabs())


def printable_lines(text: str) -> list[str]:
    r"""The lines of a text, each `printable`; only `\n` separates lines, as in a file."""
    lines = text.split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    return [printable(line.rstrip("\r")) for line in lines]


def as_on_terminal(line: str) -> str:
    """One line as a terminal shows it in the end: of a progress bar, its last state."""
    states = [state for state in line.split("\r") if state.strip()]
    return printable(states[-1].rstrip()) if states else ""


def shorten(text: str, length_max: int) -> str:
    """Leave out the middle of a long text and say how much that was."""
    if len(text) <= length_max:
        return text
    head, tail = length_max * 3 // 4, length_max // 4
    left_out = len(text) - head - tail
    return f"{text[:head]} ... ({left_out:,} characters left out) ... {text[-tail:]}"


def shorten_lines(lines: list[str], head: int, tail: int, whole_is_in: str = "") -> list[str]:
    """Leave out the middle of many lines, say how many they were and where to find them."""
    left_out = len(lines) - head - tail
    if left_out <= 1:
        return lines
    where = f"; all of them: {whole_is_in}" if whole_is_in else ""
    return [*lines[:head], f"  ... ({left_out:,} lines left out{where}) ...", *lines[-tail:]]


def first_line(text: str, length_max: int = 300) -> str:
    """The first line with anything on it, printable; dots tell that there is more."""
    lines = text.strip().split("\n", 1)
    line = printable(lines[0].strip(), length_max)
    return f"{line} ..." if len(lines) > 1 else line


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        # A byte that was no UTF-8, decoded with `surrogateescape`.
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
