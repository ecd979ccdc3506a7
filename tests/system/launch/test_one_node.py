"""One node is several nodes whose number is one: what rankwise adds to a run works there too."""

import http.client
import json
import os
import re
from pathlib import Path

import pytest
from running import plain, run, start, write_program

pytestmark = pytest.mark.system


def test_after_a_final_exception_no_restart_is_spent(tmp_path: Path) -> None:
    script = write_program(tmp_path, "print('began'); raise ValueError('no')")

    done = run("run", "--max-restarts=5", "--no-retry=ValueError", script)

    assert done.code == 1
    assert plain(done.lines) == ["began"]
    assert "not restarted: --no-retry names ValueError" in done.stderr


def test_failures_without_progress_end_the_run(tmp_path: Path) -> None:
    script = write_program(tmp_path, "print('began'); raise SystemExit(4)")

    done = run(
        "run", "--max-restarts=9", "--restart-backoff=1ms", "--max-no-progress=3", script
    )  # fmt: skip

    assert done.code == 4
    assert len(plain(done.lines)) == 3
    assert "not restarted: 3 attempts in a row without progress (--max-no-progress)" in done.stderr


@pytest.mark.parametrize(("option", "attempts"), [((), 1), (("--retry-startup-errors",), 2)])
def test_what_cannot_be_started_is_tried_again_only_on_request(
    tmp_path: Path, option: tuple[str, ...], attempts: int
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)

    done = run("run", "--max-restarts=1", *option, "--no-python", program)

    assert done.code != 0
    assert done.stderr.count("restarting all ranks") == attempts - 1


def test_a_node_check_that_fails_keeps_the_ranks_from_starting(tmp_path: Path) -> None:
    script = write_program(tmp_path, "print('began')")

    refused = run("run", "--node-check=echo no GPU here; false", script)
    passed = run("run", "--node-check=true", script)

    assert (refused.code, plain(refused.lines)) == (1, [])
    assert "the node check 'echo no GPU here; false' ended with exit code 1" in refused.stderr
    assert "no GPU here" in refused.stderr
    assert (passed.code, plain(passed.lines)) == (0, ["began"])


def test_a_node_that_is_not_fit_has_spent_no_restart(tmp_path: Path) -> None:
    script = write_program(tmp_path, "print('began')")

    done = run("run", "--log-format=json", "--node-check=false", script)

    end = json.loads(done.stderr.splitlines()[-1])
    assert (end["event"], end["starts"], end["restarts"]) == ("end", 0, 0)


MEASURED = """
import os, signal, time, rankwise
from rankwise import collectives
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rankwise.rank() == 1:
        raise ValueError("once")
    signal.pause()
for _ in range(4):
    with rankwise.section("step"):
        collectives.barrier()
        time.sleep(0.002)
print("began", flush=True)
signal.pause()
"""


def test_health_and_metrics_are_answered(tmp_path: Path) -> None:
    script = write_program(tmp_path, MEASURED)

    with start(
        "run", "--nproc-per-node=2", "--max-restarts=1", "--health-port=0", script
    ) as running:
        running.wait_for("began", count=2)
        told = running.wait_for("health: http", stream="stderr")
        port = re.search(r"http://127.0.0.1:(\d+)/health", told)
        assert port is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=30)
        connection.request("GET", "/health")
        health = json.loads(connection.getresponse().read())
        connection.request("GET", "/metrics")
        metrics = connection.getresponse().read().decode()
        connection.close()
        running.signal(15)
        done = running.finish()

    assert (health["phase"], health["nodes"], health["workers"]) == ("running", 1, 2)
    samples = dict(
        re.sub(r'run_id="[^"]+",node="\w+",?', "", line).rsplit(" ", 1)
        for line in metrics.splitlines()
        if not line.startswith("#")
    )
    assert samples["rankwise_workers{}"] == "2"
    assert samples["rankwise_restarts_total{}"] == "1"
    assert samples['rankwise_failures_total{kind="raised"}'] == "1"
    for rank in range(2):
        assert samples[f'rankwise_steps_total{{rank="{rank}"}}'] == "4"
        assert float(samples[f'rankwise_step_seconds_total{{rank="{rank}"}}']) > 0.007
        assert samples[f'rankwise_collectives_total{{rank="{rank}"}}'] == "4"
        assert int(samples[f'rankwise_memory_bytes{{rank="{rank}"}}']) > 1 << 20
        assert float(samples[f'rankwise_cpu_seconds_total{{rank="{rank}"}}']) > 0
    assert done.code == 143


def test_the_journal_can_be_replayed(tmp_path: Path) -> None:
    script = write_program(tmp_path, "raise SystemExit(1)")
    run("run", "--max-restarts=1", "--log-dir", tmp_path / "logs", script)
    (journal,) = (tmp_path / "logs").glob("*/journal.jsonl")

    replayed = [run("replay", place) for place in (journal, journal.parent, tmp_path / "logs")]

    assert [each.code for each in replayed] == [0, 0, 0], replayed[0].stderr
    header, *_, last, root = replayed[0].stdout.splitlines()
    assert header.split() == ["agent", "time", "phase", "round", "leads", "fact"]
    assert " finished " in last
    assert re.match(r"agent +20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z +\d+\.\d{6} s  finished", last)
    assert root == "root cause: rank 0 exited with code 1: SystemExit at program.py:1"
    assert {each.stdout for each in replayed} == {replayed[0].stdout}


def test_a_directory_that_holds_not_one_journal_is_refused_with_the_newest(tmp_path: Path) -> None:
    empty = run("replay", tmp_path)
    for number, name in enumerate(("new", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").touch()
        os.utime(tmp_path / name / "journal.jsonl", (9 - number, 9 - number))
    two = run("replay", tmp_path)

    assert (empty.code, two.code) == (2, 2)
    assert "there is no journal.jsonl in " in empty.stderr
    assert f"the newest: rankwise replay {tmp_path}/new" in two.stderr
