"""Who keeps the others waiting in a collective is the root cause, not those that waited.

The programs of torch wait for no time-out of their own but where that is the point: a run that
nobody ends would take the half hour of gloo's.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from running import Finished, run, write_program
from warm import run_on

import rankwise

pytestmark = pytest.mark.system

PREAMBLES = {
    "numpy": """
import numpy, time, rankwise
from rankwise import collectives as dist
rank = rankwise.rank()
x = numpy.ones(4096, numpy.float32)
""",
    "torch": """
import datetime, time, torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
rank = dist.get_rank()
x = torch.ones(4096)
""",
}
BREATHING = "torch that shows signs of life while it is imported"
PREAMBLES[BREATHING] = f"""
import threading
is_up = threading.Event()
def breathe():
    while not is_up.wait(0.2):
        print("importing", flush=True)
threading.Thread(target=breathe).start()
{PREAMBLES["torch"]}
is_up.set()
"""
LATE = """
def load():
    time.sleep(600)
for step in range(300):
    if step == 200 and rank == 1:
        load()
    dist.all_reduce(x)
"""
LEAVES = """
import atexit, sys
def end_slowly():
    if hasattr(dist, "destroy_process_group"):
        dist.destroy_process_group()
    time.sleep(1)
dist.all_reduce(x)
if rank == 1:
    atexit.register(end_slowly)
    sys.exit(3)
dist.all_reduce(x)
"""
DESTROYS = """
import sys
dist.all_reduce(x)
try:
    if rank == 1:
        FAULT
    dist.all_reduce(x)
finally:
    dist.destroy_process_group()
"""
CATCHES = """
import os, sys
dist.barrier()
if rank == 2:
    os.kill(os.getpid(), 9)
try:
    dist.all_reduce(x)
except Exception:
    sys.exit(1)
"""
LARGEST = """
sums = dist.ReduceOp.SUM
for step in range(STEPS):
    x.fill_(1)
    dist.all_reduce(x, op=dist.ReduceOp.MAX if rank == 1 and step == 4 else sums)
    time.sleep(0.05 * (STEPS > 10))
"""
EARLY = """
for step in range(201 - (rank == 1)):
    dist.all_reduce(x)
"""
ANOTHER = """
for step in range(10):
    dist.all_reduce(x)
if rank == 1:
    dist.broadcast(x, 0)
else:
    dist.all_reduce(x)
"""
LIBRARIES = ["numpy", "torch"]
PRELOADED = (
    "numpy", "torch.distributed", "torch.distributed._functional_collectives", "torch._dynamo",
)  # fmt: skip
"""What programs of torch import; DDP imports the last when it is made."""


@pytest.fixture(scope="module")
def server() -> Iterator[rankwise.ForkServer | None]:
    """Torch, if it is here, is imported once for all programs but those that do it themselves."""
    if sys.modules.get("torch", ...) is None:
        yield None
        return
    with rankwise.ForkServer(preload=PRELOADED) as server:
        assert rankwise.run(rankwise.rank, nprocs=1, server=server) == [0]
        yield server


class RunProgram(Protocol):
    """Runs a program: in the library's words, after its preamble."""

    def __call__(
        self, library: str, program: str, *options: str, nprocs: int = 3, timeout_s: int = 600
    ) -> Finished: ...


