"""Reads flags as leniently as torchrun does, and hands them on in one strict spelling.

torchrun's parser takes a flag with dashes or underscores, cut down to any prefix that fits one
flag only (`--redirect=3`), with its value glued on (`-r3`, `-r=3`, `--tee=3`) or as the next word,
and several one-letter flags in one word (`-mr3`). A value that looks like a flag is refused, so
that a forgotten value does not swallow the next flag. The first word that is neither flag nor
value is the script; it and everything after it are left alone.

Flags that torchrun does not have never make one of torchrun's abbreviations ambiguous.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


class Flag(NamedTuple):
    """A flag as it may be spelled.

    Attributes:
        long: `--with-dashes`.
        short: `-x`, or None.
        takes_value: whether a value belongs to it.
        is_torchrun: whether torchrun has it too.
    """

    long: str
    short: str | None
    takes_value: bool
    is_torchrun: bool


class SpellingError(ValueError):
    """Words that cannot be read as flags; the message is one line for the user."""


def in_strict_spelling(words: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """Rewrite the flags to `--long=value` and `--long`, then `--`, then the script's words.

    Raises:
        SpellingError: a flag is unknown, ambiguous, lacks its value or has one too many.
    """
    strict: list[str] = []
    remaining = list(reversed(words))
    while remaining:
        word = remaining.pop()
        if word == "--":
            return [*strict, "--", *reversed(remaining)]
        if not _looks_like_flag(word):
            return [*strict, "--", word, *reversed(remaining)]
        if word.startswith("--"):
            strict.append(_read_long(word, remaining, flags))
        else:
            strict += _read_short(word, remaining, flags)
    return strict


def find_long(name: str, flags: Iterable[Flag]) -> Flag:
    """The flag of that name, in either spelling and possibly abbreviated."""
    dashed = name.replace("_", "-")
    candidates = [flag for flag in flags if flag.long.startswith(dashed)]
    for flag in candidates:
        if flag.long == dashed:
            return flag
    of_torchrun = [flag for flag in candidates if flag.is_torchrun]
    match of_torchrun or candidates:
        case [flag]:
            return flag
        case []:
            raise SpellingError(f"no such option: {name}{_suggestion(dashed, flags)}")
        case several:
            names = ", ".join(flag.long for flag in several)
            raise SpellingError(f"ambiguous option: {name} could be {names}")


def _read_long(word: str, remaining: list[str], flags: Sequence[Flag]) -> str:
    name, equals, glued = word.partition("=")
    flag = find_long(name, flags)
    if flag.takes_value:
        return f"{flag.long}={glued if equals else _next_value(flag.long, remaining)}"
    if equals:
        raise SpellingError(f"{flag.long} takes no value, got {glued!r}")
    return flag.long


def _read_short(word: str, remaining: list[str], flags: Sequence[Flag]) -> list[str]:
    """Read `-m`, `-r3`, `-r=3`, `-r 3` and runs of them, `-mr3`."""
    strict: list[str] = []
    letters = word[1:]
    while letters:
        name, letters = f"-{letters[0]}", letters[1:]
        flag = next((flag for flag in flags if flag.short == name), None)
        if flag is None:
            from rankwise.cli.familiar_words import option_meant  # noqa: PLC0415  # for mistakes

            if meant := option_meant(word) or option_meant(name):
                whole = word if option_meant(word) else name
                raise SpellingError(f"no such option: {whole}, did you mean {meant}?")
            inside = f" in {word}" if name != word else ""
            raise SpellingError(f"no such option: {name}{inside}")
        if flag.takes_value:
            value = letters.removeprefix("=") if letters else _next_value(name, remaining)
            return [*strict, f"{flag.long}={value}"]
        strict.append(flag.long)
    return strict


def _next_value(name: str, remaining: list[str]) -> str:
    if not remaining or _looks_like_flag(remaining[-1]):
        found = f", found {remaining[-1]}" if remaining else ""
        raise SpellingError(
            f"{name} needs a value{found} (a value that begins with a dash is glued on with =)"
        )
    return remaining.pop()


def _looks_like_flag(word: str) -> bool:
    if not word.startswith("-") or word == "-" or _NEGATIVE_NUMBER.fullmatch(word):
        return False
    # No flag's name has a space, so a word that has one is text.
    return not (word.startswith("--") and " " in word.partition("=")[0])


def _suggestion(name: str, flags: Iterable[Flag]) -> str:
    from rankwise.base.suggestions import nearest  # noqa: PLC0415  # only for mistakes
    from rankwise.cli.familiar_words import option_meant  # noqa: PLC0415  # the same

    if meant := option_meant(name):
        return f", did you mean {meant}?"
    # Without the dashes, which all of them have in common.
    close = nearest(name[2:], [flag.long[2:] for flag in flags])
    return f", did you mean --{close}?" if close else ""
