"""Which plan a collective of some ranks follows, for its bound: as the runtime makes it."""

from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.base.units import format_bytes
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.sim.benches.bounds import Bound, alpha_beta_bound
from rankwise.sim.ccl.configuration import AUTO, Algorithm
from rankwise.sim.ccl.plan import plan, requested
from rankwise.sim.runtime.collective_calls import wanted_of
from rankwise.sim.runtime.placement import Device, devices_for
from rankwise.sim.runtime.tensor import element_type


def world_size_of(torch: Any) -> int:
    """One rank per device, unless the configuration of collectives says otherwise."""
    asked = getattr(getattr(torch, "ccl", None), "world_size", None)
    return int(asked or torch.spec["system"]["sips"]["count"])


def devices_of(torch: Any, size: int) -> list[Device]:
    """The device of every rank of so many."""
    topology = torch.engine.topology
    sips = torch.target_device.sips(topology.sip_count)
    return devices_for(
        size, sips, topology.machine.sip.cubes.count, topology.machine.cube.pes.count
    )


def algorithm_of(
    torch: Any,
    collective: str,
    elements: int,
    size: int,
    dtype: str,
    *,
    algorithm: str | None = None,
) -> Algorithm:
    """The algorithm that a collective gets; where that is left to `auto`, the one it chooses."""
    named: Algorithm = torch.ccl.algorithm(collective, algorithm)
    if named.name != AUTO:
        return named
    devices = devices_of(torch, size)
    found: Algorithm = torch.algorithms.fastest(
        wanted_of(collective, elements, 0, devices, element_type(dtype), ReduceOp.SUM)
    )
    return found


def bound_of(
    torch: Any,
    collective: str,
    elements: int,
    size: int,
    dtype: str,
    *,
    algorithm: str | None = None,
) -> Bound:
    """The alpha-beta bound of a collective, by the algorithm that it would get."""
    homes = tuple(device.sip for device in devices_of(torch, size))
    chosen = algorithm_of(torch, collective, elements, size, dtype, algorithm=algorithm)
    network = torch.engine.topology.machine.system.sips
    planned = plan(requested(chosen, collective, elements, 0, homes, network))
    return alpha_beta_bound(torch.engine.machine, planned, homes, element_type(dtype).itemsize)


def check_fits(torch: Any, size: int, what: str) -> None:
    """Refuse a program that would need more memory of a device than there is, before it runs.

    Raises:
        ConfigError: says how much is needed, and how much there is.
    """
    spec = torch.engine.topology.machine
    there_is = spec.sip.cubes.count * spec.cube.hbm.capacity
    if size > there_is:
        raise ConfigError(
            f"{what} needs {format_bytes(size)} of memory on each device, which has"
            f" {format_bytes(there_is)}",
            hint="take smaller sizes, or a topology with more",
        )
