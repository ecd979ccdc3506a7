"""The machine that is modelled: topology files, links, memories, engines, and the graph engine."""

from rankwise.sim.hardware.commands import (
    Command,
    CommandHandle,
    Copy,
    KernelExecutor,
    KernelLaunch,
    MemoryRead,
    MemoryWrite,
    MmuMap,
    MmuUnmap,
    Run,
)
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.hardware.environment import KernelEnvironment
from rankwise.sim.hardware.hardware_machine import Cube, HardwareMachine, Memory, Pe, Sip
from rankwise.sim.hardware.ipcq import IpcQueue, Slot
from rankwise.sim.hardware.links import Link
from rankwise.sim.hardware.memory import AddressSpace, BadAddress, Mapping, MemoryExhausted
from rankwise.sim.hardware.op_log import LoggedOperation, Operand, OpLog
from rankwise.sim.hardware.topology import PRESETS, Topology, load_topology, parse_topology

__all__ = [
    "PRESETS",
    "AddressSpace",
    "BadAddress",
    "Command",
    "CommandHandle",
    "Copy",
    "Cube",
    "GraphEngine",
    "HardwareMachine",
    "IpcQueue",
    "KernelEnvironment",
    "KernelExecutor",
    "KernelLaunch",
    "Link",
    "LoggedOperation",
    "Mapping",
    "Memory",
    "MemoryExhausted",
    "MemoryRead",
    "MemoryWrite",
    "MmuMap",
    "MmuUnmap",
    "OpLog",
    "Operand",
    "Pe",
    "Run",
    "Sip",
    "Slot",
    "Topology",
    "load_topology",
    "parse_topology",
]
