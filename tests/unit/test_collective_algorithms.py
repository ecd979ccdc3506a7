"""Each algorithm, over shared memory, over TCP and on simulated chips: numpy's results everywhere.

The numbers are such that the order of reduction shows: what it is for each algorithm is held
against numpy in `sim/ccl/test_algorithms.py`; here all three have to agree to the bit.
"""

import pkgutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import combinations
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rankwise.base.units import SECOND, Duration
from rankwise.collectives.calls import describe
from rankwise.collectives.ordered_reductions import REDUCTIONS, Reduction
from rankwise.collectives.shared_memory import SharedMemoryTransport
from rankwise.collectives.tcp import TcpTransport
from rankwise.core.collectives import algorithms
from rankwise.core.collectives.workspace import blocks_in, blocks_out
from rankwise.drivers.real.segments import Segment
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.session import topology_with

ROOT = 1
PATIENCE = Duration(60 * SECOND)
Arrays = list[Any]


def modules() -> dict[str, ModuleType]:
    """All algorithms that ship; what serves them has no COLLECTIVE."""
    found = {
        each.name: import_module(f"{algorithms.__name__}.{each.name}")
        for each in pkgutil.iter_modules(algorithms.__path__)
    }
    return {name: module for name, module in found.items() if hasattr(module, "COLLECTIVE")}


MODULES = modules()


def operands(collective: str, size: int, elements: int, dtype: str) -> Arrays:
    random = np.random.default_rng([size, elements])
    count = elements * blocks_in(collective, size)
    values = random.normal(size=(size, count)) * 10.0 ** random.integers(-2, 5, (size, count))
    return list((values * 100).astype(dtype))


def expected(collective: str, values: Arrays, op: str) -> list[Any | None]:
    """What numpy says; floats are close to it, whatever the order."""
    size = len(values)
    whole: Any = REDUCTIONS[op].ufunc.reduce(np.stack(values))
    blocks = [value.reshape(size, -1) for value in values] if len(values[0]) % size == 0 else []
    match collective:
        case "all_reduce":
            return [whole] * size
        case "reduce":
            return [whole if rank == ROOT else None for rank in range(size)]
        case "reduce_scatter":
            return list(whole.reshape(size, -1))
        case "all_gather":
            return [np.concatenate(values)] * size
        case "gather":
            return [np.concatenate(values) if rank == ROOT else None for rank in range(size)]
        case "scatter":
            return list(values[ROOT].reshape(size, -1))
        case "broadcast":
            return [values[ROOT]] * size
        case "all_to_all":
            return [np.concatenate([row[rank] for row in blocks]) for rank in range(size)]
        case "send_receive":
            return [None, values[0]]
        case _:
            return [None] * size


def in_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def by_program(
    transports: list[Any], module: ModuleType, values: Arrays, reduction: Reduction
) -> Arrays:
    """Every rank's result of an algorithm's program."""
    size, collective = len(transports), module.COLLECTIVE
    call = describe(collective, values[0].dtype, values[0].shape, op="sum")

    def work(rank: int) -> Any:
        elements = values[rank].size // blocks_in(collective, size)
        result = np.zeros(elements * blocks_out(collective, size), values[rank].dtype)
        transports[rank].begin(call, PATIENCE)
        transports[rank].run(module, values[rank], result, reduction, ROOT)
        return result

    return in_threads(size, work)


@contextmanager
def shared_memory(size: int) -> Iterator[list[SharedMemoryTransport]]:
    with ExitStack() as stack:
        segment = stack.enter_context(Segment.create(size))
        attached = [Segment.attach(segment.fd) for _ in range(size)]
        ranks = [SharedMemoryTransport(each, rank, 1) for rank, each in enumerate(attached)]
        for each in ranks:
            stack.callback(each.close)
        yield ranks


@contextmanager
def tcp(size: int) -> Iterator[list[TcpTransport]]:
    connections: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for one, other in combinations(range(size), 2):
            connections[one][other] = socket.create_connection(listener.getsockname())
            connections[other][one], _ = listener.accept()
    ranks = [TcpTransport(rank, range(size), each) for rank, each in enumerate(connections)]
    yield ranks
    for each in ranks:
        each.close()


