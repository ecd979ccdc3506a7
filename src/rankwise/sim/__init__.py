"""The simulated accelerator: ranks, kernels and collectives in virtual time."""

from importlib import import_module
from typing import Any

_HOMES = {
    "Deadlock": "rankwise.base.errors",
    "GraphEngine": "rankwise.sim.hardware.engine",
    "load_topology": "rankwise.sim.hardware.topology",
    "RuntimeContext": "rankwise.sim.runtime.context",
    "DeviceSelector": "rankwise.sim.runtime.placement",
    "DPPolicy": "rankwise.sim.runtime.placement",
    "SpawnException": "rankwise.sim.runtime.multiprocessing",
    "held_back_by": "rankwise.sim.benches.spending",
    # They run processes, so they stand above the simulator; users look for them here.
    "compare": "rankwise.simranks.run.compared",
    "sweep": "rankwise.simranks.run.sweeps",
    "read_results": "rankwise.simranks.run.sweeps",
    "SweepTable": "rankwise.sim.reporting.sweep_table",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605  # the names are above, once


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rankwise.sim' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """The public names, so that interactive shells can complete them."""
    return sorted({*globals(), *_HOMES})
