"""Groups of ranks. As in torch, every rank makes all groups, in the same order."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankwise.base.errors import LocalProtocolError
from rankwise.base.wording import ranks_in_words

if TYPE_CHECKING:
    from rankwise.sim.runtime.distributed import Distributed


_WORLD = "world"


class ProcessGroup:
    """Some ranks that hold collectives among themselves.

    Attributes:
        ranks: its members in their order in the group.
        name: how messages call it.
        label: its name and members where the word `group` stands before it; empty for the group of
            all ranks, which needs no name.
        is_world: whether it is the group of all ranks, which messages need not name.
        is_in_use: whether it has had a collective that is not short.
    """

    def __init__(
        self,
        distributed: "weakref.ref[Distributed]",
        ranks: tuple[int, ...],
        name: str,
        short_name: str = "",
    ) -> None:
        # Weak, because a reference to a group must not keep its context alive.
        self._distributed = distributed
        self.ranks = ranks
        self.name = name
        self.is_world = name == _WORLD
        self.is_in_use = False
        self._text = f"{name} ({ranks_in_words(ranks)})"
        self.label = "" if self.is_world else f"{short_name or name} ({ranks_in_words(ranks)})"

    def rank(self) -> int:
        """The place in the group of the rank that is running; -1 if it is not a member."""
        distributed = self._distributed()
        assert distributed is not None, "a group is asked while its context is there"
        return distributed.get_rank(self)

    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name} of ranks {list(self.ranks)}>"


class GroupRegistry:
    """The groups of one world of ranks."""

    def __init__(self, distributed: "Distributed") -> None:
        self._distributed = weakref.ref(distributed)
        self._world: ProcessGroup | None = None
        self._groups: list[ProcessGroup] = []
        self._made: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all groups: the ranks have gone."""
        self._world = None
        self._groups.clear()
        self._made.clear()

    def world(self, size: int) -> ProcessGroup:
        """The group of all ranks, of which there are so many."""
        if self._world is None or self._world.size() != size:
            self._world = ProcessGroup(self._distributed, tuple(range(size)), _WORLD)
        return self._world

    def all_of(self, size: int) -> list[ProcessGroup]:
        """The group of all ranks, of which there are so many, and those that ranks have made."""
        return [self.world(size), *self._groups]

    def of_name(self, name: str) -> ProcessGroup | None:
        """The group that ranks have made with a name; None if there is none."""
        return next((group for group in self._groups if group.name == name), None)

    def make(self, rank: int, members: Sequence[int], world_size: int) -> ProcessGroup:
        """Let a rank make its next group: a new one, or the one that another rank made first.

        Raises:
            LocalProtocolError: there are no such members, or another rank made another group.
        """
        ranks = tuple(members)
        for member in ranks:
            if not 0 <= member < world_size:
                raise LocalProtocolError(
                    f"new_group got rank {member}; ranks are 0 to {world_size - 1}"
                )
        if not ranks or len(set(ranks)) < len(ranks):
            raise LocalProtocolError(f"new_group got {list(ranks)}: no rank, or one twice")
        number = self._made.get(rank, 0)
        self._made[rank] = number + 1
        if number == len(self._groups):
            name, short_name = f"group {number}", str(number)
            self._groups.append(ProcessGroup(self._distributed, ranks, name, short_name))
        group = self._groups[number]
        if group.ranks != ranks:
            raise LocalProtocolError(
                f"rank {rank} makes group {number} of ranks {list(ranks)}, another"
                f" rank made it of {list(group.ranks)}",
                hint="every rank has to make all groups, in the same order",
            )
        return group