def on_simulated_chips(
    name: str, collective: str, values: Arrays, op: str, elements: int
) -> list[Any | None]:
    """Every rank's result on a machine of chips."""
    size, results = len(values), {}
    module = f"rankwise.sim.ccl.algorithms.{name}"

    def worker(rank: int, torch: Any) -> None:
        dist, mine = torch.distributed, torch.tensor(values[rank])
        rows = [torch.tensor(row) for row in values[rank].reshape(-1, elements)]
        empty = [torch.empty(elements, dtype=mine.dtype) for _ in range(size)]
        reducing = {"op": {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]}
        match collective:
            case "all_reduce":
                dist.all_reduce(mine, **reducing)
            case "reduce":
                dist.reduce(mine, ROOT, **reducing)
            case "reduce_scatter":
                mine = empty[0]
                dist.reduce_scatter(mine, rows, **reducing)
            case "all_gather":
                dist.all_gather(empty, mine)
            case "gather":
                dist.gather(mine, empty if rank == ROOT else None, ROOT)
            case "scatter":
                mine = empty[0]
                dist.scatter(mine, rows if rank == ROOT else None, ROOT)
            case "broadcast":
                dist.broadcast(mine, ROOT)
            case "all_to_all":
                dist.all_to_all(empty, rows)
            case "barrier":
                dist.barrier()
            case "send_receive" if rank == 0:
                dist.send(mine, 1)
            case _:
                dist.recv(mine, 0)
        gathers = collective in {"all_gather", "all_to_all", "gather"}
        results[rank] = (
            np.concatenate([each.numpy() for each in empty]) if gathers else mine.numpy()
        )

    ccl = {"algorithms": {name: {"module": module}}, "collectives": {collective: name}}
    topology = topology_with("switch8", {"system.sips.multicast": "true"})
    with RuntimeContext(GraphEngine(topology), ccl=ccl) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=size)
    return [results[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", MODULES)
def test_an_algorithm_gives_what_numpy_gives_in_all_three_worlds(name: str, size: int) -> None:
    module = MODULES[name]
    collective = module.COLLECTIVE
    if collective == "send_receive":
        size = 2
    with shared_memory(size) as in_memory, tcp(size) as by_messages:
        for dtype, op, elements in (("f4", "sum", 37), ("i4", "max", 1), ("i4", "sum", 500)):
            values = operands(collective, size, elements, dtype)
            wanted = expected(collective, values, op)

            shared = by_program(in_memory, module, values, REDUCTIONS[op])
            sent = by_program(by_messages, module, values, REDUCTIONS[op])
            simulated = on_simulated_chips(name, collective, values, op, elements)

            for rank, want in enumerate(wanted):
                if want is not None:
                    np.testing.assert_allclose(shared[rank], want, rtol=1e-5 * (dtype == "f4"))
                    np.testing.assert_array_equal(sent[rank], shared[rank])
                    np.testing.assert_array_equal(simulated[rank], shared[rank])


SPECIALISED = {
    "all_reduce": "direct_allreduce",
    "reduce_scatter": "direct_reduce_scatter",
    "all_gather": "direct_allgather",
    "broadcast": "tree_broadcast",
}


@pytest.mark.parametrize("elements", [1, 1000, 400_000])
@pytest.mark.parametrize("collective", SPECIALISED)
def test_what_is_specialised_for_shared_memory_gives_the_bits_of_its_program(
    collective: str, elements: int
) -> None:
    size, module = 3, MODULES[SPECIALISED[collective]]
    values = operands(collective, size, elements, "f4")
    call = describe(collective)
    arguments = {
        "all_reduce": (REDUCTIONS["sum"],), "reduce_scatter": (REDUCTIONS["sum"],),
        "all_gather": (), "broadcast": (ROOT,),
    }[collective]  # fmt: skip

    with shared_memory(size) as ranks:
        programmed = by_program(ranks, module, values, REDUCTIONS["sum"])

        def work(rank: int) -> Any:
            result = np.empty_like(programmed[rank])
            ranks[rank].begin(call, PATIENCE)
            getattr(ranks[rank], collective)(values[rank], result, *arguments)
            return result

        for rank, result in enumerate(in_threads(size, work)):
            np.testing.assert_array_equal(result, programmed[rank])
