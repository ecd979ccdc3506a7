"""Programs that can never end: each is reported at once, with each rank's operation and line."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from preloaded import Preloaded
from running import Finished, run, write_program

import rankwise
from rankwise import collectives
from rankwise.launch.inside.run_path import run_script_path

AT_ONCE_S = 100
"""Collectives have time-outs of 300 s, torch's of 1,800 s."""


def simulate(text: str, folder: Path, *options: str, nprocs: int = 4) -> Finished:
    program = write_program(folder, text)
    begun = time.monotonic()
    finished = run(
        "run", "--on", "sim", f"--nproc-per-node={nprocs}", *options, str(program),
        cwd=folder,
    )  # fmt: skip
    assert time.monotonic() - begun < AT_ONCE_S
    return finished


NUMPY = (
    "import numpy as np\nimport rankwise\nfrom rankwise import collectives\n"
    "rank = rankwise.rank()\n"
)
TORCH = (
    "import torch\nimport torch.distributed as dist\ndist.init_process_group()\n"
    "rank, size = dist.get_rank(), dist.get_world_size()\n"
)

CASES = {
    "different operations": (
        NUMPY + "if rank == 2:\n    collectives.barrier()\n"
        "else:\n    collectives.all_reduce(np.ones(4))\n",
        1,
        [
            "operation #1 of group rankwise.collectives (ranks 0-3) differs",
            "ranks 0-1, 3 called all_reduce #1 (sum) of (4,) float64 at",
            "rank 2 called barrier #1 at",
            "program.py:6 in <module>",
        ],
    ),
    "different shapes": (
        NUMPY + "collectives.all_reduce(np.ones(3 + rank // 3))\n",
        1,
        [
            "ranks 0-2 called all_reduce #1 (sum) of (3,) float64",
            "rank 3 called",
            "of (4,) float64",
        ],
    ),
    "different roots": (
        NUMPY + "collectives.broadcast(np.ones(3), root=rank % 2)\n",
        1,
        [
            "ranks 0, 2 called broadcast #1 from rank 0",
            "ranks 1, 3 called broadcast #1 from rank 1",
        ],
    ),
    "one comes later than another has patience": (
        NUMPY + "import time\nif rank == 1:\n    time.sleep(600)\ncollectives.barrier(timeout=5)\n",
        1,
        [
            "root cause: rank 1 has not come to barrier #1 (program.py:8), ",
            "in which ranks 0, 2-3 wait: it is at program.py:7",
            "has waited 5 s of virtual time for barrier #1",
        ],
    ),
    "one gives up by its own fault": (
        NUMPY + "import time\ntime.sleep(rank == 3)\n"
        "collectives.broadcast(np.ones(3), out=np.ones(4 - (rank != 1)))\n",
        1,
        ["root cause: rank 1 failed: ConfigError: broadcast #1"],
    ),
    "one has ended": (
        NUMPY + "if rank != 3:\n    collectives.barrier()\n",
        1,
        ["barrier #1 cannot be completed: rank 3 has ended (exit code 0)"],
    ),
    "a torch rank skips an operation in a function": (
        TORCH + "def step():\n    dist.all_reduce(torch.ones(2))\nif rank != 1:\n    step()\n",
        1,
        [
            (
                "cause: rank 1 was done without a call of that group, while ranks 0, 2-3 wait in "
                "all_reduce #1 (sum) of (2,) float32 (program.py:6)"
            ),
        ],
    ),
    "a torch rank skips an operation": (
        TORCH + "dist.barrier()\nif rank != 1:\n    dist.all_reduce(torch.ones(2, 3))\n",
        1,
        [
            (
                "cause: rank 1 was done after barrier #1 (program.py:5), while ranks 0, 2-3 wait "
                "in all_reduce #2 (sum) of (2, 3) float32 (program.py:7)"
            ),
        ],
    ),
    "torch ranks differ in dtype": (
        TORCH + "dist.all_reduce(torch.ones(2, dtype=[torch.float32, torch.float64][rank % 2]))\n",
        1,
        ["ranks 0, 2 called all_reduce #1 (sum) of (2,) float32", "of (2,) float64"],
    ),
    "torch ranks differ in reduction": (
        TORCH
        + "dist.all_reduce(torch.ones(2), op=[dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank % 2])\n",
        1,
        ["called all_reduce #1 (sum)", "called all_reduce #1 (max)"],
    ),
    "torch ranks differ in root": (
        TORCH + "dist.broadcast(torch.ones(2), src=rank // 2)\n",
        1,
        ["broadcast #1 from rank 0", "broadcast #1 from rank 1"],
    ),
    "torch ranks differ in backward": (
        TORCH + "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))\n"
        "loss = model(torch.ones(1, 3)).sum()\n"
        "if rank != 2:\n    loss.backward()\n"
        "dist.barrier()\n",
        1,
        ["rank 2 called barrier #4 at", "program.py:9 in <module>", "program.py:8 in <module>"],
    ),
    "a circle of sends": (
        TORCH + "dist.send(torch.ones(3), (rank + 1) % size)\n"
        "dist.recv(torch.ones(3), (rank - 1) % size)\n",
        1,
        [
            (
                "root cause: ranks wait for each other: rank 0 in send of (3,) float32 to rank 1 "
                "(program.py:5) for rank 1; rank 1 in send"
            ),
            "(program.py:5) for rank 2; and so on, to rank 3 for rank 0\n",
            "line 5 in <module>",
        ],
    ),
    "a message that nobody sends": (
        TORCH + "if rank == 0:\n    dist.recv(torch.ones(3), 1, tag=5)\n",
        1,
        [
            (
                "cause: rank 1 was done, while rank 0 waits in recv of (3,) float32 from rank 1, "
                "tag 5 (program.py:6)"
            ),
        ],
    ),
    "a message of another size": (
        TORCH + "if rank == 0:\n    dist.send(torch.ones(3), 1)\n"
        "elif rank == 1:\n    dist.recv(torch.ones(4), 0)\n",
        1,
        [
            "a message does not fit: rank 0 sends 3 of float32, rank 1 takes 4 of float32",
            "root cause: rank 0 sends 3 elements, rank 1 takes 4: send of (3,)",
            "a receive needs as many elements as its send",
            "rank 0 called send of (3,)",
            "rank 1 called recv of (4,)",
        ],
    ),
    "overlapping groups in different order": (
        TORCH + "a, b = dist.new_group([0, 1]), dist.new_group([0, 1], backend='gloo')\n"
        "for group in ((a, b) if rank == 0 else (b, a)):\n"
        "    if rank < 2:\n        dist.all_reduce(torch.ones(2), group=group)\n",
        1,
        [
            (
                "cause: ranks wait for each other: rank 0 in all_reduce #1 (sum) of (2,) float32 "
                "in group [0, 1] (program.py:8), number 1 of 2 such groups, for rank 1; rank 1 in"
            ),
            "in group [0, 1] (program.py:8), number 2 of 2 such groups, for rank 0",
        ],
    ),
    "overlapping groups in different order that meet all the same": (
        TORCH + "a, b = dist.new_group([0, 1]), dist.new_group([0, 1])\n"
        "if rank < 2:\n    order = (a, b) if rank == 0 else (b, a)\n"
        "    for handle in [dist.all_reduce(torch.ones(2), group=each, async_op=True)"
        " for each in order]:\n        handle.wait()\n",
        0,
        [
            "warning: ranks 0 and 1 use overlapping groups in different order: all_reduce #1 (sum)",
            "comes after 1 operation of group 1:0,1 (ranks 0-1) on rank 0, at ",
            "program.py:8 in <listcomp>, and after 0 operations on rank 1",
        ],
    ),
    "a handle that nobody waits for": (
        TORCH + "for _ in range(3):\n    dist.all_reduce(torch.ones(2), async_op=True)\n"
        "dist.barrier()\n",
        0,
        [
            "warning: rank 0 never waited for all_reduce #1 (sum) of (2,) float32 in group default",
            "program.py:6 in <module> (and 11 more)",
        ],
    ),
    "a tensor that is written in flight": (
        TORCH + "tensor = torch.ones(2)\nhandle = dist.all_reduce(tensor, async_op=True)\n"
        "tensor += 1\nhandle.wait()\n",
        0,
        [
            "warning: rank 0 wrote to a tensor of (2,) float32 while all_reduce #1 (sum) of (2,)",
            "it was called at",
            "program.py:6 in <module> and waited for at",
            "program.py:8 in <module>",
        ],
    ),
    "a tensor that is written in flight through its memory": (
        TORCH + "def write_view(tensor): tensor.view(2, 1)[0].add_(1)\n"
        "def write_data(tensor): tensor.data.mul_(3)\n"
        "def write_numpy(tensor): tensor.numpy()[1] = 7\n"
        "def write_when_done(tensor):\n    dist.barrier()\n    tensor.numpy()[1] = 7\n"
        "def flight(tensor, write):\n"
        "    handle = dist.all_reduce(tensor, async_op=True)\n    write(tensor)\n"
        "    handle.wait()\n"
        "for write in (write_view, write_data, write_numpy, write_when_done):\n"
        "    flight(torch.ones(2), write)\n"
        "flight(torch.ones(1 << 20)[1:], lambda tensor: tensor.data.add_(1))\n",
        0,
        [
            "warning: rank 0 wrote to a tensor of (2,) float32 while all_reduce #1 (sum) of (2,)",
            # Four ranks, five writes.
            "program.py:14 in flight (and 19 more)",
        ],
    ),
    "a tensor that is read in flight": (
        TORCH + "import numpy, warnings\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "def read_base(base): return base + 1\n"
        "def read_view(base): return base.view(2, 2).t()[1].sum()\n"
        "def read_number(base): return base[1].item()\n"
        "def read_list(base): return base.tolist()\n"
        "def read_numpy(base): return numpy.asarray(base).sum()\n"
        "def read_foreach(base): return torch._foreach_add([base], 1)\n"
        "def read_in_mode(base):\n    with FlopCounterMode(display=False): return base + 1\n"
        "def leave_alone(base): return base.view(2, 2).shape, base.detach(), base.data_ptr()\n"
        "def read_rest(base): return base[2:].sum(), base.view(2, 2)[1].tolist()\n"
        "def flight(base, read):\n"
        "    handle = dist.all_reduce(base[:2], async_op=True)\n    read(base)\n"
        "    handle.wait()\n    base.sum().item()\n"
        "for read in (read_base, read_view, read_number, read_list, read_numpy, read_foreach,\n"
        "             read_in_mode, leave_alone, read_rest):\n"
        "    flight(torch.ones(4), read)\n"
        "for handle in (dist.broadcast(torch.ones(4), 0, async_op=True),):\n    handle.wait()\n"
        "sent, taken = torch.ones(2), torch.zeros(2)\n"
        "sending = dist.isend(sent, (rank + 1) % 4)\n"
        "taking = dist.irecv(taken, (rank - 1) % 4)\n"
        "sent.sum(), taken.sum()\nsending.wait(), taking.wait()\n"
        "from torch.utils._python_dispatch import _len_torch_dispatch_stack as left\n"
        "assert not left()\n",
        0,
        [
            "warning: rank 0 read a tensor of (4,) float32 at ",
            "program.py:7 in read_base while all_reduce #1 (sum) of (2,) float32",
            # Four ranks, seven reads.
            "program.py:18 in flight and waited for at ",
            "program.py:20 in flight (and 27 more)",
            "warning: rank 1 read a tensor of (2,) float32 at ",
            "in <module> while recv of (2,) float32 from rank 0",
            "(and 3 more)",
        ],
    ),
    "messages that are never met": (
        TORCH + "if rank == 0:\n    dist.isend(torch.ones(2), 1, tag=3)\n"
        "if rank == 1:\n    dist.irecv(torch.ones(2), 0)\n",
        0,
        [
            "warning: rank 0 called send of (2,) float32 to rank 1, tag 3, #1 in group default at",
            "program.py:6 in <module>, and it was never received",
            "warning: rank 1 called recv of (2,) float32 from rank 0, tag 0, #1 in group default",
            "program.py:8 in <module>, and it was never sent",
        ],
    ),
    "an operation that the others never came to": (
        TORCH + "if rank == 2:\n    dist.all_reduce(torch.ones(2), async_op=True)\n",
        0,
        ["rank 2 called all_reduce #1 (sum)", "and ranks 0-1, 3 never did"],
    ),
    "a group that a member does not make": (
        TORCH + "if rank != 1:\n    dist.new_group([0, 1])\ndist.all_reduce(torch.ones(2))\n",
        124,
        [
            "waits for the group of ranks 0-1, not made by rank 1",
            "in group default (ranks 0-3), not called by rank 0",
        ],
    ),
    "a rank that leaves before the others": (
        NUMPY + "if rank == 1:\n    raise SystemExit\ncollectives.barrier()\n",
        1,
        [
            "rank 1 was done without a call of that group, while ranks 0, 2-3 wait in barrier #1",
        ],
    ),
    "a monitored barrier without two ranks": (
        TORCH + "import time\nfrom datetime import timedelta\nif rank in (1, 2):\n"
        "    time.sleep(9)\ndist.monitored_barrier(timeout=timedelta(seconds=2))\n",
        1,
        [
            "RuntimeError: Ranks 1-2 failed to pass monitoredBarrier in 2000 ms: timed out",
            "ranks 1-2 have not come to monitored_barrier #1 (program.py:9), in which ranks 0, 3",
        ],
    ),
    "a key that nobody sets": (
        TORCH + "if rank == 0:\n    dist.distributed_c10d._get_default_store().get('never')\n",
        124,
        ["never' of the store, which no rank has set"],
    ),
}


