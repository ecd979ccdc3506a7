"""A run that goes on elsewhere is read and stopped: `rankwise logs`, `rankwise stop`."""

import json
import os
from pathlib import Path

import pytest
from running import WITHIN_S, Running, run, start, write_program

pytestmark = pytest.mark.system

TALKS = """
import os, sys
rank = os.environ["RANK"]
print("begun on", rank, flush=True)
print("a word to stderr", file=sys.stderr, flush=True)
with open(os.environ["FIFO"]) as fifo:
    for line in fifo:
        print(line.strip(), "on", rank, flush=True)
"""


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    monkeypatch.setenv("FIFO", str(path))
    return path


def talking(tmp_path: Path, *options: str, ranks: int = 1) -> Running:
    running = start(
        "run",
        f"--rdzv-id=talks-{os.getpid()}",
        f"--nproc-per-node={ranks}",
        *options,
        write_program(tmp_path, TALKS),
    )
    running.wait_for("begun on", count=ranks)
    return running


def test_a_run_without_log_files_is_followed_to_its_end(fifo: Path, tmp_path: Path) -> None:
    with talking(tmp_path) as running, start("logs", "-f", str(running.pid)) as reader:
        reader.wait_for("begun on 0")
        with fifo.open("w") as told:
            told.write("more\n")
            told.flush()
            reader.wait_for("more on 0")
            told.write("last words")

        read = reader.finish()
        done = running.finish()

    assert done.code == 0
    assert read.code == 0
    assert read.lines == ["[0]:begun on 0", "[0]:more on 0", "[0]:last words on 0"]
    assert read.stderr.splitlines() == [
        "[0]:a word to stderr",
        f"rankwise: talks-{os.getpid()} has ended",
    ]


def test_one_rank_is_read_from_its_log_file(fifo: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with talking(tmp_path, "--tee=3", "--log-dir", str(logs), ranks=2) as running:
        read = run("logs", str(running.pid), "--rank=1", "-n1")
        strange = run("logs", str(running.pid), "--rank=2")
        (row,) = (
            row for row in map(json.loads, run("ps", "--json").lines) if row["pid"] == running.pid
        )
        stopped = run("stop", str(running.pid), "--now")
        done = running.finish(WITHIN_S)

    assert read.lines == ["begun on 1"]
    assert read.stderr == "a word to stderr\n"
    assert strange.code == 1
    assert "there is no rank 2 here, its ranks are 0 to 1" in strange.stderr
    assert Path(row["log_dir"]).parent == logs
    assert [worker["rank"] for worker in row["workers"]] == [0, 1]
    assert row["memory_bytes"] > 1 << 20
    assert stopped.lines == [
        f"killing 2 ranks of talks-{os.getpid()} (pid {running.pid})",
        "stopped",
    ]
    assert done.code == 143


SAVES = """
import os, time, rankwise
print("begun on", os.environ["RANK"], flush=True)
while not rankwise.should_stop():
    time.sleep(0.01)  # a step
print("saved", flush=True)
"""


def test_a_run_that_is_stopped_can_save_and_the_second_stop_waits_with_the_first(
    tmp_path: Path,
) -> None:
    script = write_program(tmp_path, SAVES)
    with start("run", "--no-prefix", script) as running:
        running.wait_for("begun on 0")
        first = run("stop", "--no-wait", str(running.pid))
        second = run("stop", str(running.pid))
        done = running.finish(WITHIN_S)

    assert first.code == 0
    assert first.stdout.endswith("for up to 30 s\n")
    # It may come when the run is over.
    assert second.stdout.endswith("stopped\n") or second.code == 1
    assert done.lines == ["begun on 0", "saved"]
    assert done.code == 143
    assert "stopped by SIGTERM after" in done.stderr
