"""What looks wrong in a run that did not fail, and would perhaps on a cluster.

- A *handle* is what an asynchronous operation returns. One without a wait may be under way
  while its tensors are used.
- A message or an operation that is still open at the end was never met by its other side.
- Groups that have two ranks in common must be used in the same order by both: a backend with a
  stream per group hangs otherwise, now and then. Threads of a rank use groups in no order.

Nothing here changes what the ranks do.
"""

from typing import TYPE_CHECKING, NamedTuple

from rankwise.core.matching import OrderBreak
from rankwise.simranks.world.places import CallSite, place_here, place_of_caller

if TYPE_CHECKING:
    from rankwise.simranks.world.collective_groups import CollectiveGroup, PendingCollective, Post

_SHOWN = 10


class Handle(NamedTuple):
    """An operation that a rank has begun and not waited for yet."""

    rank: int
    gate: "PendingCollective | Post"
    place: CallSite


class Alarms:
    """Takes note of what looks wrong; alike things at one place are one alarm."""

    def __init__(self) -> None:
        self._handles: dict[int, Handle] = {}
        self._handle_count = 0
        self._alarms: dict[tuple[str, str], list[str]] = {}

    def begin_attempt(self) -> None:
        """Forget the handles of ranks that are no more."""
        self._handles = {}

    def open_handle(
        self, rank: int, gate: "PendingCollective | Post", interface: tuple[str, ...]
    ) -> int | None:
        """A rank has begun an operation; returns what `close_handle` wants.

        None if a library has begun it, and not the program through the files of the `interface`:
        libraries have ways to know that an operation is over.
        """
        place = place_of_caller(interface)
        if place is None:
            return None
        self._handle_count += 1
        self._handles[self._handle_count] = Handle(rank, gate, place)
        return self._handle_count

    def close_handle(self, number: int) -> Handle | None:
        """A rank has waited for it."""
        return self._handles.pop(number, None)

    def note_misuse(self, handle: Handle, doing: str) -> None:
        """Tell what the rank did to a tensor between the operation's begin and the wait for it."""
        text = (
            f"rank {handle.rank} {doing} while {handle.gate.label()} was in "
            f"flight: it was called at {handle.place} and waited for at {place_here()}"
        )
        self._note("misuse", handle.place, text)

    def note_order(
        self, pending: "PendingCollective", found: OrderBreak, other: "CollectiveGroup"
    ) -> None:
        """Ranks have come to a collective with other numbers of calls in a group that overlaps."""
        place = pending.arrivals[found.rank].place
        self._note(
            "order", place,
            f"ranks {found.first} and {found.rank} use overlapping groups in different order: "
            f"{pending.label()} comes after {_operations(found.done_by_first)} of group "
            f"{other.describe()} on rank {found.first}, at {pending.arrivals[found.first].place}, "
            f"and after {_operations(found.done_by_rank)} on rank {found.rank}, at {place}",
        )  # fmt: skip

    def note_shapes(self, pending: "PendingCollective", doings: str) -> None:
        """Tensors have equal sizes and different shapes, which is perhaps not meant."""
        place = next(iter(pending.arrivals.values())).place
        text = f"{pending.label()} has tensors of equal size and different shape:\n{doings}"
        self._note("shape", place, text)

    def note_layout(self, text: str) -> None:
        """A tensor lies in memory in such a way that a backend takes more than it."""
        place = place_here()
        self._note("layout", place, f"{place}: {text}")

    def remarks(self, *, is_success: bool) -> list[str]:
        """What the user should know at the end, each in a line."""
        if is_success:
            for handle in self._handles.values():
                self._note_handle(handle)
            self._handles = {}
        shown = [
            f"warning: {texts[0]}" + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else "")
            for texts in self._alarms.values()
        ]
        rest = len(shown) - _SHOWN
        return shown if rest <= 0 else [*shown[:_SHOWN], f"{rest} more warnings are not shown"]

    def _note_handle(self, handle: Handle) -> None:
        what = handle.gate.label()
        if handle.gate.is_open:
            text = f"rank {handle.rank} never waited for {what}, called at {handle.place}"
        else:
            missing = handle.gate.missing_text()
            text = f"rank {handle.rank} called {what} at {handle.place}, and {missing}"
        self._note("handle", handle.place, text)

    def _note(self, kind: str, place: CallSite | None, text: str) -> None:
        self._alarms.setdefault((kind, str(place)), []).append(text)


def _operations(count: int) -> str:
    return "1 operation" if count == 1 else f"{count} operations"
