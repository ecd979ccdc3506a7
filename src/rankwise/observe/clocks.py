"""Relates the clocks of nodes to each other by the collectives that their ranks have shared.

Theory of operation
===================

No member leaves an all_reduce, a barrier and their like before all have come. So for a node N and a
reference R, of each such call

    end on R   >= begin on N + offset,    offset <= earliest end on R - latest begin on N
    end on N + offset >= begin on R,      offset >= latest begin on R - earliest end on N

where the offset is what is to be added to N's clock. Calls of one stretch of time narrow the offset
from both sides: these are *bounds*, certain without any assumption about the network. They are wide
where the same node comes last to all calls. But ranks leave such a call at about the same time, so
the *estimate* is the median of the differences of ends, within the bounds. Its *error* is how far
the median of as many could be off by chance, with 95 % confidence.

Clocks drift by microseconds a second, so each stretch of `WINDOW` and `CALLS_MIN` calls at least
has an offset of its own, and between two of them it is interpolated. Nodes that share no call with
the reference may share some with one that does.

Calls that were issued without waiting (NCCL's, `async_op=True`) tell nothing here. Where nothing
else is there, the calendars of the nodes are believed, and no error is known.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rankwise.base.units import SECOND
from rankwise.core.ledger import Stage
from rankwise.observe.story import NodeStory

WINDOW = 10 * SECOND
CALLS_MIN = 50
_CONFIDENCE = 0.98
"""Half of 1.96: ranks of a sorted sample that lie so many roots of its size off hold the median."""
_ALL_WAIT_FOR_ALL = ("all_", "barrier", "monitored_barrier", "reduce_scatter", "_all_")


class _MatchedCall(NamedTuple):
    """The latest begin and the earliest end of a call on one node."""

    begun_at: int
    ended_at: int


class _Shared(NamedTuple):
    """What a call of both nodes tells of the offset, at an instant of the node's clock."""

    at: int
    least: int
    estimate: int
    most: int


@dataclass(frozen=True, slots=True)
class NodeClock:
    """From a node's clock to that of the reference.

    Attributes:
        anchors: instants of the node's clock, each with what is to be added there.
        error: by how much that may be wrong, in nanoseconds; None if it was not found by calls.
        bound: by how much it may be wrong at most.
        calls: by how many calls it was found.
    """

    anchors: tuple[tuple[int, int], ...]
    error: int | None = 0
    bound: int = 0
    calls: int = 0

    def common(self, at: int) -> int:
        """An instant of the node, on the clock of the reference."""
        anchors = self.anchors
        if len(anchors) == 1:  # of one node, and of short runs
            return at + anchors[0][1]
        place = bisect_right(anchors, at, key=lambda anchor: anchor[0])
        if place in (0, len(anchors)):
            return at + anchors[min(place, len(anchors) - 1)][1]
        (before, low), (behind, high) = anchors[place - 1], anchors[place]
        return at + low + (high - low) * (at - before) // (behind - before)


def align(nodes: Sequence[NodeStory]) -> list[NodeClock]:
    """A clock for each node; the first node is the reference."""
    matched = [dict(_matched_calls(node)) for node in nodes]
    clocks: dict[int, NodeClock] = {0: NodeClock(((0, 0),))}
    newly = [0]
    while newly:
        known = newly.pop(0)
        for index in range(len(nodes)):
            if index not in clocks:
                clock = _by_calls(matched[known], clocks[known], matched[index])
                if clock is not None:
                    clocks[index] = clock
                    newly.append(index)
    return [clocks.get(index) or _by_calendar(nodes[0], node) for index, node in enumerate(nodes)]


def _matched_calls(node: NodeStory) -> Iterator[tuple[tuple[int, str, int], _MatchedCall]]:
    """The calls in which this node's ranks wait for ranks of others."""
    found: dict[tuple[int, str, int], _MatchedCall] = {}
    for life in node.lives.values():
        for call in life.calls:
            group = call.group
            if (
                group is None
                or len(group.members) >= group.size
                or call.stage != Stage.DONE
                or not call.signature.operation.startswith(_ALL_WAIT_FOR_ALL)
            ):
                continue
            key = (life.attempt, group.key, call.number)
            last = found.get(key)
            begun_at, ended_at = call.begun_at, call.ended_at
            if last is not None:
                begun_at, ended_at = max(begun_at, last.begun_at), min(ended_at, last.ended_at)
            found[key] = _MatchedCall(begun_at, ended_at)
    yield from found.items()


def _by_calls(
    reference: dict[tuple[int, str, int], _MatchedCall],
    clock: NodeClock,
    own: dict[tuple[int, str, int], _MatchedCall],
) -> NodeClock | None:
    shared = sorted(
        _Shared(
            here.ended_at,
            clock.common(there.begun_at) - here.ended_at,
            clock.common(there.ended_at) - here.ended_at,
            clock.common(there.ended_at) - here.begun_at,
        )
        for key, here in own.items()
        if (there := reference.get(key)) is not None
    )
    if not shared or clock.error is None:
        return None
    anchors, error, bound = [], 0, 0
    for calls in _windows(shared):
        low, high = max(call.least for call in calls), min(call.most for call in calls)
        estimates = sorted(call.estimate for call in calls)
        offset = estimates[len(calls) // 2]
        if low <= high:
            offset = min(max(offset, low), high)
        reach = math.ceil(_CONFIDENCE * math.sqrt(len(calls)))
        lowest = estimates[max(0, len(calls) // 2 - reach)]
        highest = estimates[min(len(calls) - 1, len(calls) // 2 + reach)]
        anchors.append((calls[len(calls) // 2].at, offset))
        error = max(error, abs(highest - offset), abs(offset - lowest))
        bound = max(bound, abs(high - offset), abs(offset - low))
    return NodeClock(
        tuple(anchors), min(error, bound) + clock.error, bound + clock.bound, len(shared)
    )


def _windows(shared: Sequence[_Shared]) -> list[list[_Shared]]:
    """The calls in stretches that are long enough; what is left over belongs to the last one."""
    windows: list[list[_Shared]] = [[]]
    for call in shared:
        last = windows[-1]
        if len(last) >= CALLS_MIN and call.at - last[0].at >= WINDOW:
            windows.append([])
        windows[-1].append(call)
    if len(windows) > 1 and len(windows[-1]) < CALLS_MIN:
        rest = windows.pop()
        windows[-1] += rest
    return windows


def _by_calendar(reference: NodeStory, node: NodeStory) -> NodeClock:
    return NodeClock(((0, node.wall_offset - reference.wall_offset),), None)