@pytest.fixture
def run_program(
    server: rankwise.ForkServer | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> RunProgram:
    def run_it(
        library: str, program: str, *options: str, nprocs: int = 3, timeout_s: int = 600
    ) -> Finished:
        if library != "numpy":
            pytest.importorskip("torch")
        source = PREAMBLES[library].replace("TIMEOUT", str(timeout_s)) + program
        script = write_program(tmp_path, source, "train.py")
        words = ("--standalone", f"--nproc-per-node={nprocs}", *options, script)
        environment = {"RANKWISE_COLLECTIVE_TIMEOUT": str(timeout_s)}
        if library == "torch" and server is not None:
            return run_on(server, capfd, *words, environment=environment)
        return run("run", *words, environment=environment)

    return run_it


def line_of(program: str, text: str, library: str) -> int:
    source = PREAMBLES[library] + program
    return source[: source.index(text)].count("\n") + 1


def root_cause_in(done: Finished) -> str:
    return done.stderr.partition("root cause: ")[2].partition("\n")[0]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_time_out_is_the_fault_of_the_rank_that_has_not_come(
    library: str, run_program: RunProgram
) -> None:
    done = run_program(library, LATE, timeout_s=3)

    call, sleep = (line_of(LATE, text, library) for text in ("dist.all_reduce", "time.sleep"))
    assert done.code == 1
    assert root_cause_in(done).startswith(
        f"rank 1 has not come to all_reduce #201 (sum) of (4096,) float32 (train.py:{call}), "
    )
    assert root_cause_in(done).endswith(f": it is at train.py:{sleep}, in load")
    assert "imed out" in done.stderr.partition("root cause: ")[0]
    assert "(a consequence)" in done.stderr


def test_a_time_out_is_the_fault_of_a_rank_that_has_entered_nothing_yet(tmp_path: Path) -> None:
    source = """
import ctypes, os
if os.environ["RANK"] == "0":  # it has not imported what enters calls
    ctypes.PyDLL(None).sleep(60)  # until it is asked where it stands
from rankwise import collectives
collectives.barrier(timeout=0.2)
"""
    done = run(
        "run", "--standalone", "--nproc-per-node=2",
        write_program(tmp_path, source, "train.py"),
    )  # fmt: skip

    assert done.code == 1
    assert root_cause_in(done).startswith(
        "rank 0 has not come to barrier #1 (train.py:6), in which rank 1 waits: it is at train.py:4"
    )
    assert "traceback" not in done.stderr.partition("root cause: ")[2], "which it raised later"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_lost_connection_is_the_fault_of_the_rank_that_was_done_too_early(
    library: str, run_program: RunProgram
) -> None:
    done = run_program(library, EARLY)

    where = f"(sum) of (4096,) float32 (train.py:{line_of(EARLY, 'dist.all_reduce', library)})"
    assert done.code == 1
    assert root_cause_in(done).startswith(f"rank 1 was done after all_reduce #200 {where}, while ")
    assert root_cause_in(done).endswith(f"in all_reduce #201 {where}")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_rank_that_exits_since_another_was_killed_is_a_consequence(
    library: str, run_program: RunProgram
) -> None:
    done = run_program(library, CATCHES)

    assert root_cause_in(done).startswith("rank 2 was killed by SIGKILL")


@pytest.mark.parametrize("steps", [6, 2_000])
def test_another_reduction_that_gloo_carries_out_is_told(
    steps: int, run_program: RunProgram
) -> None:
    done = run_program("torch", LARGEST.replace("STEPS", str(steps)))

    line = f"of (4096,) float32 (train.py:{line_of(LARGEST, 'dist.all_reduce', 'torch')})"
    assert done.code == 1
    assert root_cause_in(done).startswith(
        f"call #5: rank 1 called all_reduce (max) {line}, ranks 0, 2 called all_reduce (sum) {line}"
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_lost_connection_is_the_fault_of_the_rank_that_exits_however_slowly(
    library: str, run_program: RunProgram
) -> None:
    done = run_program(library, LEAVES, "--max-restarts=1", "--no-retry=3")

    place = f"train.py:{line_of(LEAVES, 'sys.exit', library)}"
    assert root_cause_in(done) == f"rank 1 exited with code 3: SystemExit at {place}"
    assert done.code == 3
    assert "restarting" not in done.stderr


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise ValueError('bad batch')", "failed: ValueError: bad batch"),
        ("sys.exit(3)", "exited with code 3: SystemExit at train.py:"),
    ],
)
def test_a_rank_that_destroys_its_groups_as_it_fails_is_told_with_what_it_dies_of(
    fault: str, told: str, run_program: RunProgram
) -> None:
    done = run_program("torch", DESTROYS.replace("FAULT", fault))

    assert root_cause_in(done).startswith(f"rank 1 {told}"), done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_ranks_that_call_different_things_end_at_once(
    library: str, run_program: RunProgram
) -> None:
    begun_at = time.monotonic()

    done = run_program(library, ANOTHER)

    other = line_of(ANOTHER, "dist.broadcast", library)
    assert done.code == 1
    assert root_cause_in(done) == (
        f"call #11: rank 1 called broadcast from rank 0 of (4096,) float32 (train.py:{other}), "
        f"ranks 0, 2 called all_reduce (sum) of (4096,) float32 (train.py:{other + 2})"
    )
    assert time.monotonic() - begun_at < 300, "it waited for the time-out of torch"


