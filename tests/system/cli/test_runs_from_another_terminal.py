"""A run that goes on elsewhere is read and stopped: `rankwise logs`, `rankwise stop`."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from running import PATIENCE_S, WITHIN_S, Running, run, start, write_program

from rankwise.base.units import SECOND, Duration
from rankwise.cli.runs_here import deadline_after
from rankwise.launch.control.client import list_runs, listen
from rankwise.launch.control.server import ControlRequest

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


def test_one_rank_is_read_from_its_log_file_and_a_report_is_made_by_name(
    fifo: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    with talking(tmp_path, "--tee=3", "--log-dir", str(logs), ranks=2) as running:
        read = run("logs", str(running.pid), "--rank=1", "-n1")
        strange = run("logs", str(running.pid), "--rank=2")
        (row,) = (
            row for row in map(json.loads, run("ps", "--json").lines) if row["pid"] == running.pid
        )
        page = tmp_path / "page.html"
        reported = run("report", f"talks-{os.getpid()}", "-o", str(page))
        stopped = run("stop", str(running.pid), "--now")
        done = running.finish(WITHIN_S)
    unknown = run("report", "no-such-run")

    assert (reported.code, reported.stderr) == (0, "")
    assert page.read_text().startswith("<!")
    assert unknown.code == 2
    told = unknown.stderr  # other runs may be active on this machine
    assert "'no-such-run' is not a file, and no " in told
    assert "no active run is called" in told or "no run of yours is active" in told
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
assert not rankwise.should_stop()  # who has never asked is not waited for
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
    assert second.stdout.endswith("stopped\n") or second.code == 2
    assert done.lines == ["begun on 0", "saved"]
    assert done.code == 143
    assert "stopped by SIGTERM after" in done.stderr


STANDS = """
import os, signal, rankwise
from rankwise import collectives
for _ in range(3):
    assert not rankwise.should_stop()
    collectives.barrier()
if rankwise.rank() == 1:
    print("begun on 1", flush=True)
    signal.pause()
collectives.barrier()
"""


def test_top_shows_who_is_awaited_in_a_pipe_and_for_programs(tmp_path: Path) -> None:
    script = write_program(tmp_path, STANDS)
    with start("run", "--nproc-per-node=3", "--no-prefix", script) as running:
        running.wait_for("begun on 1")
        told: list[dict[str, Any]] = []
        deadline = time.monotonic() + PATIENCE_S
        while not any(rank["state"] == "awaited" for rank in told):  # it takes a second of waiting
            assert time.monotonic() < deadline, told
            (row,) = map(json.loads, run("top", "--json", str(running.pid)).lines)
            told = row["workers"]
        shown = run("top", str(running.pid)).lines
        every = run("top", "--once").lines
        run("stop", "--now", str(running.pid))
        running.finish(WITHIN_S)

    assert [rank["state"] for rank in told] == ["waiting", "awaited", "waiting"]
    assert [rank["steps"] for rank in told] == [2, 2, 2]
    assert told[0]["call"]["text"].startswith("barrier #4")
    assert told[1]["awaited_by"] == 2
    assert told[1]["memory_bytes"] > 1 << 20
    assert any(line.startswith("ranks 0, 2 wait for rank 1, for ") for line in shown)
    header, odd, *others = (line.split() for line in shown[-4:])
    assert header[:3] == ["RANKS", "STATE", "STEPS/S"]
    assert odd[:2] == ["1", "awaited"]
    assert [line[:2] for line in others] == [["0", "waiting"], ["2", "waiting"]]
    assert max(map(len, shown)) <= 80
    assert any(f"pid {running.pid}" in line for line in every)


FAILS_ONCE = """
import os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("bad shape")
print("begun again", flush=True)
signal.pause()
"""


def test_an_agent_tells_of_earlier_failures_and_at_last_of_the_end(tmp_path: Path) -> None:
    script = write_program(tmp_path, FAILS_ONCE)
    with start("run", "--max-restarts=1", "--no-prefix", script) as running:
        running.wait_for("begun again")
        (asked,) = (each for each in list_runs() if each.pid == running.pid)
        answer = listen(asked, ControlRequest("end"), deadline_after(Duration(10 * SECOND)))
        assert next(answer) == {"state": "going on"}
        (row,) = map(json.loads, run("top", "--json", str(running.pid)).lines)
        shown = run("top", str(running.pid)).lines
        os.kill(row["workers"][0]["pid"], signal.SIGKILL)
        (end,) = answer
        running.finish(WITHIN_S)

    assert row["failures"] == {"raised": 1}
    assert (row["restarts"], row["restarts_max"]) == (1, 1)
    assert "failed so far: 1 raised  rank 0 failed (ValueError: bad shape)" in shown
    assert (end["state"], end["starts"]) == ("failed", 2)
    assert "SIGKILL" in end["why"]


def test_an_id_that_serves_as_a_secret_is_in_no_name_and_good_for_commands(
    fifo: Path, tmp_path: Path
) -> None:
    place = ("--rdzv-backend=embedded", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=is_host=true")
    run_id = f"talks-{os.getpid()}"
    with talking(tmp_path, "--nnodes=1:2", *place) as running:
        names = Path("/proc/net/unix").read_text(errors="replace")
        shown = [json.loads(line) for line in run("ps", "--json").lines]
        with fifo.open("w"):
            stopped = run("stop", run_id)
        done = running.finish(WITHIN_S)

    assert run_id not in names
    assert str(running.pid) in names
    assert [each["pid"] for each in shown if each["run_id"] == run_id] == [running.pid]
    assert stopped.code == 0, stopped
    assert done.code == 143
