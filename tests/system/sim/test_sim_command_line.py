"""`rankwise sim` as a user runs it: exit codes, output, files."""

import contextlib
import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rankwise.sim import load_topology

pytestmark = pytest.mark.system

PATIENCE_S = 100


def rankwise(*words: str, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "rankwise", "sim", *words],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_bench_shows_a_table_and_leaves_a_trace_and_a_report(tmp_path: Path) -> None:
    done = rankwise(
        "bench", "ccl_allreduce", "--trace", "t.json", "--report", "r.html", cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr
    assert "ring_allreduce_tcm, 4 ranks" in done.stdout
    assert "\nnumbers: equal to numpy's\n" in done.stdout
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_two_runs_leave_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    written = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        done = rankwise(
            "bench", "tp_mlp", "--set", "tokens=8", "--trace", "t.json", "--report", "r.html",
            cwd=folder, PYTHONHASHSEED=seed,
        )  # fmt: skip
        files = [(folder / name).read_bytes() for name in ("t.json", "r.html")]
        written.append((done.returncode, done.stdout, files))

    assert written[0][0] == 0
    assert written[0] == written[1]


def test_a_sweep_gives_every_combination_in_order_as_csv(tmp_path: Path) -> None:
    done = rankwise(
        "bench", "ccl_allreduce", "--sweep", "elements=256,512", "--sweep", "system.sips.count=2,3",
        "--format", "csv", cwd=tmp_path,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    points = [(row["elements"], row["system.sips.count"]) for row in rows]
    assert points == [("256", "2"), ("256", "3"), ("512", "2"), ("512", "3")]


def test_a_point_that_fails_is_told_and_the_others_are_shown(tmp_path: Path) -> None:
    done = rankwise(
        "bench", "ccl_allreduce", "--sweep", "elements=256,many", "--format", "json", cwd=tmp_path
    )

    assert done.returncode == 1
    assert [row["elements"] for row in json.loads(done.stdout)] == ["256"]
    assert "at elements=many:" in done.stderr


def test_a_sweep_of_a_program_without_results_shows_the_simulated_times(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def run(torch, *, n=1):\n    torch.ones(n)\n")

    done = rankwise("run", "mine.py", "--sweep", "n=1,1000000", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("n=1  simulated time: ")
    assert second.startswith("n=1000000  simulated time: ")
    assert first.split()[-2:] != second.split()[-2:]


def test_a_program_without_results_has_its_time_as_csv_and_json(tmp_path: Path) -> None:
    program = "def run(torch, *, n=1):\n    print('begin')\n    torch.ones(n)\n"
    (tmp_path / "mine.py").write_text(program)

    one = rankwise("run", "mine.py", "--format", "json", cwd=tmp_path)
    swept = rankwise("run", "mine.py", "--sweep", "n=1,1000000", "--format", "csv", cwd=tmp_path)

    assert "begin" in one.stderr
    assert "begin" in swept.stderr
    (alone,) = json.loads(one.stdout)
    first, second = csv.DictReader(io.StringIO(swept.stdout))
    assert list(first) == ["n", "time_ps", "seconds"]
    assert int(first["time_ps"]) == alone["time_ps"] < int(second["time_ps"])
    assert float(second["seconds"]) == int(second["time_ps"]) / 10**12


def shown_on_terminal(
    kind: str, *words: str, cwd: Path, on_output: Callable[[bytes], None] = lambda _shown: None
) -> bytes:
    """What a terminal of a kind gets on standard error."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "rankwise", "sim", *words],
        cwd=cwd,
        env={**os.environ, "TERM": kind},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the other end has been closed
            while piece := os.read(ours, 4096):
                shown += piece
                on_output(shown)
        os.close(ours)
    assert process.returncode == 0, shown
    return shown


def test_a_terminal_sees_how_far_a_run_has_come(tmp_path: Path) -> None:
    # The program waits for the line: how fast the machine is does not matter.
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n\n\n"
        "def run(torch):\n"
        "    torch.ones(1)\n"
        "    Path('seen').read_text()\n"
    )
    os.mkfifo(tmp_path / "seen")

    def let_it_end(shown: bytes) -> None:
        if b"simulated" in shown and not told:
            told.append(shown)
            (tmp_path / "seen").write_text("yes")

    told: list[bytes] = []
    shown_on_terminal("xterm", "run", "mine.py", cwd=tmp_path, on_output=let_it_end)

    (line,) = told
    assert b"mine" in line
    assert b" operations, 0:0" in line


@pytest.mark.parametrize("words", [["gemm", "--help"], ["--help", "gemm"]])
def test_the_help_beside_a_bench_lists_its_parameters(words: list[str], tmp_path: Path) -> None:
    told = rankwise("bench", *words, cwd=tmp_path).stdout

    assert "Parameters of gemm, for --set and --sweep:" in told
    assert "tile   one of auto, 16, 32, 64, 128, 256, 512  [default: auto]" in told


@pytest.mark.parametrize("words", [[], ["--sweep", "elements=16,32"]])
def test_a_terminal_that_cannot_redraw_is_left_alone(words: list[str], tmp_path: Path) -> None:
    assert shown_on_terminal("dumb", "bench", "ccl_allreduce", *words, cwd=tmp_path) == b""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "gem"], "there is no bench 'gem' (did you mean gemm?)"),
        (["bench", "gemm", "--topology", "nope"], "there is no topology file 'nope'"),
        (["bench", "gemm", "--ccl", "nope.yaml"], "no collective configuration 'nope.yaml'"),
        (["bench", "gemm", "--set", "m"], "--set is 'm', expected key=value"),
        (["bench", "gemm", "--set", "m=1", "--set", "m=2"], "--set gives m twice"),
        (["bench", "gemm", "--max-time", "soon"], "--max-time is 'soon'"),
        (["bench", "gemm", "--trace", "no/where.json"], "there is no directory 'no'"),
        (["bench", "gemm", "--sweep", "m=1,2", "--trace", "t.json"], "--sweep makes several"),
        (["run", "nope.py"], "program 'nope.py' does not exist in "),
        (["run", "for_triton.py"], "`import triton` runs as it is with --triton)"),
        (["topology", "nope"], "there is no topology file 'nope'"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(
    words: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "for_triton.py").write_text("import triton\n")

    done = rankwise(*words, cwd=tmp_path)

    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_bench_that_cannot_share_its_work_says_which_size_would_do(tmp_path: Path) -> None:
    devices = ("bench", "tp_mlp", "--set", "system.sips.count=6")

    refused = rankwise(*devices, cwd=tmp_path)
    done = rankwise(*devices, "--set", "inner=258", cwd=tmp_path)

    assert "6 equal parts, one per rank (--set inner=258, or another world_size)" in refused.stderr
    assert done.returncode == 0, done.stderr


def test_ranks_that_call_different_collectives_are_reported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def worker(rank, world_size, torch):\n"
        "    x = torch.ones(4, dtype='f16')\n"
        "    if rank == 0:\n"
        "        torch.distributed.all_reduce(x)\n"
        "    else:\n"
        "        torch.distributed.broadcast(x, src=1)\n"
    )

    done = rankwise("run", "mine.py", cwd=tmp_path)

    assert done.returncode == 1
    assert "root cause: call #1: rank 0 called all_reduce of (4,) f16 (mine.py:4)" in done.stderr
    assert "ranks 1-3 ended after the request to stop" in done.stderr
    assert "mine.py:6" in done.stderr


def test_a_program_that_raises_shows_its_own_lines_only(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def run(torch):\n    raise ValueError('no luck')\n")

    done = rankwise("run", "mine.py", cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: no luck"
    assert "rankwise/" not in done.stderr.replace(str(tmp_path), "")


def test_a_program_that_raises_in_a_rank_shows_the_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def worker(rank, world_size, torch):\n    return 1 // (rank - 2)\n"
    )

    done = rankwise("run", "mine.py", cwd=tmp_path)

    assert done.returncode == 1
    assert 'mine.py", line 2' in done.stderr
    assert "mine.py failed after 0 us of virtual time: 1 of 4 ranks failed\n" in done.stderr
    assert "root cause: rank 2 failed: ZeroDivisionError" in done.stderr


def test_a_program_without_results_shows_the_simulated_time(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def run(torch):\n    torch.ones(4)\n")

    done = rankwise("run", "mine.py", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("simulated time: ")


def test_a_machine_is_drawn(tmp_path: Path) -> None:
    drawn = rankwise("topology", "torus16", "--svg", "m.svg", cwd=tmp_path)
    told = rankwise("topology", "switch8", cwd=tmp_path)

    assert drawn.returncode == 0
    assert (tmp_path / "m.svg").read_text().startswith("<svg")
    assert "8 SIPs, switch" in told.stdout


def test_a_machine_is_written_as_a_file_that_describes_it(tmp_path: Path) -> None:
    written = rankwise("topology", "torus16", "--yaml", cwd=tmp_path)
    (tmp_path / "copy.yaml").write_text(written.stdout)
    both = rankwise("topology", "torus16", "--yaml", "--svg", "m.svg", cwd=tmp_path)

    assert load_topology(tmp_path / "copy.yaml").spec == load_topology("torus16").spec
    assert (both.returncode, both.stdout) == (2, "")
    assert "--svg and --yaml exclude each other (give one)" in both.stderr


def test_a_machine_with_other_fields_can_be_looked_at(tmp_path: Path) -> None:
    told = rankwise("topology", "switch8", "--set", "system.sips.count=4", cwd=tmp_path)
    refused = rankwise("topology", "switch8", "--set", "m=4", cwd=tmp_path)

    assert "4 SIPs, switch" in told.stdout
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--set m: a machine has no such field (they begin with system.," in refused.stderr


def test_asking_for_help_does_not_load_the_simulator(tmp_path: Path) -> None:
    code = (
        "import sys; from rankwise.cli.main import invoke; invoke(['sim', 'bench', '--help']);"
        "assert not {'numpy', 'rankwise.sim'} & set(sys.modules), 'loaded'"
    )

    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S)

    assert done.returncode == 0


def test_a_race_between_programs_is_a_failure_if_one_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "racy.py").write_text(
        """
import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl

@triton.jit
def both(x):
    tl.store(x, tl.program_id(0))

def run(torch):
    both[(2,)](torch.zeros(4))
"""
    )

    silent = rankwise("run", "racy.py", cwd=tmp_path)
    told = rankwise("run", "--detect-races", "racy.py", cwd=tmp_path)
    nowhere = rankwise("run", "--triton", "--detect-races", "racy.py", cwd=tmp_path)

    assert silent.returncode == 0
    assert told.returncode == 1
    assert 'kernel "both" (racy.py:7): store of element 0 of buffer' in told.stderr
    assert "races with program (0, 0, 0) of rank 0" in told.stderr
    assert "--detect-races needs a machine, and --triton alone has none" in nowhere.stderr