def test_tensors_that_do_not_fit_are_the_fault_of_the_fewest(run_program: RunProgram) -> None:
    # Without the barrier rank 2 may still be connecting when gloo ends rank 0, and never come.
    program = """
dist.barrier()
dist.all_reduce(torch.ones(10_000 if rank == 1 else 4096))
"""

    done = run_program("torch", program)

    where = f"(train.py:{line_of(program, 'dist.all_reduce', 'torch')})"
    assert root_cause_in(done) == (
        f"call #2: rank 1 called all_reduce (sum) of (10000,) float32 {where}, "
        f"ranks 0, 2 called all_reduce (sum) of (4096,) float32 {where}"
    )


def test_a_rank_that_comes_later_tells_which_of_two_is_right_whom_gloo_has_ended(
    run_program: RunProgram,
) -> None:
    program = """
dist.barrier()
if rank == 2:
    time.sleep(0.5)
dist.all_reduce(torch.ones(10_000 if rank == 1 else 4096))
"""

    done = run_program("torch", program)

    assert "rank 1 called all_reduce (sum) of (10000,) float32" in root_cause_in(done)
    assert "ranks 0, 2 called all_reduce (sum) of (4096,) float32" in root_cause_in(done)


@pytest.mark.parametrize("library", LIBRARIES)
def test_of_two_ranks_that_disagree_both_are_told(library: str, run_program: RunProgram) -> None:
    done = run_program(library, ANOTHER, "--log-format=json", nprocs=2)

    other = line_of(ANOTHER, "dist.broadcast", library)
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    failures = [line for line in lines if line["event"] == "failure"]
    assert [(each["rank"], each["root_cause"], each["accused"]) for each in failures] == [
        (0, True, [0, 1]),
        (1, True, [0, 1]),
    ]
    told = (
        "call #11: ranks 0 and 1 disagree: "
        f"rank 0 called all_reduce (sum) of (4096,) float32 (train.py:{other + 2}), "
        f"rank 1 called broadcast from rank 0 of (4096,) float32 (train.py:{other})"
    )
    assert {each["message"] for each in failures} == {told}


def test_two_groups_in_different_orders_are_told_as_a_circle(run_program: RunProgram) -> None:
    program = """
groups = [dist.new_group([0, 1], group_desc=name) for name in ("tp", "dp")]
for group in groups if rank == 0 else reversed(groups):
    dist.all_reduce(x, group=group)
"""

    done = run_program("torch", program, nprocs=2)

    where = f"train.py:{line_of(program, 'dist.all', 'torch')}"
    call = f"all_reduce #1 (sum) of (4096,) float32 in group {{}} ({where})"
    assert root_cause_in(done) == (
        f"ranks wait for each other: rank 0 in {call.format('tp')} for rank 1; "
        f"rank 1 in {call.format('dp')} for rank 0"
    )


def test_a_handle_that_is_waited_for_in_vain_accuses_the_rank_that_is_missing(
    run_program: RunProgram,
) -> None:
    program = """
for step in range(4):
    if step == 3 and rank == 1:
        time.sleep(600)
    dist.all_reduce(x, async_op=True).wait()
"""

    done = run_program("torch", program, timeout_s=3)

    assert root_cause_in(done).startswith("rank 1 has not come to all_reduce #4 ")


@pytest.mark.parametrize("library", ["numpy", BREATHING])
def test_a_hang_tells_who_waits_in_which_call_for_whom(
    library: str, run_program: RunProgram
) -> None:
    program = """
import queue
print("up", flush=True)
if rank == 2:
    queue.Queue().get()
dist.barrier()
"""

    done = run_program(library, program, "--hang-timeout=2s")

    where = f"train.py:{line_of(program, 'dist.barrier', library)}"
    assert done.code == 124
    assert root_cause_in(done) == (
        "the gang hung: no progress for 2 s; rank 2 has not come to "
        f"barrier #1 ({where}), in which ranks 0-1 wait"
    )
    assert f"waits for barrier #1 ({where}): rank 2 has not come" in done.stderr
    assert "ranks failed" not in done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_limit_of_a_section_is_the_fault_of_the_rank_for_which_the_others_wait_in_it(
    library: str, run_program: RunProgram
) -> None:
    program = """
import rankwise
if rank == 2:
    time.sleep(600)
with rankwise.section("step", timeout=1):
    dist.barrier()
"""

    done = run_program(library, program)

    where, sleep = (line_of(program, text, library) for text in ("dist.barrier", "time.sleep"))
    assert done.code == 1
    assert "section 'step' is stuck" in done.stderr
    assert root_cause_in(done) == (
        f"rank 2 has not come to barrier #1 (train.py:{where}), in which ranks 0-1 wait: "
        f"it is at train.py:{sleep}"
    )


