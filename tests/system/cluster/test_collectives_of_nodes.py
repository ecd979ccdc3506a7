"""Collectives of a job on several nodes: agents that a user starts, ranks that find each other."""

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import free_ports
from nodes_in_namespaces import needs_namespaces, network
from running import RANKWISE, WITHIN_S, Running, run, wait_for_any, write_program

pytestmark = pytest.mark.system

PROGRAM = """
import os
import sys

import numpy as np

from rankwise import collectives

rank, size = collectives.rank(), collectives.size()
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
total = collectives.all_reduce(np.arange(100_000) * (rank + 1))
assert np.array_equal(total, np.arange(100_000) * (size * (size + 1) // 2))
swapped = collectives.all_to_all(np.arange(size) + 10 * rank)
assert swapped.tolist() == [10 * each + rank for each in range(size)]
if rank == size - 1 and restarts < int(sys.argv[1]):
    os._exit(7)
collectives.barrier()
print("rank", rank, "of", size, "after", restarts, flush=True)
assert "torch" not in sys.modules
"""
ONE_ENDS = """
import os
from rankwise import collectives
if os.environ["RANK"] == "1":
    os._exit(0)
collectives.barrier()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "reduce.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("local_sizes", [(1, 1), (2, 1)])
def test_a_job_of_two_agents_reduces_over_all_ranks_and_again_after_a_restart(
    program: Path, local_sizes: tuple[int, int]
) -> None:
    size, port = sum(local_sizes), free_ports(1)[0]
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                Running(
                    *(*RANKWISE, "run", "--nnodes", "2", "--nproc-per-node", str(local_size)),
                    *("--rdzv-backend", "embedded", "--rdzv-endpoint", f"127.0.0.1:{port}"),
                    *("--rdzv-id", "reduce", "--max-restarts", "1", str(program), "1"),
                )
            )
            for local_size in local_sizes
        ]
        ended = [node.finish() for node in nodes]

    assert [each.code for each in ended] == [0, 0], ended
    lines = sorted(line.partition(":")[2] for each in ended for line in each.lines)
    assert lines == [f"rank {rank} of {size} after 1" for rank in range(size)]


REDUCING_UNTIL_TOLD = """
import numpy as np

import rankwise
from rankwise import collectives

steps = 0
while not rankwise.should_stop():
    steps += 1
    collectives.all_reduce(np.ones(10))
    if steps == 100:
        print("under way", flush=True)
print(f"saved after {steps} steps", flush=True)
"""


def test_nodes_whose_ranks_meet_in_each_step_save_after_the_same_one(tmp_path: Path) -> None:
    program = write_program(tmp_path, REDUCING_UNTIL_TOLD)
    words = (
        *(*RANKWISE, "run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-id", "reduce"),
        *("--rdzv-backend", "embedded", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}"),
        str(program),
    )
    with ExitStack() as stack:
        nodes = [stack.enter_context(Running(*words)) for _ in range(2)]
        wait_for_any(nodes, "under way", count=4)
        nodes[0].signal(signal.SIGTERM)
        done = [node.finish() for node in nodes]

    assert [each.code for each in done] == [143, 143], done
    saved = re.findall(r"saved after \d+ steps", "".join(each.stdout for each in done))
    assert len(saved) == 4, done
    assert len(set(saved)) == 1


ONE_FAILS = """
import os
import sys

import numpy as np

import rankwise
from rankwise import collectives

while not rankwise.should_stop():
    print("under way", flush=True)
    if os.environ["RANK"] == sys.argv[1]:
        open(sys.argv[2]).read()
        os._exit(3)
    collectives.all_reduce(np.ones(10))
"""


@pytest.mark.parametrize("failing", [0, 1])
def test_a_stop_is_not_kept_waiting_for_a_rank_that_dies_before_it_is_connected(
    tmp_path: Path, failing: int
) -> None:
    program, order = write_program(tmp_path, ONE_FAILS), tmp_path / "order"
    os.mkfifo(order)
    words = (
        *(*RANKWISE, "run", "--nnodes", "2", "--rdzv-id", "dies"),
        *("--rdzv-backend", "embedded", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}"),
        *(str(program), str(failing), str(order)),
    )
    with ExitStack() as stack:
        nodes = [stack.enter_context(Running(*words)) for _ in range(2)]
        wait_for_any(nodes, "under way", count=2)
        nodes[0].signal(signal.SIGTERM)
        wait_for_any(nodes, "was told to stop", count=2, stream="stderr")
        order.write_text("fail")
        done = [node.finish(WITHIN_S) for node in nodes]  # in less than the grace

    assert [each.code for each in done] == [143, 143], done
    # Where the other rank calls later than that, nobody listens any more, and it says so.
    refused = r"( \(.* refuses connections\))?"
    said = rf"on rank {1 - failing}: rank {failing} has ended{refused}, it has not come to any"
    assert any(re.search(said, each.stderr) for each in done), done


FOLDING = """
import hashlib

import numpy as np

from rankwise import collectives

mine = np.random.default_rng(collectives.rank()).normal(size=1001).astype("f4")
results = [collectives.all_reduce(mine, "mean"), collectives.reduce_scatter(mine[:8].reshape(4, 2))]
everything = collectives.all_gather(results[1]).tobytes() + results[0].tobytes()
if collectives.rank() == 0:
    print("bits", hashlib.sha256(everything).hexdigest())
"""


def test_simulated_nodes_give_the_bits_of_real_ones(tmp_path: Path) -> None:
    program, port = tmp_path / "fold.py", free_ports(1)[0]
    program.write_text(FOLDING)
    run = (*RANKWISE, "run", "--nnodes", "2", "--nproc-per-node", "2")
    meet = ("--rdzv-backend", "embedded", "--rdzv-endpoint", f"127.0.0.1:{port}")
    with ExitStack() as stack:
        commands = [(*run, *meet, str(program))] * 2 + [(*run, "--on", "sim", str(program))]
        running = [stack.enter_context(Running(*command)) for command in commands]
        ended = [each.finish() for each in running]

    assert [each.code for each in ended] == [0, 0, 0], ended
    bits = [line for each in ended for line in each.lines if "bits" in line]
    assert len(bits) == 2
    assert len(set(bits)) == 1


@needs_namespaces
def test_ranks_of_nodes_with_addresses_of_their_own_find_each_other(program: Path) -> None:
    with network() as net, ExitStack() as stack:
        first, second = net.add_node(), net.add_node()
        words = (
            *("run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "embedded"),
            *("--rdzv-endpoint", f"{first.address}:29400", "--rdzv-id", "reduce", program, "0"),
        )
        ended = [
            node.finish()
            for node in [stack.enter_context(each.start(*words)) for each in (first, second)]
        ]

    assert [each.code for each in ended] == [0, 0], ended
    assert sum("of 4 after 0" in line for each in ended for line in each.lines) == 4


def test_ranks_that_wait_for_a_lost_one_show_their_own_frames_only(tmp_path: Path) -> None:
    script = write_program(tmp_path, ONE_ENDS)

    done = run("run", "--nproc-per-node", "2", script)

    assert done.code == 1
    assert "collectives.barrier()" in done.stderr
    assert "barrier #1 cannot be completed on rank 0" in done.stderr
    assert "rankwise/collectives/" not in done.stderr
