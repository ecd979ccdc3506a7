"""Which CPUs each local rank is bound to, computed from /sys alone.

Memory of another NUMA node is slower to reach, so a rank should run near its accelerator or, where
there is none, at least stay on one node. Ranks with an NVIDIA device go to the node that the
device hangs on (rank r uses device r). Without devices the ranks are spread over the nodes in
contiguous blocks, since neighbouring ranks talk most.

`CpuTopology` holds what /sys says, cut down to the CPUs that this process may use; the rest is
arithmetic on it.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.tree.processor_placement import processors_of
from rankwise.launch.run.devices import ROOT, nvidia_bus_ids, text_of

CpuSet = frozenset[int]


class Binding(StrEnum):
    """How narrowly ranks are bound; the names are torchrun's."""

    NODE = "node"
    """All CPUs of the rank's NUMA node."""
    SOCKET = "socket"
    """All CPUs of all NUMA nodes of the rank's socket."""
    EXCLUSIVE = "exclusive"
    """An equal share of the node's physical cores that no other rank is given."""
    CORE_COMPLEX = "core-complex"
    """The CPUs behind one last-level cache, another one for each rank while there are enough."""


class CpuTopology(msgspec.Struct, frozen=True, kw_only=True):
    """Where the allowed CPUs stand.

    Attributes:
        nodes: allowed CPUs of each NUMA node; nodes without any are left out.
        socket_of: the physical package of each CPU.
        core_of: the lowest CPU that shares a physical core with each CPU.
        complex_of: the lowest CPU that shares the last-level cache with each CPU.
    """

    nodes: Mapping[int, CpuSet]
    socket_of: Mapping[int, int]
    core_of: Mapping[int, int]
    complex_of: Mapping[int, int]


def cpus_by_rank(
    binding: Binding, size: int, *, root: Path = ROOT, allowed: Iterable[int] | None = None
) -> dict[int, CpuSet]:
    """The CPUs of each of `size` local ranks on this machine.

    Raises:
        ConfigError: there are fewer cores than ranks that each want their own.
    """
    topology = read_topology(root, os.sched_getaffinity(0) if allowed is None else allowed)
    return assign(binding, topology, rank_nodes(size, topology, device_nodes(root)))


def read_topology(root: Path, allowed: Iterable[int]) -> CpuTopology:
    """Read the topology of the `allowed` CPUs; what /sys does not tell is taken as one of it."""
    cpus = frozenset(allowed)
    nodes: dict[int, CpuSet] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if members := processors_of(text_of(folder / "cpulist")) & cpus:
            nodes[int(folder.name.removeprefix("node"))] = members
    # A kernel built without NUMA has no nodes, and some virtual ones forget CPUs.
    if forgotten := cpus.difference(*nodes.values()):
        first = min(nodes, default=0)
        nodes[first] = nodes.get(first, frozenset()) | forgotten
    folders = {cpu: root / f"sys/devices/system/cpu/cpu{cpu}" for cpu in sorted(cpus)}
    return CpuTopology(
        nodes=dict(sorted(nodes.items())),
        socket_of={
            cpu: int(text_of(folder / "topology/physical_package_id") or 0)
            for cpu, folder in folders.items()
        },
        core_of={
            cpu: min(processors_of(text_of(folder / "topology/thread_siblings_list")), default=cpu)
            for cpu, folder in folders.items()
        },
        complex_of={cpu: _last_level_cache(folder) for cpu, folder in folders.items()},
    )


def device_nodes(root: Path = ROOT) -> list[int]:
    """The NUMA node of each NVIDIA device, by device index; a lone node calls itself -1."""
    return [
        max(0, int(text_of(root / "sys/bus/pci/devices" / bus_id / "numa_node") or 0))
        for bus_id in nvidia_bus_ids(root)
    ]


def rank_nodes(size: int, topology: CpuTopology, devices: Sequence[int]) -> list[int]:
    """The NUMA node of each local rank: its device's, else ranks spread over the nodes.

    More ranks than devices share them in turn. A device on a node whose CPUs are all forbidden
    says nothing about where its rank should run.
    """
    nodes = sorted(topology.nodes)
    spread = [nodes[rank * len(nodes) // size] for rank in range(size)]
    if not devices:
        return spread
    near = [devices[rank % len(devices)] for rank in range(size)]
    return [
        node if node in topology.nodes else fallback
        for node, fallback in zip(near, spread, strict=True)
    ]


def assign(binding: Binding, topology: CpuTopology, nodes: Sequence[int]) -> dict[int, CpuSet]:
    """The CPUs of each rank, given the node of each rank."""
    chosen: dict[int, CpuSet] = {}
    for node in sorted(set(nodes)):
        ranks = [rank for rank, its_node in enumerate(nodes) if its_node == node]
        cpus = topology.nodes[node]
        match binding:
            case Binding.NODE:
                shares = [cpus] * len(ranks)
            case Binding.SOCKET:
                shares = [_socket_of_node(topology, node)] * len(ranks)
            case Binding.EXCLUSIVE:
                cores = sorted(_grouped(cpus, topology.core_of), key=min)
                shares = _divided(cores, len(ranks), node)
            case Binding.CORE_COMPLEX:
                complexes = sorted(
                    _grouped(cpus, topology.complex_of), key=lambda group: (-len(group), min(group))
                )
                shares = [complexes[turn % len(complexes)] for turn in range(len(ranks))]
        chosen.update(zip(ranks, shares, strict=True))
    return dict(sorted(chosen.items()))


def _socket_of_node(topology: CpuTopology, node: int) -> CpuSet:
    socket = topology.socket_of[min(topology.nodes[node])]
    on_socket = [
        cpus for cpus in topology.nodes.values() if topology.socket_of[min(cpus)] == socket
    ]
    return frozenset().union(*on_socket)


def _grouped(cpus: CpuSet, key_of: Mapping[int, int]) -> list[CpuSet]:
    groups: dict[int, set[int]] = {}
    for cpu in sorted(cpus):
        groups.setdefault(key_of[cpu], set()).add(cpu)
    return [frozenset(group) for group in groups.values()]


def _divided(cores: Sequence[CpuSet], count: int, node: int) -> list[CpuSet]:
    """Cut `cores` into `count` runs of nearly equal length, the longer ones first."""
    each, longer = divmod(len(cores), count)
    if each == 0:
        raise ConfigError(
            f"--numa-binding exclusive: NUMA node {node} has {len(cores)} physical "
            f"core{'s' if len(cores) != 1 else ''} for {count} ranks",
            hint="start fewer ranks, or use --numa-binding node",
        )
    shares = []
    start = 0
    for turn in range(count):
        end = start + each + (turn < longer)
        shares.append(frozenset[int]().union(*cores[start:end]))
        start = end
    return shares


def _last_level_cache(cpu_folder: Path) -> int:
    """The lowest CPU behind the same last-level data cache; 0 for all when /sys shows no caches."""
    level_best, lowest = 0, 0
    for cache in (cpu_folder / "cache").glob("index[0-9]*"):
        if text_of(cache / "type") == "Instruction":
            continue
        level = int(text_of(cache / "level") or 0)
        if level > level_best and (sharers := processors_of(text_of(cache / "shared_cpu_list"))):
            level_best, lowest = level, min(sharers)
    return lowest