def test_a_rank_that_is_stuck_in_a_section_itself_is_told_with_its_section(
    run_program: RunProgram,
) -> None:
    program = """
import rankwise
with rankwise.section("load", timeout=1):
    if rank == 1:
        time.sleep(600)
dist.barrier()
"""

    done = run_program("numpy", program)

    assert root_cause_in(done) == "rank 1 exited with code 1: section 'load' is stuck"


def test_the_limit_of_a_section_in_which_ddp_waits_is_the_fault_of_the_rank_that_is_missing(
    run_program: RunProgram,
) -> None:
    program = """
import rankwise
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(5):
    if step == 3 and rank == 1:
        time.sleep(600)
    with rankwise.section("step", timeout=4):
        model(torch.ones(4, 8)).sum().backward()
"""

    done = run_program("torch", program)

    sleep = line_of(program, "time.sleep", "torch")
    assert re.fullmatch(
        r"rank 1 has not come to all_reduce #\d+ of \(72,\) float32 \(begun by C\+\+\), "
        # A rank may end by its own section before it has told that it waits, too.
        rf"in which (?:ranks 0, 2 wait|rank [02] waits): it is at train\.py:{sleep}",
        root_cause_in(done),
    ), done.stderr


def test_a_hang_names_the_rank_that_is_missing_as_json_too(run_program: RunProgram) -> None:
    program = """
import queue
if rank == 2:
    queue.Queue().get()
dist.barrier()
"""

    done = run_program("numpy", program, "--hang-timeout=2s", "--log-format=json")

    notices = [json.loads(line) for line in done.stderr.splitlines()]
    failures = [notice for notice in notices if notice["event"] == "failure"]
    assert [(each["rank"], each["root_cause"], each.get("accused")) for each in failures] == [
        (2, True, [2]),
        (0, False, None),
        (1, False, None),
    ]


def test_a_rank_that_fails_by_itself_is_the_root_cause_whatever_others_wait_for(
    run_program: RunProgram,
) -> None:
    program = """
dist.all_reduce(x)
if rank == 2:
    raise ValueError("loss is NaN")
if rank == 1:
    time.sleep(600)
dist.all_reduce(x)
"""

    done = run_program("torch", program)

    assert root_cause_in(done) == "rank 2 failed: ValueError: loss is NaN"


def test_without_the_ledger_the_report_is_that_of_those_who_failed(run_program: RunProgram) -> None:
    done = run_program("torch", EARLY, "--no-ledger")

    assert done.code == 1
    assert " failed: RuntimeError: " in root_cause_in(done)
    assert "was done after" not in done.stderr


def test_a_restart_follows_with_call_records_of_its_own(run_program: RunProgram) -> None:
    program = """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    for step in range(5 - (rank == 1)):
        dist.all_reduce(x)
dist.all_reduce(x)
print("sum", x[0].item() if rank == 0 else "")
"""

    done = run_program("torch", program, "--max-restarts=1", nprocs=2)

    assert "rank 1 was done after all_reduce #5 " in done.stderr
    assert done.code == 0, done.stderr


ONE_COMPILED = """
def reduced(y):
    dist.all_reduce(y)
    return y + 1
step = torch.compile(reduced, backend="eager", fullgraph=True) if rank == 0 else reduced
assert step(torch.ones(2)).tolist() == [4.0, 4.0]
if rank == 2:
    time.sleep(5)  # the others stand in their next call
"""


def test_ranks_of_which_one_alone_compiles_what_all_call_are_no_disagreement(
    run_program: RunProgram,
) -> None:
    done = run_program("torch", f"{ONE_COMPILED}\ndist.barrier()")

    assert done.code == 0, done.stderr


def test_ranks_of_which_one_alone_compiles_are_told_when_they_disagree(
    run_program: RunProgram,
) -> None:
    late = "if rank == 1:\n    time.sleep(2)"
    program = f"{ONE_COMPILED}\n{late}\ndist.broadcast(x, 0) if rank == 1 else dist.barrier()"

    done = run_program("torch", program.replace("rank == 2", "rank == 3"))

    assert done.code == 1
    where = f"train.py:{line_of(program, 'dist.broadcast', 'torch')}"
    assert root_cause_in(done) == (
        f"call #2: rank 1 called broadcast from rank 0 of (4096,) float32 ({where}), "
        f"ranks 0, 2 called barrier ({where})"
    )


