"""Runs on a machine with GPUs: what reports, journals, metrics and `rankwise top` tell of them."""

import json
import os
import re
import select
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_gpus import FakeGpu, FakeGpus, needs_compiler
from running import RANKWISE, Running

pytestmark = [pytest.mark.system, needs_compiler]
pytest.importorskip("pynvml")

RUN = (*RANKWISE, "run", "--standalone", "--nproc-per-node", "2")
WAITING = """
import os
import sys
import time

rank = int(os.environ["RANK"])
print(f"rank {rank} is pid {os.getpid()}.", flush=True)
if rank == 1:
    with open(sys.argv[1]) as fifo:
        fifo.read()
    time.sleep(0.2)  # of a run of less than 0.1 s, rankwise does not judge the clocks
    raise RuntimeError("CUDA error: unspecified launch failure")
with open(sys.argv[1] + ".0") as fifo:
    fifo.read()
"""

HANGS_IN_ITEM = """
import os
from threading import Lock

class Tensor:
    def __init__(self):
        lock = Lock()
        lock.acquire()
        self.item = lock.acquire  # of C, as the method of torch is

print(f"rank {os.environ['RANK']} is pid {os.getpid()}.", flush=True)
loss = Tensor()
loss.item()
"""


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[FakeGpus]:
    fake = FakeGpus(tmp_path)
    fake.set([FakeGpu(), FakeGpu(celsius=82)])
    yield fake
    fake.close()


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    """Two ranks that say their pids; rank 1 fails once the FIFO is written to, rank 0 waits."""
    script, fifo = tmp_path / "train.py", tmp_path / "go"
    script.write_text(WAITING)
    os.mkfifo(fifo)
    os.mkfifo(f"{fifo}.0")
    return str(script), str(fifo)


def pids_in(run: Running) -> dict[int, int]:
    """The ranks' processes, as soon as both have told."""
    run.wait_for(" is pid ", count=2)
    run.wait_for(".\n", count=2)
    told = re.findall(r"rank (\d) is pid (\d+)\.", run.stdout)
    return {int(rank): int(pid) for rank, pid in told}


def go(program: tuple[str, ...]) -> None:
    Path(program[1]).write_text("go")


def test_failure_is_told_with_the_xid_before_it_and_its_rank(
    gpus: FakeGpus, program: tuple[str, ...]
) -> None:
    with Running(*RUN, *program, environment=gpus.environment) as run:
        pids = pids_in(run)
        gpus.set([FakeGpu(processes=((pids[rank], 100),)) for rank in range(2)])
        gpus.report_xid(1, 79)
        run.wait_for("GPU 1 (rank 1) reported XID 79 (fallen off the bus)", stream="stderr")
        go(program)
        ended = run.finish()

    assert ended.code == 1
    told = r"gpu: +GPU 1 \(rank 1\) reported XID 79 \(fallen off the bus\) .+ earlier"
    assert re.search(told, ended.stderr)


def test_failure_is_told_with_slow_clocks_and_memory_errors(
    gpus: FakeGpus, program: tuple[str, ...]
) -> None:
    day_ns = 86_400 * 10**9
    with Running(*RUN, *program, environment=gpus.environment) as run:
        pids_in(run)
        gpus.report_xid(0, 63)  # by then, the first reading has been taken
        run.wait_for("GPU 0 reported XID 63", stream="stderr")
        gpus.set([FakeGpu(thermal_ns=day_ns), FakeGpu(ecc=3, power_ns=day_ns)])
        go(program)
        ended = run.finish()

    assert "GPU 0 was throttled (thermal) for 100% of the run" in ended.stderr
    assert "GPU 1 had 3 uncorrectable memory errors in this run" in ended.stderr
    assert "power" not in ended.stderr


