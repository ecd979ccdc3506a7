"""Equal rounds of a ring are replayed: times are those of all rounds, one after the other."""

from collections.abc import Sequence

import numpy as np
import pytest

from rankwise.core.collectives.ring import RingRound
from rankwise.sim.benches.session import topology_with
from rankwise.sim.ccl.algorithms import ring_allreduce
from rankwise.sim.ccl.configuration import load_configuration
from rankwise.sim.ccl.layout import laid_out
from rankwise.sim.ccl.message_execution import RingInstants, RingTiming
from rankwise.sim.ccl.message_model import Picoseconds
from rankwise.sim.ccl.message_pes import Elements, Lanes
from rankwise.sim.ccl.plan import Plan, requested
from rankwise.sim.hardware import HardwareMachine
from rankwise.sim.kernel import Simulator


class CountedRounds(RingTiming):
    """A timing that counts the rounds that it calculates."""

    calculated = 0

    def after_round(
        self, now: RingInstants, number: int, rounds: Sequence[RingRound]
    ) -> tuple[RingInstants, Picoseconds]:
        self.calculated += 1
        return super().after_round(now, number, rounds)


@pytest.mark.parametrize(
    ("preset", "ranks", "elements", "lanes", "calculated_most"),
    [
        ("switch8", 64, 1 << 16, 32, 10),
        # The reduction settles but for a picosecond of rounding, which returns every third round.
        ("switch8", 64, 1 << 20, 2, 24),
        ("default", 64, 1 << 18, 1, 10),  # every other operand comes late
        ("switch8", 64, 1 << 26, 4, 10),  # parts that are stored and loaded again
        ("default", 64, 1 << 20, 32, 10),  # the way back to the first rank is longer
        ("default", 16, 1 << 22, 1, 10),
        ("torus16", 16, 1 << 18, 8, 10),
        ("switch8", 7, 1 << 16, 4, 12),  # parts of two lengths
    ],
)
def test_replayed_rounds_take_as_long_as_all_of_them(
    preset: str, ranks: int, elements: int, lanes: int, calculated_most: int
) -> None:
    changes = {} if preset == "torus16" else {"system.sips.count": str(ranks)}
    machine = HardwareMachine(Simulator(), topology_with(preset, changes))
    ccl = load_configuration({"defaults": {"n_lanes": lanes}})
    algorithm = ccl.algorithm("all_reduce", "ring_allreduce")
    homes = tuple(range(ranks))
    sips = machine.topology.machine.system.sips
    planned = Plan(requested(algorithm, "all_reduce", elements, 0, homes, sips))
    count, queues = laid_out(machine, planned, algorithm, 4, homes, machine.topology.pe_count)
    own = [Lanes(sip, tuple(range(count))) for sip in homes]
    rounds = ring_allreduce.rounds(planned.request.task(0))

    timing = CountedRounds(machine, planned, own, queues, Elements(4, "f32", "add"))
    ends, calculated = timing.ends(rounds), timing.calculated
    now, moving = timing.at_begin(rounds), np.zeros(1, np.int64)
    for number in range(len(rounds)):
        now, duration = timing.after_round(now, number, rounds)
        moving = moving + duration

    assert ends == timing.at_end(now, rounds)
    assert timing.moving == moving.max()
    assert calculated <= calculated_most
