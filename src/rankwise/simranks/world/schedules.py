"""The choices that a run leaves open, and their owner: order of ranks, order of senders.

Without a schedule ranks run in the order in which they became ready. With one, each time that
several ranks are ready is a *choice*, and so is each receive from any source: it is matched when
no rank can go on, so that every message which may come first is there to be chosen. Ranks let
others run before they touch a file, since files are how ranks can race each other unseen.

The choices of a run are its schedule: a run that makes the same choices is the same run.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple


class Choice(NamedTuple):
    """One thing that was decided: which of how many, and whether they were messages."""

    chosen: int
    ways: int
    is_message: bool


class Schedule:
    """Makes the choices of one run, and remembers them.

    Args:
        first: the choices to begin with.
        chance: makes the choices that follow; None takes the first of what there is.

    Attributes:
        forced: how many choices were given.
        is_by_chance: whether chance makes the others.
        choices: those made so far.
        has_strayed: whether a choice of `first` could not be made: the program has changed.
    """

    def __init__(self, first: Sequence[int] = (), chance: random.Random | None = None) -> None:
        self._first = first
        self._chance = chance
        self.forced = len(first)
        self.is_by_chance = chance is not None
        self.choices: list[Choice] = []
        self.has_strayed = False

    def choose(self, count: int, *, is_message: bool = False) -> int:
        """Choose one of several, by its index."""
        if count == 1:
            return 0
        made = len(self.choices)
        if made < len(self._first):
            chosen = min(self._first[made], count - 1)
            self.has_strayed |= chosen != self._first[made]
        else:
            chosen = self._chance.randrange(count) if self._chance is not None else 0
        self.choices.append(Choice(chosen, count, is_message))
        return chosen


class Exploration:
    """Chooses one schedule after the other, no two of them equal.

    The first takes what comes first. Each later one follows an earlier one up to some choice, and
    there takes another way. Receives from any source are enumerated before all else: each way that
    they can be matched, with the ranks in their usual order. Then the rest is left to chance.
    """

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)  # noqa: S311  # simulation, no secret
        self._messages: list[tuple[int, ...]] = []
        self._branches: list[tuple[list[Choice], int, int]] = []
        self._has_begun = False

    def next_schedule(self) -> Schedule | None:
        """The next one; None if there is no other."""
        if not self._has_begun:
            self._has_begun = True
            return Schedule()
        if self._messages:
            return Schedule(self._messages.pop(0))
        if not self._branches:
            return None
        at = self._chance.randrange(len(self._branches))
        self._branches[at], self._branches[-1] = self._branches[-1], self._branches[at]
        choices, place, instead = self._branches.pop()
        first = (*(choice.chosen for choice in choices[:place]), instead)
        return Schedule(first, random.Random(self._chance.getrandbits(64)))  # noqa: S311  # the same

    def learn(self, schedule: Schedule) -> None:
        """Take note of the ways that a run did not take after what its schedule began with."""
        choices = schedule.choices
        for place in range(schedule.forced, len(choices)):
            chosen, ways, is_message = choices[place]
            for instead in range(ways):
                if instead == chosen:
                    continue
                if is_message and not schedule.is_by_chance:
                    first = tuple(choice.chosen for choice in choices[:place])
                    self._messages.append((*first, instead))
                else:
                    self._branches.append((choices, place, instead))
