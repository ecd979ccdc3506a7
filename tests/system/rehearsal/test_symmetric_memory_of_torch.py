"""`torch.distributed._symmetric_memory` in programs of torch on simulated ranks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from preloaded import Preloaded
from running import Finished, write_program

pytestmark = pytest.mark.torch

PROGRAM = """
import json, sys, torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
world, name = dist.group.WORLD, dist.group.WORLD.group_name
symmetric = symm_mem.empty(64, dtype=torch.float32, device=torch.device("cuda", rank))
handle = symm_mem.rendezvous(symmetric, world)
got = {}
exec(sys.argv[1])
for each in range(size):
    dist.barrier()
    if each == rank:
        print(json.dumps(got), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def simulated(preloaded: Preloaded, tmp_path: Path) -> Callable[..., Finished]:
    program = write_program(tmp_path, PROGRAM)

    def simulate(steps: str, *options: str, ranks: int = 3, on: str = "sim") -> Finished:
        return preloaded.run(
            "run", "--on", on, "--nproc-per-node", str(ranks), "--device", "cuda", "--no-prefix",
            *options, program, steps,
        )  # fmt: skip

    return simulate


def got(finished: Finished) -> list[dict[str, object]]:
    assert finished.code == 0, finished.stderr
    return [json.loads(text) for text in finished.lines if text.startswith("{")]


def test_a_rank_reads_and_writes_the_memory_of_its_peers(
    simulated: Callable[..., Finished],
) -> None:
    steps = """
symmetric.fill_(rank)
handle.barrier(channel=0)
peer = handle.get_buffer((rank + 1) % size, (8, 8), torch.float32)
got["peer"] = float(peer[7, 7])
handle.barrier(channel=1)
handle.get_remote_tensor((rank + 1) % size, (64,), torch.float32)[5] = 10.0 + rank
handle.barrier(channel=1)
got["written"] = [float(symmetric[4]), float(symmetric[5])]
got["same"] = symm_mem.rendezvous(symmetric, name) is handle
got["is"] = [symm_mem.is_symm_mem_tensor(each) for each in (symmetric[3:], torch.ones(2))]
got["pad"] = [handle.signal_pad_size, symm_mem.get_signal_pad_size(), handle.buffer_size]
got["ptrs"] = handle.buffer_ptrs[rank] == symmetric.data_ptr()
"""

    results = got(simulated(steps))

    for rank, result in enumerate(results):
        assert result == {
            "peer": (rank + 1) % 3,
            "written": [rank, 10 + (rank - 1) % 3],
            "same": True,
            "is": [True, False],
            "pad": [9_216, 9_216, 256],
            "ptrs": True,
        }


def test_memory_that_nobody_can_reach_is_freed(simulated: Callable[..., Finished]) -> None:
    steps = """
import gc, resource
gc.disable()  # references alone
for turn in range(12):
    mine = symm_mem.empty((1 << 22, 4), dtype=torch.float32, device="cuda").fill_(turn)
    shared = symm_mem.rendezvous(mine, name)
    torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", name)
    peer = shared.get_buffer(1 - rank, (1 << 24,), torch.float32)
    shared.barrier()
    del mine, shared
got["still"] = float(peer[-1])
got["at most"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
"""

    for result in got(simulated(steps, ranks=2)):
        still, at_most = float(str(result["still"])), int(str(result["at most"]))
        assert still == 11.0, "what is held stays, though its rank has dropped it"
        assert at_most < 1_200, "MiB; each turn allocates 128, and there are twelve"


def test_a_handle_serves_without_the_tensor_that_it_was_made_for(
    simulated: Callable[..., Finished],
) -> None:
    steps = """
shared = symm_mem.rendezvous(symm_mem.empty(8, dtype=torch.int64, device="cuda"), name)
shared.barrier(channel=1)
shared.get_buffer((rank + 1) % size, (8,), torch.int64).fill_(rank)
pad = shared.get_signal_pad((rank + 1) % size)
torch.ops.symm_mem.stream_write_value32_(pad, rank, 1)
shared.wait_signal((rank - 1) % size)
got["told"] = int(shared.get_buffer(rank, (8,), torch.int64)[7])
"""

    results = got(simulated(steps))

    assert [result["told"] for result in results] == [2, 0, 1]


def test_signals_carry_what_was_put_before_them(simulated: Callable[..., Finished]) -> None:
    steps = """
for turn in range(3):
    symm_mem.put_signal(torch.full((64,), float(turn * 10 + rank)), handle, (rank + 1) % size)
    symm_mem.wait_signal(handle, (rank - 1) % size)
    got[turn] = float(symmetric[63])
    handle.barrier()
"""

    results = got(simulated(steps, "--schedule", "random", "--seed", "3"))

    assert results == [
        {str(turn): turn * 10 + (rank - 1) % 3 for turn in range(3)} for rank in range(3)
    ]


@pytest.mark.parametrize("on", ["sim", "sim:switch8"])
def test_operations_give_what_the_collectives_give(
    on: str, simulated: Callable[..., Finished]
) -> None:
    steps = """
ops, one = torch.ops.symm_mem, torch.arange(64.0)
reference = one * size + sum(range(size))
symmetric.copy_(one + rank)
got["one"] = torch.equal(ops.one_shot_all_reduce(symmetric, "sum", name), reference)
out = torch.empty(64)
got["out"] = torch.equal(ops.one_shot_all_reduce_out(symmetric, "sum", name, out), reference)
copied = ops.one_shot_all_reduce_copy(symmetric, one[:8] + rank, "sum", name)
got["copy"] = torch.equal(copied, reference[:8])
symmetric.copy_(one + rank)
two = ops.two_shot_all_reduce_(symmetric, "sum", name)
got["two"] = torch.equal(two, reference) and two.data_ptr() == symmetric.data_ptr()
symmetric.copy_(one + rank)
dist.barrier()
part = torch.empty(64 // size)
if size == 2:
    ops.reduce_scatter_out(symmetric, name, False, part)
    got["scatter"] = torch.equal(part, reference.chunk(2)[rank])
torch.manual_seed(rank)
a, b = torch.randn(4, 8), torch.ones(8, 3)
rows = [torch.empty_like(a) for _ in range(size)]
dist.all_gather(rows, a)
_, (product,) = ops.fused_all_gather_matmul(a, [b], 0, name)
got["gather"] = torch.equal(product, torch.cat(rows) @ b)
summed = ops.fused_matmul_reduce_scatter(torch.ones(size * 2, 8), b, "sum", 0, name)
got["matmul"] = summed.tolist() == [[8.0 * size] * 3] * 2
got["workspace"] = symm_mem.get_symm_mem_workspace(name, 4096).buffer_size
"""

    results = got(simulated(steps, ranks=2, on=on))

    assert [result.pop("workspace") for result in results] == [4_096, 4_096]
    assert len(results[0]) == 7
    assert all(all(result.values()) for result in results), results


def test_a_signal_takes_the_time_of_a_message_on_a_machine(
    simulated: Callable[..., Finished],
) -> None:
    trials = [
        simulated("handle.barrier()\n" * count, "--virtual-clock", on="sim:switch8")
        for count in (1, 21)
    ]

    few, many = (_microseconds(finished) for finished in trials)
    assert 20 * 0.5 < many - few < 20 * 20


def _microseconds(finished: Finished) -> float:
    assert finished.code == 0, finished.stderr
    (told,) = [text for text in finished.stderr.splitlines() if text.startswith("  time")]
    amount, unit = told.split()[1:3]
    return float(amount) * {"us": 1.0, "ms": 1_000.0}[unit]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (
            "if rank == 0: handle.wait_signal(1, channel=3)",
            "waits for the signal of rank 1 for rank 0 on channel 3 of symmetric memory",
        ),
        (
            "if rank == 0: handle.put_signal(1); handle.put_signal(1)",
            "waits for rank 1 to take the last signal of rank 0 on channel 0 of symmetric memory",
        ),
        (
            "if rank == 0: handle.wait_signal(1, timeout_ms=500)",
            "CollectiveTimeout: waited 500 ms of virtual time for the signal of rank 1 for rank 0",
        ),
        (
            "symm_mem.rendezvous(torch.ones(3), world)",
            "symm_mem.rendezvous of a tensor of shape (3,), which is not symmetric memory",
        ),
        (
            "torch.ops.symm_mem.one_shot_all_reduce(symm_mem.empty(3), 'sum', name)",
            "symm_mem.one_shot_all_reduce of a tensor that has had no rendezvous in group '0'",
        ),
        (
            "torch.ops.symm_mem.one_shot_all_reduce(symmetric, 'max', name)",
            "symm_mem.one_shot_all_reduce has reduce_op='max'; it can do 'sum'",
        ),
        (
            "symm_mem.rendezvous(symm_mem.empty(3 + rank), world)",
            "symm_mem.rendezvous #2 of 12 bytes",
        ),
        ("handle.barrier(channel=99999)", "channel 99999: the signal pad of 9216 bytes has"),
        ("handle.get_buffer(7, (3,), torch.float32)", "rank 7 is not in the group of this"),
        ("handle.get_buffer(0, (3000,), torch.float32)", "end at byte 12000, and it has 256"),
    ],
)
def test_misuse_is_told(steps: str, told: str, simulated: Callable[..., Finished]) -> None:
    finished = simulated(steps, ranks=2)

    assert finished.code in {1, 124}  # failed, or hung
    assert told in finished.stderr
