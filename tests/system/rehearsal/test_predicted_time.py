"""`--on sim:MACHINE`: predicted times against closed forms of the modelled machine."""

import calendar
import datetime as dt
import gzip
import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from preloaded import Preloaded
from running import Finished, run, write_program

import rankwise
from rankwise import collectives
from rankwise.sim import load_topology
from rankwise.sim.ccl.message_timing import placed_time

MACHINE = "switch8"
SPEC = load_topology(MACHINE).machine
PES = SPEC.sip.cubes.count * SPEC.cube.pes.count
FLOPS_PER_S = SPEC.pe.gemm.flops_per_cycle["f32"] * SPEC.system.clock * 1e9 * PES
BYTES_PER_S = SPEC.sip.cubes.count * SPEC.cube.hbm.channels * SPEC.cube.hbm.bandwidth * 1e9
LINK_BYTES_PER_S = SPEC.system.sips.link.bandwidth * 1e9
ALPHA_S = 2 * SPEC.system.sips.link.latency_ns * 1e-9  # to the switch, and from it
COMMAND_S = SPEC.system.host.command_ns * 1e-9
EXACT = pytest.approx


def elementwise(elements: int, tensors: int) -> float:
    """Seconds of an operation that reads and writes so many tensors of float32."""
    return COMMAND_S + SPEC.pe.math.startup_ns * 1e-9 + 4 * elements * tensors / BYTES_PER_S


def product(m: int, n: int, k: int) -> float:
    moved = 4 * (m * k + k * n + m * n) / BYTES_PER_S
    computed = 2 * m * n * k / FLOPS_PER_S
    return COMMAND_S + SPEC.pe.gemm.startup_ns * 1e-9 + max(moved, computed)


def all_reduce(size: int, ranks: int) -> float:
    """Halving and doubling, which beats a ring behind a switch; `ranks` is a power of two."""
    rounds = 2 * (ranks.bit_length() - 1)
    return rounds * ALPHA_S + 2 * (ranks - 1) / ranks * size / LINK_BYTES_PER_S


def predicted(function: Any, *args: Any, nprocs: int = 4) -> list[Any]:
    return rankwise.run(function, args, nprocs, on=f"sim:{MACHINE}", virtual_clock=True)


