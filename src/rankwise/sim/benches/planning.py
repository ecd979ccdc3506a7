"""Which plan a collective of some ranks follows, for its bound: as the runtime makes it."""

from typing import Any

from rankwise.sim.benches.bounds import Bound, alpha_beta_bound
from rankwise.sim.ccl.plan import Plan, Request, plan
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
    chosen = torch.ccl.algorithm(collective, algorithm)
    is_grid = chosen.topology in {"mesh_2d", "torus_2d"}
    ring = _snake(torch, homes) if is_grid else ()
    request = Request(chosen.module, collective, size, elements, 0, ring, homes)
    planned: Plan = plan(request)
    return alpha_beta_bound(torch.engine.machine, planned, homes, element_type(dtype).itemsize)


def _snake(torch: Any, homes: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks along the rows of the grid of SIPs, every other row backwards."""
    shape = torch.engine.topology.machine.system.sips.shape
    if shape is None:
        return ()

    def place(rank: int) -> tuple[int, int, int]:
        row, column = divmod(homes[rank], shape[1])
        return row, -column if row % 2 else column, rank

    return tuple(sorted(range(len(homes)), key=place))
