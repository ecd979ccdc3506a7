"""What a terminal is spared, and when there are colours."""

import pytest

from rankwise.drivers.real.logs.terminal import colour_is_wanted, colour_of, harmless


@pytest.mark.parametrize(
    ("environment", "is_terminal", "is_wanted"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"CLICOLOR_FORCE": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colours_follow_the_terminal_unless_somebody_decides(
    environment: dict[str, str], *, is_terminal: bool, is_wanted: bool
) -> None:
    assert colour_is_wanted(environment, is_terminal=is_terminal) is is_wanted


def test_neighbouring_ranks_have_different_colours_and_every_rank_has_one() -> None:
    assert colour_of(0) != colour_of(1)
    assert colour_of(10_000).startswith(b"\x1b[")


@pytest.mark.parametrize(
    "text",
    [
        b"plain\ttext\n",
        "Grüße …\n".encode(),
        b"\x1b[31mred\x1b[0m\n",
        b"bar\x1b[K\n",
        b"\xff\xfe\n",
    ],
)
def test_what_does_no_harm_stays_as_it_is(text: bytes) -> None:
    assert harmless(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"bell \x07\n", b"bell ^G\n"),
        (b"shift out \x0e\n", b"shift out ^N\n"),
        (b"nul \x00 del \x7f\n", b"nul ^@ del ^?\n"),
        (b"device control \x1bPq\n", b"device control ^[Pq\n"),
        (b"up \x1b[A and \x1b[1mbold\n", b"up ^[[A and \x1b[1mbold\n"),
        (b"reset \x1bc\n", b"reset ^[c\n"),
    ],
)
def test_what_would_wedge_a_terminal_is_spelled_out(text: bytes, shown: bytes) -> None:
    assert harmless(text) == shown
