"""Machines that exist: devices, nodes and fabrics, with the source of each figure.

`open_machine` gives a `Topology` for a preset, a topology file, or a machine of this package;
`DevicePrices` and `FabricPrices` say what operations and collectives take on such a machine.
"""

from rankwise.simranks.prediction.machines.catalogue import (
    MACHINES,
    MachineTopology,
    find_machine,
    open_machine,
)
from rankwise.simranks.prediction.machines.description import RealMachine

__all__ = ["MACHINES", "MachineTopology", "RealMachine", "find_machine", "open_machine"]
