"""What is different when the console is a terminal: colours, and bytes that would break it."""

import re
from collections.abc import Mapping

PALETTE = tuple(b"\x1b[%dm" % code for code in (36, 33, 32, 35, 34, 96, 93, 92, 95, 94))
"""One colour per rank, taken in turn. Red and its bright sister are left to errors."""

RESET = b"\x1b[0m"

# Control characters but for tab and newline: some ring, some switch the character set, and some
# make the terminal swallow all that follows.
_SUSPICIOUS = bytes(byte for byte in (*range(0x20), 0x7F) if byte not in b"\t\n")
# Colours and "erase to the end of the line" are welcome; other escape sequences are not.
_UNSAFE = re.compile(rb"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]|\x1b(?!\[[0-9;:]*[mK])")


def colour_is_wanted(environment: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Whether to use colours: NO_COLOR forbids, FORCE_COLOR and CLICOLOR_FORCE demand them."""
    if environment.get("NO_COLOR"):
        return False
    if any(
        environment.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")
    ):
        return True
    return is_terminal and environment.get("TERM") != "dumb"


def colour_of(rank: int) -> bytes:
    """The escape sequence of a rank's colour."""
    return PALETTE[rank % len(PALETTE)]


def harmless(text: bytes) -> bytes:
    """`text` with every control character that could wedge a terminal spelled in caret notation.

    Colours stay. Bytes of 128 and above stay: in UTF-8 they can at worst look odd.
    """
    # Deleting and comparing lengths is how bytes are searched for many values in one pass of C.
    if len(text.translate(None, _SUSPICIOUS)) == len(text):
        return text
    return _UNSAFE.sub(lambda match: b"^%c" % (match[0][0] ^ 0x40), text)
