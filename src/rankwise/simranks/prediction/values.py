"""What a program gets that asks for a number which was not computed (`--timing-only`).

A policy answers: a constant, numbers by a seed, or what a smaller run with real tensors has had at
the same line (`--record-values`). Without one, a float is 1.0 and a condition is false. A value
that may decide a shape or a size, a whole number or the length of a result, then has no answer.
"""

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rankwise.base.errors import ConfigError

Number = float | int | bool
_EXPECTED = "expected constant=NUMBER, seeded, or a file that --record-values has written"
_SHOWN = 8
"""Answers that the result shows of each place."""


class Asked(NamedTuple):
    """What was asked for at one line of the program.

    Attributes:
        place: the line.
        what: the kind of question, such as `float` or `rows of aten.nonzero`.
    """

    place: str
    what: str


class NoValue(ConfigError):
    """A number was asked for that has no default."""


class ValuePolicy:
    """Answers for numbers that are not computed.

    Args:
        text: the option; empty takes the defaults.
        seed: of `seeded`.

    Attributes:
        answers: how often each question was asked, and the first answers.

    Raises:
        ConfigError: the option cannot be used.
    """

    def __init__(self, text: str = "", seed: int = 0) -> None:
        self._constant: float | None = None
        self._seed: int | None = None
        self._recorded: dict[str, list[Number]] = {}
        self._random: dict[int, random.Random] = {}
        self._turns: defaultdict[tuple[int, str], int] = defaultdict(int)
        self.answers: dict[Asked, tuple[int, list[Number]]] = {}
        name, _, value = text.partition("=")
        if name == "constant" and value:
            try:
                self._constant = float(value)
            except ValueError:
                raise ConfigError(f"--values is {text}, {_EXPECTED}") from None
        elif text == "seeded":
            self._seed = seed
        elif text:
            self._recorded = _read(text)

    @property
    def has_all(self) -> bool:
        """Whether there is an answer to questions about shapes and sizes as well."""
        return self._constant is not None or self._seed is not None

    def answer(self, rank: int, asked: Asked, kind: type, most: int | None = None) -> Number:
        """The number that a rank gets; `most` is the largest that is possible.

        Raises:
            NoValue: it may decide a shape or a size, and there is no policy for it.
        """
        number: Number = self._found(rank, asked, kind, most)
        if most is not None:
            number = min(max(int(number), 0), most)
        number = float(number) if kind is float else int(number) if kind is int else bool(number)
        count, first = self.answers.get(asked, (0, []))
        self.answers[asked] = count + 1, first if count >= _SHOWN else [*first, number]
        return number

    def _found(self, rank: int, asked: Asked, kind: type, most: int | None) -> Number:
        recorded = self._recorded.get(asked.place)
        if recorded:
            turn = self._turns[rank, asked.place]
            self._turns[rank, asked.place] += 1
            return recorded[min(turn, len(recorded) - 1)]
        if self._constant is not None:
            return self._constant
        if self._seed is not None:
            source = self._random.setdefault(rank, random.Random(f"{self._seed}/values/{rank}"))  # noqa: S311  # simulation, no secret
            return source.random() if kind is not int else source.randrange((most or 99) + 1)
        if kind is int:
            raise NoValue(
                f"{asked.place} asks for {asked.what}, which is not computed with --timing-only,"
                " and may decide a shape or a size",
                hint="say what it gets: --values constant=N, seeded, or a file of --record-values",
            )
        return 1.0 if kind is float else False

    def described(self) -> list[dict[str, object]]:
        """What was asked for, where, and what it got, for the result."""
        return [
            {"place": asked.place, "what": asked.what, "times": count, "got": first}
            for asked, (count, first) in sorted(self.answers.items())
        ]


class ValueRecord:
    """The numbers that a run with real tensors has had, by line; of rank 0."""

    def __init__(self) -> None:
        self._values: dict[str, list[Number]] = {}

    def note(self, place: str, value: Number) -> None:
        """A program has asked for a number."""
        self._values.setdefault(place, []).append(value)

    def write(self, path: str) -> None:
        """Write them to a file that `--values` reads."""
        Path(path).write_text(json.dumps(self._values, indent=1) + "\n")


def _read(path: str) -> dict[str, list[Number]]:
    try:
        values: Any = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--values is {path}, {_EXPECTED}: {error}") from None
    if not isinstance(values, dict) or not all(_is_numbers(each) for each in values.values()):
        raise ConfigError(f"--values is {path}, {_EXPECTED}: it is not a map of lists of numbers")
    return dict(values)


def _is_numbers(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(each, int | float) for each in value)
