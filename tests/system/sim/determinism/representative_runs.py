"""Simulated runs that together use every part of the simulator, and what each of them leaves.

As a program, it makes them all and writes what they leave (op log, trace, page, table, values,
errors) into a folder, one file each:

    python tests/system/sim/determinism/representative_runs.py FOLDER

With `--renew` it writes the digests of those files to `golden_digests.txt` instead, with which
every machine compares its own. Renew them when a change is meant to alter what runs leave, and say
in the commit why they are altered; two machines that disagree about one tree are a bug.

What is compared has no values that a processor's own libraries decide (matrix products and
transcendental functions may differ in the last bit); times, orders and sums are the same anywhere.
"""

import argparse
import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import rankwise.sim.triton.language as tl
from rankwise.base.errors import RankwiseError
from rankwise.sim import DPPolicy, GraphEngine, RuntimeContext, triton
from rankwise.sim.benches.session import BenchSession, BenchSettings
from rankwise.sim.reporting.page import write_page
from rankwise.sim.reporting.results import as_csv
from rankwise.sim.reporting.table import result_table
from rankwise.sim.reporting.trace import write_trace

GOLDEN = Path(__file__).with_name("golden_digests.txt")
HERE = str(Path(__file__).parent)

BENCHES = {
    "gemm": BenchSettings(program="gemm", fields={"m": "128", "n": "64", "k": "96", "tile": "32"}),
    "softmax": BenchSettings(program="softmax", fields={"rows": "16", "columns": "100"}),
    "attention": BenchSettings(program="attention", fields={"heads": "2", "length": "64"}),
    "memory_bandwidth": BenchSettings(program="memory_bandwidth", fields={"elements": "20000"}),
    "tp_mlp": BenchSettings(program="tp_mlp", topology="switch8", fields={"tokens": "8"}),
    "all_collectives": BenchSettings(program="all_collectives", fields={"elements": "257"}),
    "crowded": BenchSettings(
        program="ccl_allreduce",
        fields={"world_size": "16", "n_slots": "2", "backpressure": "spin", "elements": "3001"},
    ),
    "torus": BenchSettings(
        program="ccl_allreduce", topology="torus16", has_data=False,
        fields={"ccl.algorithms.ring_allreduce_tcm.topology": "torus_2d"},
    ),
}  # fmt: skip


def of_bench(settings: BenchSettings, folder: Path) -> None:
    """Everything that the command line can write about a run."""
    session = BenchSession(settings, with_messages=True)
    finished = session.run()
    (folder / "op_log.jsonl").write_bytes(finished.engine.op_log.encode())
    write_trace(str(folder / "trace.json"), finished.engine)
    write_page(str(folder / "page.html"), settings.program, finished.engine, finished.results)
    (folder / "table.txt").write_text(result_table(finished.results))
    (folder / "table.csv").write_text(as_csv(finished.results))


@triton.jit
def relay_kernel(x_ptr, count_ptr, n: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Programs pass a block on and add to it, and count themselves."""
    program = tl.program_id(0)
    places = tl.arange(0, n)
    block = tl.load(x_ptr + places)
    if program > 0:
        block += tl.recv(program - 1, n, tl.float32)
    if program < tl.num_programs(0) - 1:
        tl.send(program + 1, block)
    else:
        tl.store(x_ptr + places, block)
    tl.atomic_add(count_ptr, 1)


def program_of_ranks(seed: int | None, folder: Path) -> None:
    """Streams, events, groups, asynchronous collectives, messages, kernels that wait for others."""
    engine = GraphEngine("default")
    values: list[bytes] = []

    def worker(rank: int, torch: Any) -> None:
        dist = torch.distributed
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        x = torch.rand(64, 3, dtype="f16", dp=DPPolicy(cube="row", pe="column"), name=f"x{rank}")
        work = dist.all_reduce(x, async_op=True)
        y, count = torch.ones(32, name=f"y{rank}"), torch.zeros(1, dtype="i32")
        with torch.stream(torch.Stream()):
            torch.launch(relay_kernel, 4, y, count, n=32)
        dist.all_reduce(torch.ones(7, dtype="bf16"), group=halves[rank // 2])
        if rank == 0:
            dist.send(y, dst=3)
        elif rank == 3:
            dist.recv(y, src=0)
        work.wait()
        values.append(x.numpy().tobytes() + y.numpy().tobytes() + count.numpy().tobytes())

    with RuntimeContext(engine, ccl={}, seed=5) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=4, schedule_seed=seed)
    (folder / "op_log.jsonl").write_bytes(engine.op_log.encode())
    (folder / "values.bin").write_bytes(b"".join(values))


@triton.jit
def beyond_kernel(x_ptr, n: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Reads beyond the end."""
    tl.store(x_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, n))))