def timed_all_reduce(size: int) -> float:
    collectives.barrier()
    begun = time.perf_counter()
    collectives.all_reduce(np.zeros(size // 8))
    return time.perf_counter() - begun


@pytest.mark.parametrize("size", [1 << 12, 1 << 24])
def test_an_all_reduce_takes_its_closed_form(size: int) -> None:
    assert predicted(timed_all_reduce, size) == EXACT([all_reduce(size, 4)] * 4, rel=1e-6)


def test_faults_of_ranks_and_of_chips_can_be_in_one_list() -> None:
    faults = ["slow:link=sip2-switch,times=3", "late:rank=1,by=1ms@collective=2"]
    size = 1 << 24

    times = rankwise.run(
        timed_all_reduce, (size,), 4, on=f"sim:{MACHINE}", virtual_clock=True, faults=faults
    )

    on_links = all_reduce(size, 4) - 4 * ALPHA_S
    assert times[1] - 1e-3 == EXACT(3 * on_links, rel=0.02)  # in each round one is on a slow link


def test_a_late_rank_makes_the_others_wait() -> None:
    def meet() -> float:
        time.sleep(rankwise.rank())
        collectives.barrier()
        return time.monotonic()

    assert predicted(meet, nprocs=2) == EXACT([1 + ALPHA_S] * 2, rel=1e-9)


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(rankwise.ConfigError, match="switch8 has 8 devices, and there are 9 ranks"):
        predicted(rankwise.rank, nprocs=9)


def test_a_virtual_clock_tells_no_real_time() -> None:
    def readings() -> list[float]:
        first, day = time.perf_counter(), time.time_ns()
        time.sleep(2)
        return [first, day, time.monotonic()]

    for first, day, slept in rankwise.run(readings, nprocs=2, on="sim", virtual_clock=True):
        assert (first, slept) == EXACT((0, 2), abs=1e-6)
        assert day == EXACT(time.time_ns(), abs=100e9)


@pytest.mark.parametrize("is_virtual", [True, False], ids=["virtual", "real and virtual"])
def test_all_that_tells_the_present_tells_the_same(*, is_virtual: bool) -> None:
    def readings() -> list[float]:
        time.sleep(30 * 86_400)
        today = dt.datetime(*dt.date.today().timetuple()[:3])  # noqa: DTZ001, DTZ011  # local, as they are
        return [
            time.time(),
            dt.datetime.now().timestamp(),  # noqa: DTZ005  # the same
            dt.datetime.today().timestamp(),  # noqa: DTZ002  # the same
            dt.datetime.now(dt.UTC).timestamp(),
            dt.datetime.utcnow().replace(tzinfo=dt.UTC).timestamp(),  # noqa: DTZ003  # the same
            time.mktime(time.localtime()),
            calendar.timegm(time.gmtime()),
            time.mktime(time.strptime(time.ctime())),
            time.mktime(time.strptime(time.asctime())),
            time.mktime(time.strptime(time.strftime("%c"))),
            time.clock_gettime(time.CLOCK_REALTIME),
            time.clock_gettime_ns(time.CLOCK_REALTIME) / 1e9,
            today.timestamp() + time.localtime()[3] * 3600,
        ]

    before, original = time.time(), dt.datetime.now
    (told,) = rankwise.run(readings, nprocs=1, on="sim", virtual_clock=is_virtual)

    assert told[:-1] == EXACT([told[0]] * (len(told) - 1), abs=2)
    assert told[-1] == EXACT(told[0], abs=2 * 3600)
    assert told[0] == EXACT(before + 30 * 86_400, abs=100)
    assert dt.datetime.now == original, "and afterwards all is as it was"


DDP = """
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

batch, width = int(sys.argv[1]), 512
dist.init_process_group("nccl")
layers = [nn.Linear(width, width, bias=False) for _ in range(2)]
network = DistributedDataParallel(
    nn.Sequential(*layers), bucket_cap_mb=0.5, gradient_as_bucket_view=True
)
x, gradient = torch.ones(batch, width), torch.ones(batch, width)
for _ in range(3):
    network.zero_grad()
    dist.barrier()
    begun = torch.cuda.Event(enable_timing=True)
    begun.record()
    seconds = time.perf_counter()
    network(x).backward(gradient)
    seconds = time.perf_counter() - seconds
    ended = torch.cuda.Event(enable_timing=True)
    ended.record()
    torch.cuda.synchronize()
print(seconds, begun.elapsed_time(ended))
"""


def simulate(
    preloaded: Preloaded, text: str, folder: Path, *options: str, args: tuple[str, ...] = ()
) -> Finished:
    program = write_program(folder, text)
    finished = preloaded.run("run", "--virtual-clock", *options, str(program), *args, cwd=folder)
    assert finished.code == 0, finished.stderr
    return finished


@pytest.mark.torch
@pytest.mark.system
@pytest.mark.parametrize(("batch", "is_hidden"), [(64, False), (4096, True)])
def test_a_step_of_ddp_takes_its_closed_form(
    batch: int, is_hidden: bool, preloaded: Preloaded, tmp_path: Path
) -> None:
    ranks, width = 4, 512
    forward = 2 * product(batch, width, width)
    last_layer = 2 * product(batch, width, width)  # gradients of its input and its weight
    scaling = elementwise(width * width, 3)  # by the number of ranks, into the bucket
    first_layer = product(width, width, batch)
    reducing = all_reduce(4 * width * width, ranks)

    finished = simulate(
        preloaded, DDP, tmp_path, f"--on=sim:{MACHINE}", f"--nproc-per-node={ranks}", "--no-prefix",
        args=(str(batch),),
    )  # fmt: skip

    assert (first_layer + scaling > reducing) == is_hidden
    step = forward + last_layer + scaling + max(first_layer + scaling, reducing) + reducing
    for line in finished.lines:
        seconds, milliseconds = map(float, line.split())
        assert seconds == EXACT(step, rel=1e-5)
        assert milliseconds == EXACT(1e3 * step, rel=1e-3)


PIPELINE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
# So many layers that it hardly counts what only the first and the last stage have to do.
module = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(60)])
stage = PipelineStage(module, rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(
    stage, n_microbatches=8, loss_fn=lambda output, _: output.sum(), scale_grads=False
)
marker = torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # its steps tell where a step ends
for _ in range(3):
    if rank == 0:
        schedule.step(torch.ones(64, 32))
    elif rank == size - 1:
        schedule.step(target=torch.zeros(64, 1))
    else:
        schedule.step()
    marker.step()
"""


@pytest.mark.torch
@pytest.mark.system
def test_the_bubble_of_gpipe_is_that_of_the_formula(preloaded: Preloaded, tmp_path: Path) -> None:
    stages, microbatches = 4, 8
    spec = load_topology(MACHINE).spec
    spec["system"]["sips"]["link"] = {"bandwidth_GBps": 1e9, "latency_ns": 0}
    (tmp_path / "fast.yaml").write_text(yaml.safe_dump(spec))

    finished = simulate(
        preloaded, PIPELINE, tmp_path, "--on=sim:fast.yaml", f"--nproc-per-node={stages}"
    )

    found = re.search(r"waiting for others +([\d.]+) %", finished.stderr)
    assert found, finished.stderr
    bubble = (stages - 1) / (microbatches + stages - 1)
    assert float(found[1]) / 100 == EXACT(bubble, rel=0.03)


PRICED = """
from rankwise.sim.hardware.cost_models import TableCosts


class Priced(TableCosts):
    def operation(self, name, flops, size, dtype):
        return {"aten.mm": 7_000_000 + flops, "aten.relu": ANSWER}.get(name)
"""

PRODUCT = """
import time
import torch

x = torch.ones(8, 8)
begun = time.perf_counter()
(x @ x).relu()
print(round((time.perf_counter() - begun) * 1e12))
"""


@pytest.mark.torch
@pytest.mark.system
@pytest.mark.parametrize(("answer", "is_whole"), [("None", True), ("0.5", False)])
def test_a_cost_model_of_a_package_prices_operations(
    answer: str, is_whole: bool, tmp_path: Path
) -> None:
    (tmp_path / "lab.py").write_text(PRICED.replace("ANSWER", answer))
    (tmp_path / "lab-1.dist-info").mkdir()
    (tmp_path / "lab-1.dist-info" / "METADATA").write_text("Name: lab\nVersion: 1\n")
    (tmp_path / "lab-1.dist-info" / "entry_points.txt").write_text(
        "[rankwise.cost_models]\npriced = lab:Priced\n"
    )
    spec = load_topology(MACHINE).spec
    spec["pe"]["cost_model"] = "priced"
    (tmp_path / "lab.yaml").write_text(yaml.safe_dump(spec))
    program = write_program(tmp_path, PRODUCT)

    finished = run(
        "run", "--on=sim:lab.yaml", "--virtual-clock", "--no-prefix", str(program),
        cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip

    if not is_whole:
        assert finished.code == 1
        assert (
            "operation('aten.relu', 64, 512, 'f32') is 0.5, expected picoseconds" in finished.stderr
        )
        return
    assert finished.code == 0, finished.stderr
    relu_ps = round(1e12 * elementwise(64, 2))
    assert finished.lines == [str(7_000_000 + 2 * 8**3 + relu_ps)]


MEMORY = """
import torch

held = torch.zeros(1 << 20)
for _ in range(3):
    (held + 1).sum()
held.untyped_storage().resize_(0)
more = torch.zeros(1 << 20)
"""


HELD = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
first = torch.ones(4 << 20)
dist.all_reduce(first)
del first
second = torch.ones(4 << 20)
"""

MISTAKES = """
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

dist.init_process_group("gloo")
rank = dist.get_rank()


def differ(tensor):
    dist.all_reduce(tensor[: 4 + rank])


def do_not_fit(tensor):
    (dist.recv if rank else dist.send)(tensor[: 4 + rank], 1 - rank)


def cannot(tensor):
    dist.all_reduce(tensor, op=dist.ReduceOp.BAND)


for mistake in (differ, do_not_fit, cannot):
    tensor = torch.ones(8)
    reference = StorageWeakRef(tensor.untyped_storage())
    try:
        mistake(tensor)
        raise AssertionError("it is one")
    except RuntimeError:
        pass
    del tensor
    assert reference.expired(), mistake
"""


@pytest.mark.torch
@pytest.mark.system
def test_what_a_collective_took_is_free_once_the_program_deletes_it(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    finished = simulate(preloaded, HELD, tmp_path, f"--on=sim:{MACHINE}", "--nproc-per-node=4")

    assert re.search(r"peak memory +16 MiB +rank 0", finished.stderr)


@pytest.mark.torch
@pytest.mark.system
def test_what_a_failed_operation_took_is_free_once_the_program_deletes_it(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, MISTAKES)

    finished = preloaded.run("run", f"--on=sim:{MACHINE}", "--nproc-per-node=2", program)

    assert finished.code == 0, finished.stderr


@pytest.mark.torch
@pytest.mark.system
def test_the_peak_of_memory_is_what_lives_at_once(preloaded: Preloaded, tmp_path: Path) -> None:
    finished = simulate(preloaded, MEMORY, tmp_path, "--on=sim:pod64", "--nproc-per-node=2")

    assert re.search(r"peak memory +8 MiB +rank 0; a device has 384 GiB", finished.stderr)


@pytest.mark.torch
@pytest.mark.system
def test_the_timeline_and_the_page_are_those_of_the_simulator(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    simulate(
        preloaded, DDP, tmp_path, f"--on=sim:{MACHINE}", "--nproc-per-node=2",
        "--trace=run.json.gz", "--report=run.html", args=("64",),
    )  # fmt: skip

    events = json.loads(gzip.decompress((tmp_path / "run.json.gz").read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"aten.mm", "all_reduce", "waits for the transfer"} <= names
    assert {event["pid"] for event in events} == {1000, 2000}
    page = (tmp_path / "run.html").read_text()
    for heading in ("Prediction", "Ranks", "Operations", "Timeline", "Roofline", "Machine"):
        assert f"<h2>{heading}</h2>" in page


EARLY = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('early')\n"
SLEEPS = f"import time\ntime.sleep(1)\n{EARLY}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (EARLY, "predicted on pod64: nothing, since no rank has computed with torch or Triton"),
        (SLEEPS, "predicted on pod64, 4 of 64 devices, until it ended early:\n"),
    ],
)
def test_of_a_run_that_failed_it_is_told_what_the_figures_are_of(
    text: str, told: str, tmp_path: Path
) -> None:
    program = write_program(tmp_path, text)

    finished = run("run", "--on=sim:pod64", "--nproc-per-node=4", str(program), cwd=tmp_path)

    assert finished.code == 1
    assert told in finished.stderr


def test_a_page_about_a_run_without_a_machine_tells_why_it_failed(tmp_path: Path) -> None:
    program = write_program(tmp_path, EARLY)
    options = ("--on=sim", "--nproc-per-node=2", "--report=run.html", "--log-dir=logs")

    finished = run("run", *options, str(program), cwd=tmp_path)

    assert finished.code == 1
    assert "rankwise: report: run.html\n" in finished.stderr
    page = (tmp_path / "run.html").read_text()
    assert "rank 1 failed: ValueError: early" in page
    assert "The ranks were simulated." in page
    assert shlex.join(["rankwise", "run", *options]) in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--virtual-clock", "--virtual-clock is for simulated ranks (give --on sim as well)"),
        ("--on sim --trace t.json", "--trace needs a machine"),
        ("--on sim --report r.html --nnodes 1:2", "nodes that come and go needs a machine"),
        ("--on sim --report r.html --explore 2", "several schedules needs a machine"),
        ("--on sim:nowhere.yaml", "there is no machine, preset or topology file 'nowhere.yaml'"),
        ("--on sim:switch8 --report no/r.html", "there is no directory 'no'"),
        ("--on sim:switch8 --prediction no/p.json", "there is no directory 'no'"),
        ("--on sim:switch8 --record-values no/v.json", "there is no directory 'no'"),
        ("--on sim --faults jitter:percent=5", "these ranks have no machine (--on sim:MACHINE has"),
        ("--on sim:switch8 --faults slow:link=sip0-sip1,times=2", "has no link 'sip0->sip1'"),
        ("--on ray:x", "'ray:x' is not 'ray', 'sim' or 'sim:MACHINE'"),
    ],
)
def test_what_cannot_be_predicted_is_refused(options: str, message: str, tmp_path: Path) -> None:
    program = write_program(tmp_path, "print('ran')")

    finished = run("run", *options.split(), str(program), cwd=tmp_path)

    assert finished.code == 2
    assert message in finished.stderr
    assert not finished.lines


@pytest.mark.system
def test_the_machine_itself_takes_as_long_as_the_level_of_messages_says(tmp_path: Path) -> None:
    words = ("--topology", MACHINE, "--set", "elements=65536", "--timing-only", "--format", "json")

    finished = run("sim", "bench", "ccl_allreduce", *words, cwd=tmp_path)

    (found,) = json.loads(finished.stdout)
    size = 2 * 65_536  # of f16
    sips = SPEC.system.sips
    assert found["time_ps"] == EXACT(
        placed_time("all_reduce", size, sips, tuple(range(8)), "ring"), rel=0.05
    )