@pytest.mark.system
@pytest.mark.parametrize("name", CASES)
def test_the_report_names_operations_and_lines(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, code, wanted = CASES[name]
    program = write_program(tmp_path, text)

    ended, told = 0, ""
    try:  # in this process, which imports torch once for all
        rankwise.run(run_script_path, (str(program),), nprocs=4, on="sim")
    except rankwise.WorkersFailed as failed:
        ended = 124 if failed.failures[0].cause is rankwise.FailureCause.HUNG else 1
        told = str(failed)

    told += capfd.readouterr().err
    missing = [words for words in wanted if words not in told]
    assert (ended, missing) == (code, []), told


LEFT_ALONE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
other = 1 - dist.get_rank()
tensor, whole = torch.ones(4), torch.zeros(8)
works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
works.append(dist.all_reduce(whole[:4], async_op=True))
whole[4:] = 5
works += [dist.isend(torch.ones(3), other), dist.irecv(torch.ones(3), other)]
works.append(dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(2), async_op=True))
works.append(dist.all_reduce(torch.ones(2, dtype=torch.complex64), async_op=True))
works.append(dist.all_reduce(torch.empty(2, device="meta"), async_op=True))
works.append(dist.all_reduce(torch.ones(3, 2).T, async_op=True))
for work in works:
    work.wait()
