"""What a collective algorithm is written in: the program of one rank.

An algorithm is a module with a function `program(task)`, a generator of instructions: what the rank
`task.rank` sends, receives, combines and copies, one after the other. All ranks run the same
function, as a kernel's programs do. It neither waits nor computes: the instructions are data, and
three readers share them. The *calculation* checks that every message has a receiver, and works out
the numbers; the *executor* plays the same instructions in simulated time, through the queues
between the PEs; a test adds up the bytes.

Each rank has a *workspace*, a row of elements that instructions address by `Span`. How a collective
lays its operands there is fixed, so that algorithms are interchangeable (`n` ranks, `N` elements):

================ =========================== ====================
collective       operand                     result
================ =========================== ====================
all_reduce       `[0, N)`                    `[0, N)`
reduce           `[0, N)`                    `[0, N)` at the root
broadcast        `[0, N)` at the root        `[0, N)`
all_gather       block `rank` of `[0, n N)`  `[0, n N)`
reduce_scatter   `[0, n N)`                  block `rank` of it
all_to_all       `[0, n N)`                  `[n N, 2 n N)`
gather           block `rank` of `[0, n N)`  `[0, n N)` at the root
scatter          `[0, n N)` at the root      block `rank` of it
barrier          `[0, 1)`                    nothing
================ =========================== ====================

The rest is scratch; `scratch_elements(task)` of the module says how much of it there is.

Messages between two ranks arrive in the order in which they were sent. Programs receive them in
that order, whatever their channels; in simulated time, messages of a channel do not wait for those
of others. Sending reads the span at that place of the program, whenever the bytes leave. Combining
is `workspace op incoming`, rounded to the dtype; since that is commutative, the order in which a
rank receives is the order of the sum.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias


class Span(NamedTuple):
    """Elements `start` up to, not including, `stop` of a workspace."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many elements it has."""
        return self.stop - self.start


Switching: TypeAlias = Literal["passes", "copies", "combines"]
"""What a switch does with a message, if it can (`Task.multicast`); else it passes it on.

Sends of one span that follow each other are one message that it *copies* to all of their peers.
Receives into one span that follow each other are one message, into which it *combines* those of all
peers. A message that is combined is sent as any other one is.
"""


class Send(NamedTuple):
    """Send a span of the workspace to the rank `peer`.

    Attributes:
        channel: where there are queues between ranks, it has one of its own; else it means nothing.
        switch: what a switch that can does with it (`Switching`).
    """

    peer: int
    span: Span
    channel: int = 0
    switch: Switching = "passes"


class Receive(NamedTuple):
    """Receive the next message of the rank `peer` into a span, or combine it with what is there."""

    peer: int
    span: Span
    combines: bool = False
    channel: int = 0
    switch: Switching = "passes"


class Copy(NamedTuple):
    """Copy a span of the workspace to another place in it, which does not overlap."""

    source: Span
    target: Span


class Fold(NamedTuple):
    """Combine equally long spans, in the given order and in f32, and round once into `target`."""

    sources: tuple[Span, ...]
    target: Span


Instruction: TypeAlias = Send | Receive | Copy | Fold


class Task(NamedTuple):
    """Which part of which collective a program is for.

    Attributes:
        rank: whose program it is, counted inside the group.
        size: how many ranks take part.
        elements: `N` of the table above.
        root: the root of a collective that has one.
        ring: the ranks in the order in which a ring visits them.
        homes: for each rank the device that it lives on; ranks with equal homes are close.
        axes: how many devices are in a unit of each level of the network, from the inside out.
        multicast: how many devices are at each switch that copies and combines; 0 if none does.
    """

    rank: int
    size: int
    elements: int
    root: int = 0
    ring: tuple[int, ...] = ()
    homes: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    multicast: int = 0

    @property
    def position(self) -> int:
        """Where on the ring this rank is."""
        return self.ring.index(self.rank) if self.ring else self.rank

    def at(self, position: int) -> int:
        """The rank at a position of the ring, counted modulo its size."""
        return self.ring[position % self.size] if self.ring else position % self.size

    def block(self, index: int) -> Span:
        """Block `index`, modulo the size, of a workspace that has `elements` for each rank."""
        start = index % self.size * self.elements
        return Span(start, start + self.elements)

    def part(self, index: int) -> Span:
        """Part `index`, modulo the size, of `elements` cut in as many parts as there are ranks."""
        return _parts(self.elements, self.size)[index % self.size]


@lru_cache(maxsize=64)
def _parts(elements: int, count: int) -> tuple[Span, ...]:
    """All parts at once: every rank of a collective asks for the same ones, over and over."""
    everything = Span(0, elements)
    return tuple(part_of(everything, index, count) for index in range(count))


Program: TypeAlias = Iterator[Instruction]


def part_of(span: Span, index: int, count: int) -> Span:
    """Part `index` of a span that is cut in `count` parts whose lengths differ by one at most."""
    return Span(
        span.start + span.length * index // count, span.start + span.length * (index + 1) // count
    )
