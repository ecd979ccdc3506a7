"""Exceptions in text."""

import pytest

from rankwise.base.errors import PeerDied
from rankwise.base.failure import record_of
from rankwise.base.units import Instant


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


Mute.__module__ = "__main__"


@pytest.mark.parametrize(
    ("error", "type_name", "line"),
    [
        (ValueError("no such thing"), "ValueError", "ValueError: no such thing"),
        (KeyboardInterrupt(), "KeyboardInterrupt", "KeyboardInterrupt"),
        (PeerDied("rank 1 died"), "rankwise.base.errors.PeerDied", "PeerDied: rank 1 died"),
        (Mute(), "Mute", "Mute: <its text cannot be had: RuntimeError>"),
        (OSError("in /odd-\udcff"), "OSError", r"OSError: in /odd-\udcff"),
    ],
)
def test_an_exception_is_told_in_a_line(error: BaseException, type_name: str, line: str) -> None:
    record = record_of(error, "its trace \udcff", Instant(7))

    assert (record.type, record.in_a_line, record.raised_at) == (type_name, line, 7)
    assert record.traceback == r"its trace \udcff"
    assert record.in_a_line.encode()