"""


@pytest.mark.torch
@pytest.mark.system
def test_operations_in_flight_on_the_same_memory_are_no_writes_of_the_program(
    tmp_path: Path,
) -> None:
    finished = simulate(LEFT_ALONE, tmp_path, "--nproc-per-node=2")

    assert finished.code == 0, finished.stderr
    assert "warning" not in finished.stderr


REFUSED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x, group = torch.ones(4), dist.group.WORLD
for call in (
    lambda: dist.all_gather([x], x),
    lambda: dist.gather(x, [x], dst=0),
    lambda: dist.scatter(x, [x], src=0),
    lambda: dist.reduce_scatter(x, [x]),
    lambda: dist.all_to_all([x], [x, x]),
    lambda: dist.all_gather_into_tensor(torch.ones(5), x),
    lambda: dist.reduce_scatter_tensor(x, torch.ones(10)),
    lambda: dist.scatter(x, [x, x.view(2, 2)], src=0),
    lambda: dist.all_to_all_single(torch.ones(4), x, [2, 2], [1, 2]),
    lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
    lambda: group.send([x], 7, 0),
):
    if dist.get_rank() == 0:
        try:
            call()
        except (RuntimeError, ValueError) as error:
            print(error)
"""


@pytest.mark.torch
@pytest.mark.system
def test_arguments_that_do_not_fit_the_group_are_refused_where_they_are_given(
    tmp_path: Path,
) -> None:
    finished = simulate(REFUSED, tmp_path, "--no-prefix", "--nproc-per-node=2")

    assert finished.code == 0, finished.stderr
    one_each = "expected one for each of the 2 ranks of the group"
    of_rank_0, alike = "rank 0 is", "(4,) float32; gloo wants equal shapes"
    wanted = "(4,) float32; for 2 ranks gloo wants (8,) float32"
    splits = "the input has 4 rows and splits [1, 2]; expected 2 splits with this sum"
    division = "the 3 rows of the output cannot be divided by the 2 ranks of the group"
    assert finished.lines == [
        f"all_gather: 1 output tensors; {one_each}",
        f"gather: 1 output tensors; {one_each}",
        f"scatter: 1 input tensors; {one_each}",
        f"reduce_scatter: 1 input tensors; {one_each}",
        f"all_to_all: 1 output tensors; {one_each}",
        f"all_gather_single: the output of {of_rank_0} (5,) float32, and the input {wanted}",
        f"reduce_scatter_single: the input of {of_rank_0} (10,) float32, and the output {wanted}",
        f"scatter: input tensor 1 of {of_rank_0} (2, 2) float32, and the output {alike}",
        f"all_to_all_single: {splits}",
        f"all_to_all_single: {division}; give splits",
        "send: rank 7 is not in the group, which has ranks 0 to 1",
    ]


