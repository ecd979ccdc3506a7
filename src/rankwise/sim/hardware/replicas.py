"""SIPs that do the same: one launch is simulated, the others are its replicas, at any instant.

Ranks of a large program launch the same kernel, each on a SIP of its own and with its tensors in
the same places there. Where nothing else touches their SIPs, their launches take the same time,
part by part. So one of them, the *original*, is simulated and recorded. A *replica* is not
simulated: the op log gets the entries of its original, shifted by the difference of their begins.
At its end, its links and engines count as equally busy. Replicas change no simulated time, only
the cost of the simulation.

**With data**, each calculates its own numbers, and shows at the beginning that they decide the same
(`Candidate.calculate`).

**Idle at the beginning.** A launch is an original or a replica if its SIP is idle: no other
command runs there, no link or engine is busy, and no flow from elsewhere is in flight.

**Touched meanwhile.** A command or a flow between SIPs announces which SIPs it touches. A replica
on such a SIP is then simulated from its beginning, apart from everything else, up to the present
instant (`Simulator.catch_up`). The result is exact, because nothing has touched its SIP before. If
a command touches the SIP of an original, its replicas are simulated.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rankwise.sim.hardware.hardware_machine import HardwareMachine, Part, PartPlace
from rankwise.sim.kernel import Future, Steps

_KEPT = 16
"""Originals that are remembered, the latest ones; each has a list of its operations."""
_IN_VAIN_MAX = 16
"""After so many originals without a replica, a launch is one only if another device does the same:
to write down what it does costs a fifth of a small launch."""


class Candidate(Protocol):
    """A launch that may have replicas, or be one."""

    def calculate(self) -> tuple[Hashable, Callable[[], None]] | None:
        """Calculate what it stores; returns how it decides, and what takes its numbers back.

        None, and nothing has changed, if its data may decide otherwise on a machine. Call it right
        before the launch begins: launches that decide alike take the same time.
        """
        ...

    def is_apart_from(self, others: Sequence[Any]) -> bool:
        """Whether it shares no memory with other launches that go on."""
        ...

    def log_replica(self, entry: Any, start: int, end: int, sip: int) -> None:
        """Write an operation of the original on a SIP to the op log, as one of its own."""
        ...

    def carry_out(self, skip: int) -> Future:
        """Begin on the machine; the first so many operations are in the op log already."""
        ...


Member = TypeVar("Member", bound=Candidate)


class _Account(NamedTuple):
    """What a part has done so far; `size` is bytes of a link, and flops of an engine."""

    busy: int
    size: int


_NOTHING = 0, 0


class Original(Generic[Member]):
    """A launch that is simulated, and what it does, for its replicas.

    Attributes:
        sip: where it runs.
        member: the launch; None when it has ended.
        began: the instant.
        duration: picoseconds; None while it goes on.
        entries: its operations so far: what, and from when to when since the beginning.
        decides: how its data decides.
        replicas: those that are under way.
        together: those of them that have begun at the same instant.
        grown: happens with the next entry, and with the end.
    """

    def __init__(
        self, machine: HardwareMachine, sip: int, member: Member, decides: Hashable
    ) -> None:
        self._machine = machine
        self.sip = sip
        self.member: Member | None = member
        self.began = machine.simulator.now
        self.duration: int | None = None
        self.entries: list[tuple[Any, int, int]] = []
        self.decides = decides
        self.replicas: list[Replica[Member]] = []
        self.together: list[Replica[Member]] = []
        self.later: dict[int, list[Replica[Member]]] = {}
        """The replicas that began later, by instant; one process follows the original for each."""
        self.grown = machine.simulator.future(f"an operation of the launch on sip{sip}")
        # Plain pairs: every launch that may have replicas asks all parts of its SIP, twice.
        self._before = {place: (part.busy, part.amount) for place, part in self._parts().items()}
        self._turns_before = self._turns_now()
        self._done: list[tuple[PartPlace, _Account]] = []
        self._turns: list[tuple[int, int, int]] = []

    def _parts(self) -> dict[PartPlace, Part]:
        return self._machine.sip(self.sip).parts()

    def _turns_now(self) -> dict[tuple[int, int], int]:
        pes = self._machine.sip(self.sip).pes_in_use()
        return {(pe.cube.number, pe.number): pe.dma_turn for pe in pes}

    def note(self, entry: Any, start: int, end: int) -> None:
        """Note an operation that has just ended."""
        began = self.began
        self.entries.append((entry, start - began, end - began))
        if self.together:
            for replica in self.together:
                replica.written += 1
                replica.member.log_replica(entry, start, end, self.sip)
        if len(self.replicas) > len(self.together):
            self.tell()

    def end(self) -> None:
        """It has ended, and nothing has touched its SIP: replicas know all of what it did."""
        self.member = None
        self.duration = self._machine.simulator.now - self.began
        before = self._before
        for place, part in self._parts().items():
            busy, size = before.get(place, _NOTHING)
            done = part.busy - busy, part.amount - size
            if done != _NOTHING:
                self._done.append((place, _Account(*done)))
        for (cube, number), turn in self._turns_now().items():
            # Of another PE, the replica's own turn counts: it may have done more before.
            if turn != self._turns_before.get((cube, number), number):
                self._turns.append((cube, number, turn))
        for replica in self.together.copy():
            replica.end()
        self.tell()

    def tell(self) -> None:
        """Let those look that wait for an operation, or the end."""
        before, self.grown = self.grown, self._machine.simulator.future(self.grown.name)
        before.succeed()

    def account_on(self, sip: int) -> None:
        """Say of the parts of another SIP that they have done what those of this one did."""
        replica = self._machine.sip(sip)
        for place, done in self._done:
            replica.part(place).account(done.size, done.busy)
        for cube, pe, turn in self._turns:
            replica.cube(cube).pe(pe).dma_turn = turn


class Replica(Generic[Member]):
    """A launch that is not simulated, unless its SIP is touched.

    Attributes:
        sip: where it runs.
        began: the instant.
        member: the launch.
        written: how many operations are in the op log.
        ended: happens when it has ended, be it as a replica or not.
    """

    def __init__(
        self,
        replicas: "Replicas[Member]",
        original: Original[Member],
        sip: int,
        member: Member,
        take_back: Callable[[], None],
    ) -> None:
        self._replicas = replicas
        self._original = original
        self._take_back = take_back
        self._simulator = replicas.simulator
        self.written = 0
        self.sip = sip
        self.began = self._simulator.now
        self.member = member
        self.ended: Future = self._simulator.future(f"the launch on sip{sip}")
        original.replicas.append(self)
        self._beside = original.together
        """The replicas that began with it."""
        is_later = original.duration is not None or original.began != self.began
        is_followed = not is_later or self.began in original.later
        if is_later:
            self._beside = original.later.setdefault(self.began, [])
        self._beside.append(self)
        if not is_followed:
            self._simulator.process(self._follow(), f"replicas from sip{sip} on")

    def _follow(self) -> Steps:
        """Do what the original does, as much later as these replicas have begun later."""
        original, replicas = self._original, self._beside
        while replicas:
            now = self._simulator.now - self.began
            written = min(replica.written for replica in replicas)
            if written < len(original.entries):
                due = original.entries[written][2]
                if due > now:
                    yield due - now
                else:
                    for replica in replicas:
                        replica.write_down()
            elif original.duration is None:
                yield original.grown
            elif original.duration > now:
                yield original.duration - now
            else:
                for replica in replicas.copy():
                    replica.end()
        del original.later[self.began]

    def write_down(self) -> None:
        """Write the operations to the op log that have ended by now."""
        entries, began = self._original.entries, self.began
        now = self._simulator.now - began
        while self.written < len(entries) and entries[self.written][2] <= now:
            entry, start, end = entries[self.written]
            self.written += 1
            self.member.log_replica(entry, began + start, began + end, self._original.sip)

    def end(self) -> None:
        """It has ended as its original has, and its parts have done what that one's have."""
        self._leave()
        self._original.account_on(self.sip)
        self.ended.succeed()

    def simulate(self) -> None:
        """Something is about to touch its SIP: carry it out from its beginning up to now."""
        self._leave()
        self._original.tell()  # the process that followed it has nothing to wait for any more
        self._replicas.count -= 1
        self._take_back()
        self._simulator.catch_up(self.began, self._begin)

    def _begin(self) -> None:
        self.member.carry_out(self.written).add_callback(self._pass_on)

    def _pass_on(self, done: Future) -> None:
        if done.failure is not None:
            self.ended.fail(done.failure)
        else:
            self.ended.succeed()

    def _leave(self) -> None:
        self._original.replicas.remove(self)
        self._beside.remove(self)
        self._replicas.forget(self)