def test_a_handle_that_is_asked_for_ever_whether_its_call_is_over_is_a_hang(
    run_program: RunProgram,
) -> None:
    program = """
import queue
dist.barrier()
if rank == 2:
    queue.Queue().get()
work = dist.all_reduce(x, async_op=True)
while not work.is_completed():
    pass
"""

    done = run_program("torch", program, "--hang-timeout=3s")

    assert done.code == 124
    where = f"train.py:{line_of(program, 'work = ', 'torch')}"
    assert root_cause_in(done) == (
        "the gang hung: no progress for 3 s; rank 2 has not come to "
        f"all_reduce #2 (sum) of (4096,) float32 ({where}), in which ranks 0-1 wait"
    )


def test_groups_beyond_those_for_which_there_is_room_are_told_of(run_program: RunProgram) -> None:
    program = """
groups = [dist.new_group([0], group_desc=f"g{at}") for at in range(323)]
for group in groups:
    dist.all_reduce(x, group=group)
import os, subprocess, sys
why = [sys.executable, "-m", "rankwise", "why", os.environ["RANKWISE_RUN_ID"]]
if rank == 0:
    print(subprocess.run(why, capture_output=True, text=True).stdout)
"""

    done = run_program("torch", program, "--rdzv-id=many-groups", "--no-prefix", nprocs=1)

    assert done.code == 0, done.stderr
    line = (
        "the ledger of collectives has room for 320 groups of a rank, and does not see what rank 0 "
        "calls in others, such as g319; a report may blame a rank that only waited for another"
    )
    assert done.stderr.count(f"rankwise: {line}\n") == 1
    assert done.stderr.count("ledger") == 1
    assert line in done.lines


def test_a_rank_that_skips_a_call_of_cpp_and_waits_in_another_is_to_blame_not_the_others(
    run_program: RunProgram,
) -> None:
    program = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for step in range(3):
    loss = model(torch.ones(1, 2)).sum()
    if step == 2 and rank == 0:
        dist.barrier()
    loss.backward()
"""

    done = run_program("torch", program)

    line = line_of(program, "dist.barrier", "torch")
    assert done.code == 1
    assert re.fullmatch(
        rf"call #\d+: rank 0 called barrier \(train.py:{line}\), "
        r"ranks 1-2 called all_reduce of \(6,\) float32 \(begun by C\+\+\)",
        root_cause_in(done),
    )


def test_a_time_out_in_cpp_is_the_fault_of_the_rank_that_has_not_come(
    run_program: RunProgram,
) -> None:
    program = """
for step in range(4):
    if step == 3 and rank == 1:
        time.sleep(600)
    functional.all_reduce(x, "sum", dist.group.WORLD).sum()
"""

    done = run_program("torch", program, timeout_s=3)

    sleep = line_of(program, "time.sleep", "torch")
    # A rank whose time-out has come as well may wait no more when it is asked.
    assert root_cause_in(done) in {
        "rank 1 has not come to all_reduce #4 of (4096,) float32 (begun by C++), "
        f"in which {waiting}: it is at train.py:{sleep}"
        for waiting in ("ranks 0, 2 wait", "rank 0 waits", "rank 2 waits")
    }


@pytest.mark.parametrize("ending", ["", "dist.destroy_process_group()"])
def test_a_lost_connection_in_cpp_is_the_fault_of_the_rank_that_was_done_too_early(
    ending: str, run_program: RunProgram
) -> None:
    program = f"""
for step in range(4 - (rank == 1)):
    functional.all_reduce(x, "sum", dist.group.WORLD).sum()
{ending}
"""

    done = run_program("torch", program)

    where = "of (4096,) float32 (begun by C++)"
    told = root_cause_in(done)
    if ending:  # it may not have ended yet when it is asked
        told = told.removesuffix(f": it is at train.py:{line_of(program, ending, 'torch')}")
    assert told.startswith(f"rank 1 was done after all_reduce #3 {where}, while ")
    assert told.endswith(f" in all_reduce #4 {where}")


def test_a_hang_in_cpp_tells_who_waits_in_which_call_for_whom(run_program: RunProgram) -> None:
    program = """
import queue
if rank == 2:
    queue.Queue().get()
