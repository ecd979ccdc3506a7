"""The machine that is modelled: topology files, links, memories, engines, and the graph engine."""

from rankwise.sim.hardware.commands import (
    Command,
    Copy,
    Handle,
    KernelLaunch,
    KernelRunner,
    MemoryRead,
    MemoryWrite,
    MmuMap,
    MmuUnmap,
    Run,
)
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.hardware.environment import KernelEnvironment
from rankwise.sim.hardware.ipcq import IpcQueue, Slot
from rankwise.sim.hardware.links import Link
from rankwise.sim.hardware.machine import Cube, Machine, Memory, Pe, Sip
from rankwise.sim.hardware.memory import AddressSpace, BadAddress, Mapping, MemoryExhausted
from rankwise.sim.hardware.op_log import Operand, Operation, OpLog
from rankwise.sim.hardware.topology import PRESETS, Topology, load_topology, parse_topology

__all__ = [
    "PRESETS",
    "AddressSpace",
    "BadAddress",
    "Command",
    "Copy",
    "Cube",
    "GraphEngine",
    "Handle",
    "IpcQueue",
    "KernelEnvironment",
    "KernelLaunch",
    "KernelRunner",
    "Link",
    "Machine",
    "Mapping",
    "Memory",
    "MemoryExhausted",
    "MemoryRead",
    "MemoryWrite",
    "MmuMap",
    "MmuUnmap",
    "OpLog",
    "Operand",
    "Operation",
    "Pe",
    "Run",
    "Sip",
    "Slot",
    "Topology",
    "load_topology",
    "parse_topology",
]
