"""Standard input, output and error of each rank, as descriptors.

A rank that closes one of them, or puts another file in its place, does so for itself: from then on
it has descriptors of its own there, which are moved in and out when the run token changes hands.
Until a rank does so, nothing is moved.
"""

import os
from collections.abc import Callable
from errno import EBADF
from fcntl import F_GETFL, fcntl
from typing import Any

from rankwise.simranks.world.per_rank_state import ProcessState
from rankwise.simranks.world.ranks import Rank

STANDARD = frozenset((0, 1, 2))
_close, _dup2 = os.close, os.dup2  # ranks call others


class RankDescriptors:
    """Which standard descriptors ranks have for themselves; a the per-rank states.

    Args:
        own_state: moves them, too, once there are any.
        standard: the numbers of those that ranks share until then.
    """

    def __init__(self, own_state: ProcessState, standard: frozenset[int]) -> None:
        self._own_state = own_state
        self._standard = standard
        self._home: dict[int, int] = {}
        """What the process has, by number: a copy of each one that a rank has replaced."""
        self._present: Rank | None = None
        """The rank whose descriptors are in their places."""

    @property
    def functions(self) -> tuple[tuple[Any, str, Callable[..., Any]], ...]:
        """What is replaced, and by what."""
        return (
            (os, "close", self._close),
            (os, "closerange", self._close_range),
            (os, "dup2", self._replace),
        )

    def is_own(self, rank: Rank | None, number: int) -> bool:
        """Whether this rank has another file there now than the process; any thread may ask."""
        present = self._present
        if rank is None or present is None or rank.number != present.number:
            return False
        return number in present.own_state.get(self, ())

    def move_in(self, rank: Rank) -> None:
        """Put a rank's descriptors in their places."""
        if self._present is not None:  # a rank that was given up
            self.give_back(self._present)
        own: dict[int, int] | None = rank.own_state.get(self)
        if own:
            for number, kept in own.items():
                _dup2(kept, number)
                _close(kept)
            self._present = rank

    def move_out(self, rank: Rank) -> None:
        """Keep a rank's descriptors, and put those of the process in their places."""
        if self._present is rank:
            own = rank.own_state[self]
            for number in own:
                own[number] = _copy(number)
            self._put_home(own)

    def give_back(self, rank: Rank) -> None:
        """A rank has none of its own any more."""
        if self._present is rank:
            self._put_home(rank.own_state[self])
        rank.own_state.pop(self, None)

    def end(self) -> None:
        """Keep nothing of the process."""
        if self._present is not None:
            self.give_back(self._present)
        while self._home:
            _close(self._home.popitem()[1])

    def _put_home(self, numbers: dict[int, int]) -> None:
        for number in numbers:
            _dup2(self._home[number], number)
        self._present = None

    def _make_own(self, rank: Rank, number: int) -> None:
        if not self._home:
            self._own_state.add(self)
        if number not in self._home:
            self._home[number] = _copy(number)
        rank.own_state.setdefault(self, {})[number] = number
        self._present = rank

    def _close(self, rank: Rank, original: Callable[[int], None], fd: int) -> None:
        if fd not in self._standard:
            original(fd)
            return
        if _is_closed(fd):
            raise OSError(EBADF, os.strerror(EBADF))
        self._make_own(rank, fd)
        nothing = _nothing()
        _dup2(nothing, fd)
        _close(nothing)

    def _close_range(self, rank: Rank, _original: Any, low: int, high: int) -> None:
        """Close the standard ones among them: what has a higher number may be of any rank."""
        for number in sorted(self._standard):
            if low <= number < high and not _is_closed(number):
                self._close(rank, _close, number)

    def _replace(
        self,
        rank: Rank,
        original: Callable[..., int],
        fd: int,
        fd2: int,
        inheritable: bool = True,  # as os.dup2 has it
    ) -> int:
        if fd2 not in self._standard or fd == fd2:
            return original(fd, fd2, inheritable)
        os.fstat(fd)  # which raises what a wrong one raises
        self._make_own(rank, fd2)
        original(fd, fd2, inheritable)
        if os.path.sameopenfile(fd2, self._home[fd2]):  # it has taken back what was there before
            own = rank.own_state[self]
            del own[fd2]
            if not own:
                self._present = None
        return fd2


def _is_closed(number: int) -> bool:
    try:
        return bool(fcntl(number, F_GETFL) & os.O_PATH)
    except OSError:  # by C
        return True


def _copy(number: int) -> int:
    try:
        return os.dup(number)
    except OSError:
        return _nothing()


def _nothing() -> int:
    """What stands for a closed descriptor: no other file gets its number, and none can use it."""
    return os.open(os.devnull, os.O_PATH)