functional.all_reduce(x, "sum", dist.group.WORLD).sum()
"""

    done = run_program("torch", program, "--hang-timeout=3s")

    assert done.code == 124
    assert root_cause_in(done) == (
        "the gang hung: no progress for 3 s; rank 2 has not come to "
        "all_reduce #1 of (4096,) float32 (begun by C++), in which ranks 0-1 wait"
    )


def test_a_healthy_program_that_stands_still_for_long_is_asked_and_goes_on(
    run_program: RunProgram,
) -> None:
    program = """
import threading, _thread
functional.all_reduce(x, "sum", dist.group.WORLD).sum()
if rank == 0:
    time.sleep(3)  # saves a checkpoint: the others are waiting
dist.barrier()
assert threading.active_count() == 1, threading.enumerate()
dist.destroy_process_group()
"""

    done = run_program("torch", program)

    assert done.code == 0, done.stderr


HEALTHY = """
import os, rankwise
from rankwise.core.matching import describe_call
from rankwise.drivers.real.call_rings import read_call_record
from rankwise.drivers.real.segments import Segment

size = dist.get_world_size()
rows = [torch.ones(3) * rank for _ in range(size)]
flat, out = torch.arange(2.0 * size), torch.empty(2)
group = dist.new_group([0, 1])
dist.all_reduce(x, op=dist.ReduceOp(dist.ReduceOp.MAX) if rank else dist.ReduceOp.MAX)
dist.broadcast(x, src=1 if rank else True)
dist.reduce(x, 0)
dist.all_gather(rows, torch.ones(3))
dist.all_gather_into_tensor(torch.empty(2 * size), out)
dist.gather(torch.ones(3), rows) if rank == 0 else dist.gather(torch.ones(3), dst=0)
dist.scatter(out, list(flat.chunk(size))) if rank == 0 else dist.scatter(out, src=0)
dist.reduce_scatter_tensor(out, flat)
dist.reduce_scatter(out, list(flat.chunk(size)))
dist.all_to_all_single(torch.empty_like(flat), flat)
dist.all_reduce(x, group=group)
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
dist.all_gather_object([None] * size, {"rank": rank})
dist.barrier()

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
def reduced(y):
    dist.all_reduce(y)
    return y + 1
y = torch.compile(reduced, backend="eager", fullgraph=True)(torch.ones(2))
assert y.tolist() == [size + 1.0] * 2, y

segment = Segment.attach(int(os.environ["RANKWISE_SEGMENT_FD"]))
record = read_call_record(segment, rank, 0)
assert all(call.stage.name == "DONE" for call in record.calls), record.calls
elsewhere = [call for call in record.calls if not call.place.startswith("train.py:")]
assert not elsewhere, elsewhere
told = [None] * size
own = [(str(call.signature), call.match) for call in record.calls if call.group]
dist.all_gather_object(told, own)
assert told[0] == told[1], told
if rank == 0:
    for call in record.calls:
        group = record.groups[call.group] if call.group else None
        print(describe_call(call.signature, call.shown_number), "|", group and group.label)
"""


def test_every_call_of_a_healthy_program_is_entered_with_its_line(run_program: RunProgram) -> None:
    done = run_program("torch", HEALTHY, nprocs=2)

    assert done.code == 0, done.stderr
    told = [line.removeprefix("[default0]:") for line in done.lines]
    assert told[14].startswith("all_gather #12 of "), "the pickles of an object"
    assert told[:14] == [
        "init_process_group | ",
        "all_reduce #1 (max) of (4096,) float32 | ",
        "broadcast #2 from rank 1 of (4096,) float32 | ",
        "reduce #3 (sum) to rank 0 of (4096,) float32 | ",
        "all_gather #4 of (3,) float32 | ",
        "all_gather_into_tensor #5 of (2,) float32 | ",
        "gather #6 to rank 0 of (3,) float32 | ",
        "scatter #7 from rank 0 of (2,) float32 | ",
        "reduce_scatter_tensor #8 (sum) of (4,) float32 | ",
        "reduce_scatter #9 (sum) of (2,) float32 | ",
        "all_to_all_single #10 of (4,) float32 | ",
        "all_reduce #1 (sum) of (4096,) float32 | [0, 1]",
        "send of (4096,) float32 to rank 1 | None",
        "all_gather #11 of (1,) int64 | ",
    ], done.stdout


def test_ranks_that_import_torch_themselves_have_call_records_too(run_program: RunProgram) -> None:
    done = run_program(BREATHING, EARLY)

    assert root_cause_in(done).startswith("rank 1 was done after all_reduce #200 "), done.stderr


def test_groups_that_are_made_anew_are_not_taken_for_those_of_before(
    run_program: RunProgram,
) -> None:
    program = """