UNEVEN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_to_all_single(torch.empty(0, 4), torch.empty(0, 4))
given, got = ([1, 2], [1, 2]) if rank == 0 else ([3, 1], [2, 1])
dist.all_to_all_single(torch.empty(sum(got), 4), torch.empty(sum(given), 4), got, given)
"""


@pytest.mark.torch
@pytest.mark.system
def test_ranks_that_expect_other_parts_than_they_are_sent_are_told_which(tmp_path: Path) -> None:
    finished = simulate(UNEVEN, tmp_path, "--nproc-per-node=2")

    assert finished.code == 1
    told = "all_to_all_single: rank 1 sends 12 elements to rank 0, which has room for 8"
    assert told in finished.stderr


@pytest.mark.system
@pytest.mark.parametrize("name", ["one has ended", "a key that nobody sets"])
def test_the_exit_code_is_that_of_real_processes(name: str, tmp_path: Path) -> None:
    text, code, wanted = CASES[name]

    finished = simulate(text, tmp_path)

    missing = [words for words in wanted if words not in finished.stderr]
    assert (finished.code, missing) == (code, []), finished.stderr


@pytest.mark.system
@pytest.mark.parametrize("first", [0, 1])
def test_of_two_that_disagree_the_one_that_has_raised_is_shown_where_it_called(
    first: int, tmp_path: Path
) -> None:
    call = (
        "def step():\n    if rank == 0:\n        dist.broadcast(torch.ones(2), 0)\n"
        f"    else:\n        dist.all_reduce(torch.ones(2))\nif rank != {first}:\n"
        "    import time\n    time.sleep(1)\nstep()\n"
    )

    done = simulate(TORCH + call, tmp_path, nprocs=2)

    program = tmp_path / "program.py"
    for rank, line in ((0, 7), (1, 9)):
        stack = (
            f"  rank {rank}, innermost call first:\n"
            f'      File "{program}", line {line} in step\n'
            f'      File "{program}", line 13 in <module>\n'
        )
        assert stack in done.stderr


@pytest.mark.torch
def test_one_rank_can_use_the_profiler_of_torch_and_another_one_is_told_so(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    text = TORCH + (
        "from torch.profiler import ProfilerActivity, profile\n"
        "def profiled():\n    with profile(activities=[ProfilerActivity.CPU]) as done:\n"
        "        torch.ones(3) + 1\n    print(len(done.key_averages()) > 0)\n"
        "if rank == 1:\n    profiled()\ndist.barrier()\nif rank == 0:\n    profiled()\n"
    )

    finished = preloaded.run(
        "run", "--on=sim", "--nproc-per-node=2", "--no-prefix", write_program(tmp_path, text)
    )

    assert finished.code == 1
    assert finished.lines == ["True"]
    assert "rank 0 starts torch's profiler, which rank 1 has used" in finished.stderr


def test_a_rank_that_really_blocks_meets_the_hang_timeout(tmp_path: Path) -> None:
    finished = simulate(
        NUMPY + "import os\nif rank == 1:\n    os.read(os.pipe()[0], 1)\ncollectives.barrier()\n",
        tmp_path, "--hang-timeout=5s",  # the ranks import numpy meanwhile, on a busy machine too
    )  # fmt: skip

    assert finished.code == 124
    verdict = "the gang hung: rank 1 has let no other rank run for 5 s: it is at program.py:7\n"
    assert f"root cause: {verdict}" in finished.stderr
    assert "line 7 in <module>" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert "not called by ranks 1-3\n" in finished.stderr, "nobody had ended before the hang"
    assert "waits for its first turn" in finished.stderr


COMPUTES = """
def compute(seconds):
    end_at = time.thread_time() + seconds
    while time.thread_time() < end_at:
        pass
