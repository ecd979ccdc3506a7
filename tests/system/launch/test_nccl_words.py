"""What NCCL's recorder and watchdog tell, in the words of torch 2.13, on a machine without NCCL."""

import os
import re
from pathlib import Path

import pytest
from running import run, write_program

pytestmark = [pytest.mark.system, pytest.mark.torch]
pytest.importorskip("torch")

# torch's watchdog ends a rank whose collective of NCCL takes longer than its group's timeout. The
# text is that of ProcessGroupNCCL.cpp; gloo carries the collective out.
WATCHDOG = """
import os, sys, threading
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(4)
dist.all_reduce(x)
if rank == 2:
    with open(sys.argv[1]) as fifo:  # nothing is ever written
        fifo.read()

def watch():
    threading.Event().wait(2.5)
    print(f"[rank{rank}]:[E1128 10:00:00.1 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught "
          "collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=4, "
          "NumelOut=4, Timeout(ms)=2500) ran for 2501 milliseconds before timing out.",
          file=sys.stderr, flush=True)
    os.abort()

threading.Thread(target=watch, daemon=True).start()
dist.all_reduce(x)
"""
RECORDED = """
import json, time
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
import torch._C._distributed_c10d as c
from rankwise.drivers.real.worker.torch_calls import recorded_groups

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
now = time.time_ns()

def entry(number, state, retired):
    return {
        "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"],
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number,
        "profiling_name": "nccl:all_reduce", "time_created_ns": now + number,
        "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]],
        "output_dtypes": ["Float"], "state": state, "is_p2p": False, "retired": retired,
        "timeout_ms": 600000,
    }

calls = [entry(1, "completed", True), entry(2, "completed", False), entry(3, "started", False)]
c._dump_nccl_trace_json = lambda: json.dumps({"version": "2.10", "entries": calls}).encode()
(group,) = json.loads(recorded_groups(c10d, 0, 0))
print([(call["signature"][0], call["number"], call["is_over"]) for call in group["calls"]])
"""


def test_rank_that_nccls_watchdog_ends_is_no_root_cause_and_replay_tells_why_its_exit_waited(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "fifo")
    script, logs = write_program(tmp_path, WATCHDOG), tmp_path / "logs"
    options = ("--standalone", "--nproc-per-node", "3", "--log-dir", str(logs))

    done = run("run", *options, str(script), str(tmp_path / "fifo"))
    replayed = run("replay", str(logs))

    assert "root cause: rank 2 has not come to all_reduce #2" in done.stderr, done.stderr
    assert replayed.code == 0, replayed.stderr
    held = re.search(r"held back the exits? of rank ([01]) for \d.*?: (.*)", replayed.stdout)
    assert held is not None, replayed.stdout
    assert held[2] == (
        f"a time limit ended rank {held[1]}, which may have waited for another rank; "
        "asked the ranks for their calls; blamed rank 2"
    )


def test_calls_in_nccls_recorder_are_over_once_the_gpu_has_completed_them(tmp_path: Path) -> None:
    script = write_program(tmp_path, RECORDED)

    done = run("run", "--standalone", "--nproc-per-node", "1", "--no-prefix", str(script))

    assert done.lines == [
        "[('all_reduce', 1, True), ('all_reduce', 2, True), ('all_reduce', 3, False)]"
    ], done.stderr
