"""The name that was probably meant by one that does not exist."""

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that is most like the word; None if none is near."""
    from difflib import get_close_matches  # noqa: PLC0415  # only for mistakes

    return next(iter(get_close_matches(word, list(known), 1, likeness)), None)


def hint_on_name(word: str, known: Iterable[str], otherwise: str = "expected one of") -> str | None:
    """`did you mean NAME?`, or all known names after `otherwise`; None if there are none."""
    known = list(known)
    if meant := nearest(word, known):
        return f"did you mean {meant}?"
    return f"{otherwise} {', '.join(known)}" if known else None


def hint_behind(word: str, known: Iterable[str]) -> str:
    """The hint as what follows a problem in the same line; empty if there is none."""
    hint = hint_on_name(word, known)
    return f"; {hint}" if hint else ""