"""
BUSY = {
    "in its own thread": "compute(2)\n",
    "in a thread": "helper = threading.Thread(target=compute, args=(2,))\n"
    "helper.start()\nhelper.join()\n",
    "in a child": "code = 'import time\\nwhile time.process_time() < 2: pass'\n"
    "subprocess.run([sys.executable, '-c', code], check=True)\n",
}
IDLE = {
    "in a pipe": "import os\nos.read(os.pipe()[0], 1)\n",
    "and prints that it lives": "def live():\n    while True:\n"
    "        print('I live ' * 20_000, flush=True)\n        time.sleep(0.25)\n"
    "threading.Thread(target=live, daemon=True).start()\nthreading.Event().wait()\n",
}


@pytest.mark.system
@pytest.mark.parametrize("name", BUSY)
def test_a_rank_that_computes_for_longer_than_the_hang_timeout_has_not_hung(
    name: str, tmp_path: Path
) -> None:
    text = "import subprocess, sys, threading, time\n" + NUMPY + COMPUTES + "if rank == 1:\n"
    text += "".join(f"    {line}\n" for line in BUSY[name].splitlines())

    finished = simulate(text + "collectives.barrier()\n", tmp_path, "--hang-timeout=1s")

    assert finished.code == 0, finished.stderr


@pytest.mark.system
@pytest.mark.parametrize("name", IDLE)
def test_a_rank_that_blocks_has_hung_whatever_it_prints(name: str, tmp_path: Path) -> None:
    text = "import threading, time\n" + NUMPY + "if rank == 1:\n"
    text += "".join(f"    {line}\n" for line in IDLE[name].splitlines())

    finished = simulate(text, tmp_path, "--hang-timeout=2s", "--log-dir", str(tmp_path / "logs"))

    assert finished.code == 124
    assert "root cause: the gang hung: rank 1 has let no other rank run for 2 s" in finished.stderr


def test_a_rank_that_really_blocks_is_told_of_without_any_timeout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rankwise.simranks.world.patience.NOTICE_S", 0.2)

    def block() -> None:
        threading.Event().wait(1.0)

    rankwise.run(block, nprocs=2, on="sim")

    told = capfd.readouterr().err
    assert "rank 0 has let no other rank run for " in told
    assert " in block (simulated ranks take turns" in told


def test_a_rank_that_keeps_no_other_waiting_gets_no_notice(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rankwise.simranks.world.patience.NOTICE_S", 0.1)

    def block() -> None:
        threading.Event().wait(0.5)

    rankwise.run(block, nprocs=1, on="sim")

    assert "let no other rank run" not in capfd.readouterr().err


def test_notice_of_a_long_turn_without_data_says_that_large_models_take_minutes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rankwise.simranks.world.patience.NOTICE_S", 0.2)

    def block() -> None:
        threading.Event().wait(1.0)

    rankwise.run(block, nprocs=2, on="sim:switch8", timing_only=True)

    told = capfd.readouterr().err
    assert "rank 0 has run for " in told
    assert " (large models take minutes; if it blocks, --hang-timeout" in told


def test_a_mismatch_can_be_expected_in_a_test() -> None:
    def differ() -> str:
        with pytest.raises(rankwise.CollectiveError) as caught:
            collectives.broadcast([rankwise.rank()], root=rankwise.rank())
        return str(caught.value)

    first, second = rankwise.run(differ, nprocs=2, on="sim")

    assert first == second
    assert "rank 1 called broadcast #1 from rank 1" in first


def test_a_deadlock_is_told_by_what_the_ranks_wait_for() -> None:
    def skip() -> None:
        if rankwise.rank() == 0:
            collectives.barrier()
        else:
            collectives.barrier()
            collectives.barrier(timeout=5)

    with pytest.raises(rankwise.WorkersFailed) as caught:
        rankwise.run(skip, nprocs=2, on="sim")

    assert "rank 0 has ended" in str(caught.value)


def test_a_crash_in_c_shows_the_stack_of_the_rank_that_crashed(tmp_path: Path) -> None:
    source = "import ctypes, os\nif os.environ['RANK'] == '1':\n    ctypes.string_at(0)\n"
    program = write_program(tmp_path, source)

    done = run("run", "--on", "sim", "--nproc-per-node=2", program)

    assert done.code == -signal.SIGSEGV
    head, _, stack = done.stderr.partition("(most recent call first):\n")
    assert "Fatal Python error: Segmentation fault" in head
    assert f'File "{program}", line 3 in <module>' in stack
    assert done.stderr.count("(most recent call first)") == 1


LOOPS = {
    "polls an operation": "while not work.is_completed():\n    time.sleep(0.01)\n",
    "polls without a pause": "while not work.is_completed():\n    pass\n",
    "polls two operations": "other = dist.all_reduce(torch.ones(2), async_op=True)\n"
    "while not all([work.is_completed(), other.is_completed()]):\n    pass\n",
    "polls the store": "store = dist.distributed_c10d._get_default_store()\n"
    "while not store.check(['done']):\n    pass\n",
    "has an alarm": "signal.signal(signal.SIGALRM, lambda *_: None)\n"
    "signal.setitimer(signal.ITIMER_REAL, 1, 1)\nwork.wait()\n",
}


@pytest.mark.torch
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_hides_no_hang_when_there_is_a_hang_timeout(name: str, tmp_path: Path) -> None:
    text = "import signal, time\n" + TORCH + "if rank == 0:\n    time.sleep(1)\nelse:\n"
    text += "    work = dist.all_reduce(torch.ones(2), async_op=True)\n"
    text += "".join(f"    {line}\n" for line in LOOPS[name].splitlines())
    text += "dist.recv(torch.ones(1), 1)\n"

    finished = simulate(text, tmp_path, "--hang-timeout=60s", nprocs=2)

    assert finished.code == 1
    cause = (
        "ranks wait for each other: rank 0"
        if "wait()" in text
        else "rank 1 has not answered rank 0"
    )
    assert f"root cause: {cause} in recv of (1,) float32 from rank 1" in finished.stderr


@pytest.mark.torch
def test_ranks_that_look_into_the_store_in_a_loop_let_others_run(tmp_path: Path) -> None:
    text = TORCH + "store = dist.distributed_c10d._get_default_store()\nstore.add('here', 1)\n"
    text += "while store.add('here', 0) < size:\n    pass\nstore.queue_push('all', 'x')\n"
    text += "while store.queue_len('all') < size:\n    pass\nif rank == 0:\n"
    text += "    store.set('count', str(store.num_keys()))\ncount = int(store.get('count'))\n"
    text += "store.set(f'key {rank}', 'x')\nwhile store.num_keys() < count + 1 + size:\n    pass\n"

    finished = simulate(text, tmp_path, "--hang-timeout=20s", nprocs=2)

    assert finished.code == 0, finished.stderr


@pytest.mark.torch
def test_a_look_in_each_step_takes_next_to_no_time(tmp_path: Path) -> None:
    text = "import time\n" + TORCH + "store = dist.distributed_c10d._get_default_store()\n"
    text += "begun = time.monotonic()\nfor _ in range(2_000):\n"
    text += "    store.check(['stop'])\n    time.sleep(0.1)\n"

    finished = simulate(text + "assert time.monotonic() - begun < 220\n", tmp_path, nprocs=1)

    assert finished.code == 0, finished.stderr


@pytest.mark.parametrize("limit", ["400ms", "20s", "2m"])
def test_ranks_that_only_sleep_hang_as_real_ones_do(limit: str, tmp_path: Path) -> None:
    text = "import time\nwhile True:\n    time.sleep(0.1)\n"

    finished = simulate(text, tmp_path, f"--hang-timeout={limit}", nprocs=2)

    assert finished.code == 124
    told = limit.replace("ms", " ms").replace("0s", "0 s").replace("2m", "2 min")
    assert f"root cause: the gang hung: no progress for {told} of virtual" in finished.stderr
    assert "time: ranks sleep, poll or wait" in finished.stderr
    assert 'program.py", line 3 in <module>' in finished.stderr


def test_the_rest_of_an_attempt_that_has_hung_is_none_of_the_next_one(tmp_path: Path) -> None:
    text = (
        "import itertools, os, time\nhas_failed = os.environ['TORCHELASTIC_RESTART_COUNT'] != '0'\n"
    )
    text += "for _ in range(100) if has_failed else itertools.count():\n    time.sleep(1)\n"

    finished = simulate(text, tmp_path, "--hang-timeout=150s", "--max-restarts=1", nprocs=2)

    assert finished.code == 0, finished.stderr


@pytest.mark.system
def test_a_rank_that_waits_for_its_child_in_a_loop_has_not_hung(tmp_path: Path) -> None:
    text = "import subprocess, sys, time\n" + NUMPY + "if rank == 0:\n"
    text += "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(0.5)'])\n"
    text += "    while child.poll() is None:\n        time.sleep(30)\n"

    finished = simulate(text + "collectives.barrier()\n", tmp_path, "--hang-timeout=60s", nprocs=2)

    assert finished.code == 0, finished.stderr


def test_sections_are_progress_of_ranks_that_sleep(tmp_path: Path) -> None:
    text = "import time\n" + NUMPY + "for _ in range(20 * (rank == 0)):\n"
    text += "    with rankwise.section('step'):\n        time.sleep(50)\ncollectives.barrier()\n"

    finished = simulate(text, tmp_path, "--hang-timeout=60s", nprocs=2)

    assert finished.code == 0, finished.stderr


def test_without_a_hang_timeout_a_rank_may_sleep_for_days() -> None:
    def sleep() -> None:
        for _ in range(100 * (rankwise.rank() == 0)):
            time.sleep(86_400)
        collectives.barrier()

    rankwise.run(sleep, nprocs=2, on="sim")


def test_without_a_hang_timeout_a_loop_ends_that_lets_others_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rankwise.simranks.run.time_watch.UNASKED_REAL", 0)

    def poll() -> None:
        if rankwise.rank() == 1:
            collectives.barrier()
        while True:
            time.sleep(1)

    others = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(others) as other:  # no rank has started it, so none waits for it
        try:
            with pytest.raises(rankwise.WorkersFailed, match="rank 0 has not come to barrier #1"):
                rankwise.run(poll, nprocs=2, on="sim")
        finally:
            other.kill()


SHAPES = """
base = torch.arange(6.0) + rank
def shaped(tensor):
    return tensor.reshape([(2, 3), (3, 2), (6,)][rank])
