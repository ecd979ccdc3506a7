"""Where a function finds out, inside a child, which child that is and what it belongs to."""

from typing import TYPE_CHECKING

from rankwise.base.errors import LocalProtocolError
from rankwise.workers.errors import UnknownName

if TYPE_CHECKING:
    from rankwise.workers.chip_worker import ChipWorker
    from rankwise.workers.member import Member


class ChildContext:
    """One child of a worker.

    Attributes:
        level: the level of the worker that it is a child of.
        kind: "sub", "chip" or "next_level".
        index: its number among those of its kind.
        path: what to call it: `chip 1`, `chip 1 of worker 0`.
        chip: the chip, in a chip's process; else None.
    """

    def __init__(self, level: int, kind: str, index: int, path: str) -> None:
        self.level = level
        self.kind = kind
        self.index = index
        self.path = path
        self.chip: ChipWorker | None = None
        self._members: dict[str, Member] = {}

    def __getitem__(self, name: str) -> "Member":
        """This child's place in a domain.

        Raises:
            UnknownName: it is in no domain of that name; it is a `KeyError`.
        """
        member = self._members.get(name)
        if member is None:
            known = ", ".join(map(repr, self._members)) or "none"
            raise UnknownName(f"{self.path} is in no domain {name!r}; it is in {known}")
        return member

    @property
    def communicator(self) -> "Member":
        """The place of this process's chip in the communicator that it was brought up with.

        Raises:
            LocalProtocolError: this process has no chip, or the chip no communicator.
        """
        member = None if self.chip is None else self.chip.bootstrap_member
        if member is None:
            raise LocalProtocolError(
                f"{self.path} has no communicator",
                hint="give its chip a ChipCommBootstrapConfig, or open a domain",
            )
        return member

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def join(self, name: str, member: "Member") -> None:
        """Enter a domain."""
        if name in self._members:
            raise LocalProtocolError(f"{self.path} is in domain {name!r} already")
        self._members[name] = member

    def leave(self, name: str) -> None:
        """Leave a domain, if it is in it."""
        member = self._members.pop(name, None)
        if member is not None:
            member.close()

    def give_up(self, reason: str) -> None:
        """Tell all peers in its domains and communicators not to wait for this child any more."""
        members = list(self._members.values())
        if self.chip is not None and self.chip.bootstrap_member is not None:
            members.append(self.chip.bootstrap_member)
        for member in members:
            member.region.mark_dead(member.rank, reason)

    def leave_all(self) -> None:
        """Leave all domains."""
        for name in list(self._members):
            self.leave(name)


_current: ChildContext | None = None


def context() -> ChildContext:
    """The child in which this is called.

    Raises:
        LocalProtocolError: this process is no child of a worker.
    """
    if _current is None:
        raise LocalProtocolError(
            "context() was called outside of a worker's children",
            hint="it is for functions that are submitted as tasks",
        )
    return _current


def enter(child: ChildContext) -> None:
    """Say what this process is; called once, when it comes up."""
    global _current  # noqa: PLW0603  # a process is one child
    _current = child


def path_here() -> str:
    """What to call this process, empty where it is no child."""
    return "" if _current is None else _current.path