def test_rank_with_a_gpu_that_hangs_in_item_probably_waits_for_the_gpu(
    gpus: FakeGpus, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(HANGS_IN_ITEM)
    with Running(*RUN, "--hang-timeout", "6s", str(script), environment=gpus.environment) as run:
        pids = pids_in(run)
        gpus.set([FakeGpu(processes=((pids[0], 100),)), FakeGpu()])
        gpus.report_xid(0, 63)  # GPUs are read again
        ended = run.finish()

    waits = [line.strip() for line in ended.stderr.splitlines() if "waits for" in line]
    assert "waits for its GPU, probably: .item() waits for it" in waits
    assert len([line for line in waits if "GPU" in line]) == 1  # rank 1 has none


def test_run_without_a_driver_goes_on_without_a_word(
    gpus: FakeGpus, program: tuple[str, ...]
) -> None:
    gpus.set([])
    with Running(*RUN, *program, environment=gpus.environment) as run:
        pids_in(run)
        go(program)
        ended = run.finish()

    assert "unspecified launch failure" in ended.stderr
    assert "GPU" not in ended.stderr.replace("CUDA", "")


def test_journal_and_report_have_samples_of_gpus(
    gpus: FakeGpus, program: tuple[str, ...], tmp_path: Path
) -> None:
    page = tmp_path / "run.html"
    log_dir = tmp_path / "logs"
    options = ("--log-dir", str(log_dir), "--report", str(page))
    with Running(*RUN, *options, *program, environment=gpus.environment) as run:
        pids = pids_in(run)
        gpus.set([FakeGpu(processes=((pids[rank], 100),)) for rank in range(2)])
        wait_for_sample(log_dir, '"GpusSampled"')
        gpus.report_xid(1, 13)
        wait_for_sample(log_dir, '"GpuErrorReported"')
        go(program)
        run.finish()

    html = page.read_text()
    assert "<h2>GPUs</h2>" in html
    assert "87%" in html
    assert "64 °C" in html
    assert "GPU 1 (rank 1) reported XID 13 (graphics engine exception)" in html


def wait_for_sample(log_dir: Path, word: str) -> None:
    """Wait until the journal has it, which is written to at least every two seconds."""
    deadline = time.monotonic() + 100
    while not any(word in each.read_text() for each in log_dir.rglob("journal*.jsonl")):
        assert time.monotonic() < deadline, f"no {word} in the journal"
        select.select([], [], [], 0.05)


def test_top_shows_memory_load_and_temperature(gpus: FakeGpus, program: tuple[str, ...]) -> None:
    with Running(*RUN, "--rdzv-id", f"gpus-{os.getpid()}", *program,
                 environment=gpus.environment) as run:  # fmt: skip
        pids = pids_in(run)
        gpus.set(
            [
                FakeGpu(processes=((pids[0], 100),)),
                FakeGpu(reasons=0x20, ecc=2, processes=((pids[1], 7),)),
            ]
        )
        names = (f"gpus-{os.getpid()}",)
        with Running(*RANKWISE, "top", "--once", *names, environment=gpus.environment) as top:
            shown = top.finish().stdout
        with Running(*RANKWISE, "top", "--once", "--json", *names,
                     environment=gpus.environment) as top:  # fmt: skip
            ranks = json.loads(top.finish().stdout)["workers"]
        go(program)
        run.finish()

    assert "GPU BUSY TEMP" in shown
    assert "the GPU of rank 1 is throttled (thermal)" in shown
    assert "the GPU of rank 1 has had 2 uncorrectable memory errors" in shown
    assert [rank["gpu_bytes"] >> 20 for rank in ranks] == [100, 7]
    assert [rank["gpu_celsius"] for rank in ranks] == [64, 64]


def test_metrics_have_values_for_each_rank_with_a_gpu(
    gpus: FakeGpus, program: tuple[str, ...]
) -> None:
    with Running(*RUN, "--health-port", "0", *program, environment=gpus.environment) as run:
        run.wait_for("/health", stream="stderr")
        url = re.findall(r"http://\S+/health", run.stderr)[0].replace("/health", "/metrics")
        pids = pids_in(run)
        gpus.set([FakeGpu(thermal_ns=2 * 10**9, processes=((pids[1], 100),))])
        gpus.report_xid(0, 31)
        run.wait_for("XID 31", stream="stderr")
        text = urllib.request.urlopen(url, timeout=60).read().decode()
        go(program)
        run.finish()

    values = dict(re.findall(r"^rankwise_(gpu_\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE))
    assert values == {
        "gpu_memory_bytes": str(100 << 20),
        "gpu_busy_ratio": "0.870",
        "gpu_temperature_celsius": "64",
        "gpu_throttled_seconds_total": "2.000",
        "gpu_memory_errors_total": "0",
        "gpu_xids_total": "1",
    }


def test_run_on_a_machine_without_gpus_loads_nothing_for_them(tmp_path: Path) -> None:
    program = (
        "import os, sys; os.environ['RANKWISE_GPUS'] = '0'\n"
        "import rankwise\n"
        "rankwise.run(print, nprocs=1)\n"
        "print([name for name in sys.modules if 'gpu' in name or 'nvml' in name])\n"
    )
    script = tmp_path / "run.py"
    script.write_text(program)

    with Running(sys.executable, str(script)) as run:
        assert "[]" in run.finish().stdout


def test_node_check_of_gpus_keeps_a_node_with_a_bad_one_out(
    gpus: FakeGpus, program: tuple[str, ...]
) -> None:
    gpus.set([FakeGpu(), FakeGpu(ecc=1)])

    with Running(*RUN, "--node-check", "gpu", *program, environment=gpus.environment) as run:
        ended = run.finish()

    assert ended.code == 1
    assert (
        "'gpu' ended with exit code 1: GPU 1 has had 1 uncorrectable memory error" in ended.stderr
    )