summed, given = shaped(base.clone()), shaped(base.clone())
dist.all_reduce(summed)
dist.broadcast(given, 1)
gathered = [shaped(torch.zeros(6)) for _ in range(3)]
dist.all_gather(gathered, shaped(base))
part = shaped(torch.zeros(6))
dist.reduce_scatter_tensor(part, torch.arange(18.0).reshape(-1, *part.shape[1:]))
dist.scatter(shaped(base), [shaped(torch.full((6,), 7.0))] * 3 if rank == 0 else None)
big = torch.full((40_000,), 1.0 + rank).reshape([(200, 200), (100, 400), (40_000,)][rank])
dist.all_reduce(big)
print([each.flatten().tolist() for each in (summed, given, *gathered, part)], base, big.sum())
"""


@pytest.mark.torch
@pytest.mark.system
def test_tensors_of_equal_size_and_different_shape_fit_as_in_gloo(tmp_path: Path) -> None:
    text = TORCH.replace("()", "('gloo')", 1) + SHAPES
    program = str(write_program(tmp_path, text))

    real = run("run", "--standalone", "--nproc-per-node=3", program)
    simulated = run("run", "--on=sim", "--nproc-per-node=3", program)

    assert simulated.code == real.code == 0, simulated.stderr + real.stderr
    assert sorted(simulated.lines) == sorted(real.lines)
    told = "all_reduce #1 (sum) of (2, 3) float32 in group default has tensors of equal size"
    assert told in simulated.stderr


@pytest.mark.torch
def test_a_missing_rank_is_to_blame_and_not_the_shapes_of_the_others(tmp_path: Path) -> None:
    text = TORCH + "if rank < 2:\n    dist.all_reduce(torch.ones([(2, 3), (3, 2)][rank]))\n"

    finished = simulate(text, tmp_path, nprocs=3)

    assert finished.code == 1
    assert "root cause: rank 2 " in finished.stderr