import json, time
from torch.distributed import distributed_c10d as c10d
from rankwise.drivers.real.worker.torch_calls import recorded_groups
def recorded(generation, since):
    told = json.loads(recorded_groups(c10d, generation, since))
    return [(group["name"], [call["number"] for call in group["calls"]]) for group in told]
dist.all_reduce(x)
print(recorded(0, 0))
dist.destroy_process_group()
since = time.time_ns()
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
print(recorded(1, since))
dist.all_reduce(x)
dist.all_reduce(x)
print(recorded(1, since))
"""

    done = run_program("torch", program, "--no-prefix", nprocs=1)

    assert done.lines == [
        "[('torch 0 0', [1])]",
        "[]",
        "[('torch 1 0', [1, 2])]",
    ], done.stderr


STRAGGLER = """
for step in range(40):
    time.sleep(0.05 if rank == 1 else 0.005)
    dist.all_reduce(x)
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_straggler_is_told_of_at_the_end_of_a_run_that_succeeds(
    library: str, run_program: RunProgram
) -> None:
    done = run_program(library, STRAGGLER)

    assert done.code == 0
    told = re.findall("rank 1 came last in ([0-9]+) % of the calls; ([0-9]+) % of the", done.stderr)
    assert len(told) == 1, done.stderr
    assert int(told[0][0]) > 50
    assert int(told[0][1]) > 5


def test_a_cpu_that_was_waited_for_before_the_first_call_is_no_excuse(
    run_program: RunProgram,
) -> None:
    program = f"""
import os
def cpu_wait_ns():
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1])
cpus = os.sched_getaffinity(0)
os.sched_setaffinity(0, {{min(cpus)}})
while time.process_time() < 0.6:
    pass  # as all ranks compute while they import torch
os.sched_setaffinity(0, cpus)
before = cpu_wait_ns()
{STRAGGLER}
if rank == 1:
    print(before, cpu_wait_ns() - before)
"""

    done = run_program("numpy", program, "--no-prefix")

    before_ns, since_ns = map(int, done.lines[-1].split())
    assert before_ns > 0.9e9, "three ranks have shared a CPU"
    assert "rank 1 came last in " in done.stderr
    is_busy = since_ns > 0.5e9  # which only other programs can have caused
    assert is_busy or "the machine is busy" not in done.stderr


def test_a_straggler_is_told_of_in_the_report_of_a_run_that_fails(run_program: RunProgram) -> None:
    done = run_program("numpy", f"{STRAGGLER}\nraise ValueError(rank)")

    assert done.code == 1
    assert done.stderr.count("rank 1 came last in ") == 1
    assert done.stderr.index("rank 1 came last") < done.stderr.index("root cause: ")


def test_machines_are_told_of_a_straggler_in_numbers(run_program: RunProgram) -> None:
    done = run_program("numpy", STRAGGLER, "--log-format=json")

    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    told = [line for line in lines if line["event"] == "lateness"]
    assert [line["rank"] for line in told] == [1]
    assert told[0]["last"] > 0.5
    assert 1 < told[0]["waited_s"] < 60


DDP = """
from torch.nn.parallel import DistributedDataParallel
layers = [torch.nn.Linear(256, 256) for _ in range(6)]
model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.5)
for step in range(40):
    time.sleep(0.3 if rank == 1 else 0.1)
    model(torch.ones(8, 256)).sum().backward()
del model
dist.destroy_process_group()
"""


def test_a_straggler_is_told_of_by_what_ddps_reducer_calls(run_program: RunProgram) -> None:
    done = run_program("torch", DDP)

    assert done.code == 0, done.stderr
    said = (
        r"rank 1 came last in (\d+) % of the calls that C\+\+ begins, as DDP does; (\d+) % of that "
        r"time was spent waiting for it \(of these calls, \d+ % were seen\)"
    )
    found = re.search(said, done.stderr)
    assert found is not None, done.stderr
    assert int(found[1]) > 50
    assert int(found[2]) > 5


