"""CPU binding on machines made of files."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError
from rankwise.launch.run.affinity import (
    Binding,
    CpuTopology,
    assign,
    cpus_by_rank,
    rank_nodes,
    read_topology,
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def span(cpus: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """Two sockets, four nodes of four cores with two threads each, one cache per two cores.

    Threads of core c are CPUs c and c + 16, as on real machines.
    """
    system = tmp_path / "sys/devices/system"
    for node in range(4):
        write(
            system / f"node/node{node}/cpulist",
            f"{4 * node}-{4 * node + 3},{16 + 4 * node}-{19 + 4 * node}",
        )
    for cpu in range(32):
        core = cpu % 16
        folder = system / f"cpu/cpu{cpu}"
        write(folder / "topology/physical_package_id", str(core // 8))
        write(folder / "topology/thread_siblings_list", f"{core},{core + 16}")
        pair = core - core % 2
        caches = {
            0: ("1", "Data", [core, core + 16]),
            1: ("1", "Instruction", [core, core + 16]),
            2: ("2", "Unified", [core, core + 16]),
            3: ("3", "Unified", [pair, pair + 1, pair + 16, pair + 17]),
        }
        for index, (level, kind, sharers) in caches.items():
            write(folder / f"cache/index{index}/level", level)
            write(folder / f"cache/index{index}/type", kind)
            write(folder / f"cache/index{index}/shared_cpu_list", span(sharers))
    return tmp_path


def add_gpu(root: Path, bus_id: str, node: int, *, minor: int | None = None) -> None:
    device = root / "sys/bus/pci/devices" / bus_id
    write(device / "vendor", "0x10de")
    write(device / "class", "0x030200")
    write(device / "numa_node", str(node))
    if minor is not None:
        write(root / f"proc/driver/nvidia/gpus/{bus_id}/information", f"Device Minor: \t {minor}")


def bound(
    root: Path, binding: Binding, size: int, allowed: Iterable[int] = range(32)
) -> dict[int, list[int]]:
    found = cpus_by_rank(binding, size, root=root, allowed=allowed)
    return {rank: sorted(cpus) for rank, cpus in found.items()}


def test_without_devices_ranks_are_spread_over_the_nodes(big: Path) -> None:
    assert bound(big, Binding.NODE, 4) == {
        rank: [*range(4 * rank, 4 * rank + 4), *range(16 + 4 * rank, 20 + 4 * rank)]
        for rank in range(4)
    }


def test_neighbouring_ranks_share_a_node(big: Path) -> None:
    found = bound(big, Binding.NODE, 8)

    assert found[0] == found[1] == [0, 1, 2, 3, 16, 17, 18, 19]
    assert found[6] == found[7] == [12, 13, 14, 15, 28, 29, 30, 31]


def test_a_rank_goes_to_the_node_of_its_device(big: Path) -> None:
    for index, node in enumerate([2, 0, 2]):
        add_gpu(big, f"0000:{index}a:00.0", node)

    found = bound(big, Binding.NODE, 3)

    assert [min(found[rank]) for rank in range(3)] == [8, 0, 8]


def test_only_devices_that_this_container_was_given_count(big: Path) -> None:
    add_gpu(big, "0000:1a:00.0", 3, minor=0)
    add_gpu(big, "0000:2a:00.0", 1, minor=1)
    write(big / "dev/nvidia1", "")

    assert min(bound(big, Binding.NODE, 1)[0]) == 4


def test_more_ranks_than_devices_share_them_in_turn(big: Path) -> None:
    add_gpu(big, "0000:1a:00.0", 3)
    add_gpu(big, "0000:2a:00.0", 1)

    assert [min(cpus) for cpus in bound(big, Binding.NODE, 4).values()] == [12, 4, 12, 4]


def test_a_device_that_knows_no_node_is_on_the_first(big: Path) -> None:
    add_gpu(big, "0000:1a:00.0", -1)

    assert min(bound(big, Binding.NODE, 1)[0]) == 0


def test_a_device_on_a_forbidden_node_says_nothing(big: Path) -> None:
    add_gpu(big, "0000:1a:00.0", 3)

    assert bound(big, Binding.NODE, 1, allowed=[0, 1]) == {0: [0, 1]}


def test_a_socket_is_all_its_nodes(big: Path) -> None:
    found = bound(big, Binding.SOCKET, 4)

    assert found[0] == found[1] == [*range(8), *range(16, 24)]
    assert found[2] == found[3] == [*range(8, 16), *range(24, 32)]


def test_exclusive_shares_are_whole_cores_and_the_first_get_more(big: Path) -> None:
    found = bound(big, Binding.EXCLUSIVE, 3, allowed=[0, 1, 2, 3, 16, 17, 18, 19])

    assert found == {0: [0, 1, 16, 17], 1: [2, 18], 2: [3, 19]}


def test_more_exclusive_ranks_than_cores_are_refused(big: Path) -> None:
    with pytest.raises(ConfigError, match="NUMA node 0 has 1 physical core for 2 ranks"):
        bound(big, Binding.EXCLUSIVE, 2, allowed=[0, 16])


def test_each_rank_gets_another_cache_the_fullest_first(big: Path) -> None:
    found = bound(big, Binding.CORE_COMPLEX, 3, allowed=[0, 16, 2, 3, 18, 19])

    assert found == {0: [2, 3, 18, 19], 1: [0, 16], 2: [2, 3, 18, 19]}


def test_a_kernel_that_tells_nothing_means_one_node(tmp_path: Path) -> None:
    for binding in (Binding.NODE, Binding.SOCKET, Binding.CORE_COMPLEX):
        assert bound(tmp_path, binding, 2, allowed=[0, 1, 2]) == {0: [0, 1, 2], 1: [0, 1, 2]}
    assert bound(tmp_path, Binding.EXCLUSIVE, 2, allowed=[0, 1, 2]) == {0: [0, 1], 1: [2]}


def test_nodes_without_allowed_cpus_are_left_out(big: Path) -> None:
    assert set(read_topology(big, [5, 6]).nodes) == {1}


@st.composite
def topologies(draw: st.DrawFn) -> CpuTopology:
    nodes: dict[int, frozenset[int]] = {}
    socket_of: dict[int, int] = {}
    core_of: dict[int, int] = {}
    for node in range(draw(st.integers(1, 4))):
        first = 100 * node
        cpus = range(first, first + draw(st.integers(1, 12)))
        threads = draw(st.sampled_from([1, 2]))
        nodes[node] = frozenset(cpus)
        socket_of |= dict.fromkeys(cpus, node // 2)
        core_of |= {cpu: first + (cpu - first) // threads * threads for cpu in cpus}
    return CpuTopology(nodes=nodes, socket_of=socket_of, core_of=core_of, complex_of=core_of)


def all_of(sets: Mapping[int, frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sets.values())


@given(
    topologies(),
    st.integers(1, 40),
    st.sampled_from(Binding),
    st.lists(st.integers(0, 5), max_size=8),
)
def test_every_rank_gets_allowed_cpus_and_exclusive_ones_share_no_core(
    topology: CpuTopology, size: int, binding: Binding, devices: list[int]
) -> None:
    nodes = rank_nodes(size, topology, devices)

    try:
        found = assign(binding, topology, nodes)
    except ConfigError:
        assert binding is Binding.EXCLUSIVE
        return

    assert list(found) == list(range(size))
    assert all(found.values())
    assert all_of(found) <= all_of(topology.nodes)
    if binding is Binding.EXCLUSIVE:
        cores = [{topology.core_of[cpu] for cpu in cpus} for cpus in found.values()]
        assert sum(map(len, cores)) == len(set().union(*cores))
        assert all_of(found) == frozenset().union(*(topology.nodes[node] for node in set(nodes)))
