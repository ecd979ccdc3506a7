"""SIPs that do the same at the same instants: one is simulated, the others are its images.

Ranks of a large program launch the same kernel at the same instant, each on a SIP of its own and
with its tensors in the same places there. Where nothing else goes on in the machine, their launches
take the same time, part by part. So one of them, the *original*, is simulated; the others wait for
its end, are written to the op log as it is, and their links and engines are said to have been as
busy as its. Times do not depend on it, cost does.

**With data**, each calculates its own numbers, and shows at the beginning that they decide the same
(`Candidate.stands_for`).

**Nobody is in the way.** That is known at the beginning, and stays so. Launches that could be
images meet in one wave of the agenda. If it holds nothing but them, and nothing else is on the
agenda, then all that happens until the original ends is the original: what could meet an image on
the way would have to come of something. If there is anything else (a transfer, a collective, a
timer, a launch that is different by a byte), each launch is simulated by itself.
"""

from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from rankwise.sim.hardware.machine import Machine, Part
from rankwise.sim.kernel import Future, Steps


class Candidate(Protocol):
    """A launch that may have images."""

    def stands_for(self, others: Sequence[Self]) -> bool:
        """Whether those with the same likeness take the same time, whatever their data.

        To be asked once, right before it begins: whatever they calculate is there afterwards.
        """
        ...


Member = TypeVar("Member", bound=Candidate)


class _Account(NamedTuple):
    """What a part has done so far; `size` is bytes of a link, and flops of an engine."""

    busy: int
    size: int

    @classmethod
    def of(cls, part: Part) -> "_Account":
        return cls(part.busy, part.amount)

    def since(self, before: "_Account") -> "_Account":
        return _Account(self.busy - before.busy, self.size - before.size)


_NOTHING = _Account(0, 0)


class ImageGroup(Generic[Member]):
    """Launches that are images of each other.

    Args:
        machine: where they run.
        members: by device; the first one is the original, the others are its images.

    Attributes:
        original: the member that is simulated.
        images: the devices and members that are not.
        ended: happens when the original has ended.
    """

    def __init__(self, machine: Machine, members: dict[int, Member]) -> None:
        self._machine = machine
        (self._sip, self.original), *images = members.items()
        self.images = dict(images)
        self._before = {
            place: _Account.of(part) for place, part in machine.sip(self._sip).parts().items()
        }
        self.ended: Future = machine.simulator.future(f"the launch on sip{self._sip}")

    def end(self) -> None:
        """The original has ended: so have its images, and their parts have done what its did."""
        sip = self._machine.sip(self._sip)
        images = [self._machine.sip(number) for number in self.images]
        for place, part in sip.parts().items():
            done = _Account.of(part).since(self._before.get(place, _NOTHING))
            for image in images:
                image.part(place).account(done.size, done.busy)
        for pe in sip.pes_in_use():
            for image in images:
                image.cube(pe.cube.number).pe(pe.number).dma_turn = pe.dma_turn
        self.ended.succeed()


class Images(Generic[Member]):
    """The launches on a machine that may be images of each other.

    Attributes:
        are_allowed: whether there are any; set it to False to have every launch simulated.
        count: how many launches were not simulated, but were images of another.
    """

    def __init__(self, machine: Machine) -> None:
        self.count = 0
        self.are_allowed = True
        self._machine = machine
        self._coming: list[tuple[int, Hashable, Member]] = []
        self._group: ImageGroup[Member] | None = None

    def group_of(self, sip: int, likeness: Hashable, member: Member) -> Steps:
        """Wait for those that come in the same wave; returns their group, or None.

        Args:
            sip: the device of the launch, which nothing that it does leaves.
            likeness: equal to that of another launch that does the same on its own device.
            member: the launch.
        """
        self._coming.append((sip, likeness, member))
        yield 0
        if self._coming:
            coming, self._coming = self._coming, []
            self._group = self._agreed(coming)
        return self._group

    def _agreed(self, coming: list[tuple[int, Hashable, Member]]) -> ImageGroup[Member] | None:
        members = {sip: member for sip, _, member in coming}
        agree = (
            self.are_allowed
            and 1 < len(members) == len(coming)
            and all(likeness == coming[0][1] for _, likeness, _ in coming)
            and self._machine.simulator.has_nothing_but(len(coming) - 1)
            and coming[0][2].stands_for([member for _, _, member in coming[1:]])
        )
        if not agree:
            return None
        self.count += len(coming) - 1
        return ImageGroup(self._machine, members)