class Replicas(Generic[Member]):
    """The launches on a machine that may be replicas of each other.

    Attributes:
        are_allowed: whether there are any; set it to False to have every launch simulated.
        count: how many launches were not simulated, but were replicas of another.
        simulator: the simulation.
    """

    def __init__(self, machine: HardwareMachine) -> None:
        self.count = 0
        self.are_allowed = machine.topology.sip_count > 1
        self.simulator = machine.simulator
        self._machine = machine
        self._coming: list[tuple[int, Hashable, Member]] = []
        self._roles: dict[int, Original[Member] | Replica[Member]] = {}
        """By SIP, of the launches that go on."""
        self._originals: dict[Hashable, Original[Member]] = {}
        self._in_vain = 0
        """How many originals there have been since the last replica."""
        self._seen: dict[Hashable, int] = {}
        """By likeness, the SIP of the latest launch that was not calculated beforehand."""
        self._commands: dict[int, int] = {}
        """How many commands are being carried out, by the SIP that they touch; -1 for all."""
        machine.on_touch = self.touch

    def begin_command(self, sips: Sequence[int] | None) -> None:
        """A command begins to touch SIPs, or any of them."""
        for sip in (-1,) if sips is None else sips:
            self._commands[sip] = self._commands.get(sip, 0) + 1
        self.touch(list(self._roles) if sips is None else sips)

    def end_command(self, sips: Sequence[int] | None) -> None:
        """The command has ended."""
        for sip in (-1,) if sips is None else sips:
            self._commands[sip] -= 1

    def touch(self, sips: Iterable[int]) -> None:
        """Something is about to touch SIPs: what goes on there is simulated from now on."""
        if not self._roles:
            return
        for sip in sips:
            role = self._roles.pop(sip, None)
            if isinstance(role, Replica):
                role.simulate()
            elif role is not None:
                self.spoil(role)

    def spoil(self, original: Original[Member]) -> None:
        """Let a launch be no original any more: something has come to its SIP, or it has failed."""
        self._roles.pop(original.sip, None)
        for likeness in [key for key, each in self._originals.items() if each is original]:
            del self._originals[likeness]
        for replica in original.replicas.copy():
            replica.simulate()

    def forget(self, replica: Replica[Member]) -> None:
        """A replica has ended, or is simulated."""
        self._roles.pop(replica.sip, None)

    def end(self, original: Original[Member]) -> None:
        """A launch that may have replicas has ended."""
        if self._roles.get(original.sip) is original:
            del self._roles[original.sip]
            original.end()

    def role_of(self, sip: int, likeness: Hashable, member: Member, *, has_data: bool) -> Steps:
        """What a launch is that begins now: an `Original`, a `Replica`, or None if neither.

        Args:
            sip: the device of the launch, which nothing that it does leaves.
            likeness: equal to that of another launch that does the same on its own device.
            member: the launch.
            has_data: whether it has to be calculated first.
        """
        self._coming.append((sip, likeness, member))
        yield 0  # those that begin in this wave decide together whether calculating pays
        alike = sum(1 for _, other, _ in self._coming if other == likeness)
        self._coming = [each for each in self._coming if each[2] is not member]
        if not self.are_allowed or not self._is_quiet(sip):
            return None
        role = self._role(sip, likeness, member, has_data=has_data, alike=alike)
        if role is not None:
            self._roles[sip] = role
        return role

    def _role(
        self, sip: int, likeness: Hashable, member: Member, *, has_data: bool, alike: int
    ) -> Original[Member] | Replica[Member] | None:
        original = self._originals.get(likeness)
        needs_another = has_data or self._in_vain >= _IN_VAIN_MAX
        if (
            needs_another
            and original is None
            and alike < 2
            and self._seen.get(likeness, sip) == sip
        ):
            self._remember(self._seen, likeness, sip)
            return None  # as far as we know, no other device does the same
        if has_data:
            going_on = [each.member for each in self._roles.values() if each.member is not None]
            calculated = member.calculate() if member.is_apart_from(going_on) else None
            if calculated is None:
                return None
        else:
            calculated = None, _leave_it
        decides, take_back = calculated
        if original is not None and original.decides == decides:
            self.count += 1
            self._in_vain = 0
            return Replica(self, original, sip, member, take_back)
        take_back()
        self._in_vain += 1
        original = Original(self._machine, sip, member, decides)
        self._originals.pop(likeness, None)
        self._remember(self._originals, likeness, original)
        return original

    def _remember(self, kept: dict[Hashable, Any], likeness: Hashable, value: Any) -> None:
        kept[likeness] = value
        if len(kept) > _KEPT:
            del kept[next(iter(kept))]

    def _is_quiet(self, sip: int) -> bool:
        """Whether nothing but the launch that asks is on a SIP, or under way there."""
        if self._commands.get(sip, 0) > 1 or self._commands.get(-1, 0):
            return False
        return self._machine.is_idle(sip)


def _leave_it() -> None:
    """Nothing was calculated, so that nothing is to be taken back."""
