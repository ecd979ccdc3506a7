"""How far messages were from queues on the machines on which both were run.

`message_errors.csv` holds simulated times of algorithms on three machines, by both levels; the
benchmark `sim_errors` writes it. Rings have conditions of their own (`fidelity`). Of any other
algorithm, a case is known if it lies between recorded ones: on a machine with the devices and links
of a recorded one, with ranks and lanes between two recorded numbers, and from a recorded size on.
Its error is then the largest of these.
"""

import csv
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from rankwise.sim.hardware.specification import MachineSpec
from rankwise.sim.hardware.topology import load_topology

FILE = Path(__file__).with_name("message_errors.csv")


class RecordedCase(NamedTuple):
    """What was run: an algorithm on a preset, with bytes as the program counts them."""

    algorithm: str
    machine: str
    ranks: int
    lanes: int
    size: int


@lru_cache(maxsize=1)
def recorded_errors() -> dict[RecordedCase, float]:
    """By case: the difference of messages as a part of the time by queues, without its sign."""
    with FILE.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {
        RecordedCase(algorithm, machine, int(ranks), int(lanes), int(size)): abs(
            int(message) / int(queue) - 1
        )
        for algorithm, machine, ranks, lanes, size, queue, message in rows
    }


def known_error(
    algorithm: str, spec: MachineSpec, ranks: int, lanes: int, size: int
) -> float | None:
    """The largest error of the recorded cases around one; None if it is not known.

    Args:
        algorithm: the name of its module.
        spec: the machine; all of its devices take part.
        ranks: how many there are, one on each device.
        lanes: over how many PEs of each messages are spread.
        size: bytes of the operand of each rank.
    """
    machine = _preset_like(spec)
    if machine is None or spec.system.sips.count != ranks:
        return None
    own = {
        case[2:]: error
        for case, error in recorded_errors().items()
        if case[:2] == (algorithm, machine)
    }
    columns = [sorted(set(values)) for values in zip(*own, strict=True)]
    if not columns:
        return None
    around = [_around(known, value) for known, value in zip(columns, (ranks, lanes), strict=False)]
    sizes = _around(columns[2], min(size, columns[2][-1]))
    cases = [(one, other, each) for one in around[0] for other in around[1] for each in sizes]
    if not cases or any(case not in own for case in cases):
        return None
    return max(own[case] for case in cases)


def _around(known: Sequence[int], value: int) -> list[int]:
    """The value, or the two known ones beside it; none outside of all of them."""
    if value in known:
        return [value]
    below, above = (
        [each for each in known if each < value],
        [each for each in known if each > value],
    )
    return [below[-1], above[0]] if below and above else []


def _preset_like(spec: MachineSpec) -> str | None:
    """The recorded machine with the same devices and links, however many they are."""
    return next((name for name in _MACHINES if _of_any_count(spec) == _of_preset(name)), None)


@lru_cache(maxsize=8)
def _of_preset(name: str) -> MachineSpec:
    return _of_any_count(load_topology(name).machine)


def _of_any_count(spec: MachineSpec) -> MachineSpec:
    replace = msgspec.structs.replace
    sips = spec.system.sips
    if sips.levels or sips.edges:
        return spec
    shape = None if sips.shape is None else (1, 1)
    system = replace(spec.system, name="", sips=replace(sips, count=1, shape=shape))
    return replace(spec, system=system, like="")


_MACHINES = ("default", "switch8", "torus16")