def test_nothing_is_told_of_ranks_that_only_begin_at_different_moments(
    run_program: RunProgram,
) -> None:
    program = """
time.sleep(1.5 * (rank == 1))
for step in range(100):
    dist.all_reduce(x)
"""

    done = run_program("numpy", program)

    assert done.code == 0
    assert "came last" not in done.stderr


def unknown_torch(folder: Path) -> None:
    """Imitates such a release: real ones that are unknown do not exist yet."""
    package = folder / "torch" / "distributed"
    package.mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("__version__ = '9.1'\n")
    (package / "__init__.py").write_text("from .distributed_c10d import all_reduce\n")
    (package / "distributed_c10d.py").write_text("def all_reduce(tensor): return tensor\n")
    (folder / "torch-9.1.dist-info").mkdir()
    about = "Metadata-Version: 2.1\nName: torch\nVersion: 9.1\n"
    (folder / "torch-9.1.dist-info" / "METADATA").write_text(about)


INIT = """
import datetime, os, time, torch.distributed as dist
if os.environ["RANK"] == "1":
    MISSES
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
"""


@pytest.mark.parametrize(
    ("misses", "told"),
    [
        (
            "time.sleep(600)",
            "rank 1 has not come to init_process_group (train.py:5), in which rank 0 waits",
        ),
        (
            "raise SystemExit",
            "rank 1 ended without init_process_group (train.py:5), in which rank 0 waits",
        ),
    ],
    ids=["sleeps", "has ended"],
)
def test_rank_that_misses_init_process_group_is_named_in_a_hang(
    misses: str, told: str, tmp_path: Path
) -> None:
    script = write_program(tmp_path, INIT.replace("MISSES", misses), "train.py")

    done = run("run", "--nproc-per-node=2", "--hang-timeout=4s", script)

    assert f"{told}\n" in done.stderr, done.stderr


OWN_WORLDS = {
    "by a file": """
here = f"file://{os.getcwd()}/meet"
if rank < 2:
    meet(init_method=here, rank=rank, world_size=2)
""",
    "by the environment": """
if rank % 2 == 0:
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank // 2)}
    meet()
""",
    "by the environment, after all have met": """
meet()
if rank < 2:
    os.environ["WORLD_SIZE"] = "2"
    meet()
""",
    "by a child of a rank that ends": """
if rank != 2 or not os.fork():
    meet()
""",
}


@pytest.mark.parametrize("kind", OWN_WORLDS)
def test_healthy_ranks_that_meet_in_another_way_than_all_at_once_raise_no_alarm(
    kind: str, tmp_path: Path
) -> None:
    program = """
import os, time, torch.distributed as dist
rank = int(os.environ["RANK"])
def meet(**how):
    time.sleep(2 * (rank == 0))  # the others stand in the call when the rest has ended
    dist.init_process_group("gloo", **how)
    dist.barrier()
    os.write(1, b"met\\n")
    dist.destroy_process_group()
"""
    script = write_program(tmp_path, program + OWN_WORLDS[kind], "train.py")

    done = run("run", "--nproc-per-node=3", script, cwd=tmp_path)

    assert (done.code, done.stdout.count("met") >= 2) == (0, True), done.stderr


def test_doctor_tells_of_a_torch_that_the_ledger_does_not_know(tmp_path: Path) -> None:
    unknown_torch(tmp_path)

    done = run("doctor", environment={"PYTHONPATH": str(tmp_path)})

    source = tmp_path / "torch" / "distributed" / "distributed_c10d.py"
    assert (
        f"9.1; the ledger of collectives will be off: {source} has no _world, barrier, broadcast, "
        "default_pg, get_rank, pg_group_ranks, pg_names\n"
    ) in done.stdout


def test_a_torch_that_the_ledger_does_not_know_is_told_of_once(tmp_path: Path) -> None:
    unknown_torch(tmp_path)
    program = "import torch.distributed as dist\nassert dist.all_reduce(3) == 3\n"

    done = run(
        "run", "--standalone", "--nproc-per-node=2",
        write_program(tmp_path, program, "train.py"),
    )  # fmt: skip

    assert done.code == 0, done.stderr
    line = (
        "rankwise: the ledger of collectives is off: torch 9.1 has no distributed_c10d._world, "
        "distributed_c10d.get_rank, distributed_c10d.broadcast, distributed_c10d.barrier; "
        "a report may blame a rank that only waited for another\n"
    )
    assert done.stderr.count(line) == 1
    assert done.stderr.count("ledger") == 1