@triton.jit
def waiting_kernel(n: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Waits for a message that nobody sends."""
    tl.recv(1 - tl.program_id(0), n, tl.float32)


def _raises(rank: int, torch: Any) -> None:
    torch.distributed.barrier()
    if rank in {1, 2}:
        raise ValueError(f"rank {rank} has had enough")
    torch.distributed.barrier()


def _leaves(rank: int, torch: Any) -> None:
    if rank != 2:
        torch.distributed.all_reduce(torch.ones(4))


def _disagrees(rank: int, torch: Any) -> None:
    x = torch.ones(4, dtype="f16")
    if rank % 2:
        torch.distributed.broadcast(x, src=1)
    else:
        torch.distributed.all_reduce(x)


def _exhausts(rank: int, torch: Any) -> None:
    del rank
    torch.empty(1 << 40)


def _reads_beyond(rank: int, torch: Any) -> None:
    torch.launch(beyond_kernel, 1, torch.ones(8 + rank), n=16)


def _waits(rank: int, torch: Any) -> None:
    del rank
    torch.launch(waiting_kernel, 2, n=16)


FAULTS = (_raises, _leaves, _disagrees, _exhausts, _reads_beyond, _waits)


def faults(folder: Path) -> None:
    """Every way in which ranks can fail, with what they are told."""
    for fault in FAULTS:
        engine = GraphEngine("default")
        told = _told(partial(_spawn, fault, engine))
        (folder / f"{fault.__name__.strip('_')}.txt").write_text(told)
        (folder / f"{fault.__name__.strip('_')}.jsonl").write_bytes(engine.op_log.encode())
    limited = BenchSettings(program="ccl_allreduce", virtual_limit_ps=4_000_000)
    (folder / "limited.txt").write_text(_told(lambda: BenchSession(limited).run()))


def _spawn(fault: Callable[..., None], engine: GraphEngine) -> None:
    with RuntimeContext(engine, ccl={}) as torch:
        torch.multiprocessing.spawn(fault, args=(torch,), nprocs=4)


def _told(act: Callable[[], object]) -> str:
    try:
        act()
    except RankwiseError as error:
        lines = str(error).replace(HERE, "").splitlines(keepends=True)
        # Interpreters mark the place in a line of a stack in different ways.
        return "".join(line for line in lines if set(line.strip()) - set("^~"))
    raise AssertionError(f"{act} did not fail")


def make_all(folder: Path) -> None:
    """Make every run, and write what it leaves."""
    runs: dict[str, Callable[[Path], None]] = {
        **{name: partial(of_bench, settings) for name, settings in BENCHES.items()},
        "ranks": partial(program_of_ranks, None),
        "permuted_ranks": partial(program_of_ranks, 3),
        "faults": faults,
    }
    for name, run in runs.items():
        (folder / name).mkdir(parents=True)
        run(folder / name)


def digests(folder: Path) -> Iterator[str]:
    """A line for every file: its SHA-256 and its name, sorted by name."""
    for path in sorted(folder.rglob("*.*")):
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            yield f"{digest}  {path.relative_to(folder).as_posix()}"


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    parser = argparse.ArgumentParser(description="Make the representative runs of the simulator.")
    parser.add_argument("folder", type=Path, nargs="?", help="where to put what the runs leave")
    parser.add_argument(
        "--renew", action="store_true", help="write its digests to golden_digests.txt"
    )
    chosen = parser.parse_args()
    if chosen.renew == bool(chosen.folder):
        parser.error("expected either a folder or --renew")
    if chosen.folder:
        make_all(chosen.folder)
    else:
        import tempfile

        with tempfile.TemporaryDirectory() as scratch:
            make_all(Path(scratch) / "runs")
            GOLDEN.write_text("\n".join(digests(Path(scratch) / "runs")) + "\n")
