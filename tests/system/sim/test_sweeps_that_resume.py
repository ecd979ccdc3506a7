"""Sweeps that end early: what is done stays in the file of `--results`, and is not run again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.system

PATIENCE_S = 100
# The program tells of each case that runs, by a file; the last one waits for a fifo.
PROGRAM = """
import os, pathlib
def run(torch, *, n=1):
    with open("ran", "a") as file:
        file.write(f"{n}\\n")
    if n == 3 and os.path.exists("gate"):
        open("gate").read()
    torch.ones(n)
"""
SWEEP = ("run", "mine.py", "--sweep", "n=1,2,3", "--results", "r.jsonl", "--format", "csv")


# On one core cases run one after the other: when the last one begins, the others are in the file.
ON_ONE_CORE = """
import os, runpy, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
runpy.run_module("rankwise", run_name="__main__", alter_sys=True)
"""


def started(cwd: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", ON_ONE_CORE, "sim", *SWEEP],
        cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@pytest.fixture
def sweep_in_its_last_case(tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    (tmp_path / "mine.py").write_text(PROGRAM)
    os.mkfifo(tmp_path / "gate")
    with started(tmp_path) as sweep:
        gate = os.open(tmp_path / "gate", os.O_WRONLY)  # returns when the last case reads from it
        (tmp_path / "gate").unlink()
        yield sweep
        os.close(gate)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_that_is_ended_goes_on_with_the_rest(
    number: signal.Signals, sweep_in_its_last_case: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    sweep = sweep_in_its_last_case

    sweep.send_signal(number)
    out, err = sweep.communicate(timeout=PATIENCE_S)
    before = (tmp_path / "ran").read_text().split()
    again = started(tmp_path)
    out_again, err_again = again.communicate(timeout=PATIENCE_S)

    assert sorted(before) == ["1", "2", "3"]
    assert (tmp_path / "ran").read_text().split()[3:] == ["3"]
    assert again.returncode == 0, err_again
    assert "results: 2 of 3 are from r.jsonl" in err_again
    assert [line.split(",")[0] for line in out_again.splitlines()] == ["n", "1", "2", "3"]
    if number is signal.SIGINT:
        assert sweep.returncode == 130
        assert "interrupted: 2 of 3 cases are done; the same command runs the rest" in err
        assert [line.split(",")[0] for line in out.splitlines()] == ["n", "1", "2"]


def test_a_changed_program_or_value_runs_again(tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(PROGRAM)
    for _ in range(2):
        started(tmp_path).communicate(timeout=PATIENCE_S)
    assert len((tmp_path / "ran").read_text().split()) == 3

    program.write_text(PROGRAM + "# another one\n")
    started(tmp_path).communicate(timeout=PATIENCE_S)

    assert len((tmp_path / "ran").read_text().split()) == 6


NUMPY = """
import argparse
import numpy as np
from rankwise import collectives
parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int)
size = parser.parse_args().size
assert size != 7, "size is 7"
for _ in range(2):
    collectives.all_reduce(np.zeros(size))
"""


def test_predictions_are_swept_over_arguments_and_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NUMPY)

    done = subprocess.run(
        [
            sys.executable, "-m", "rankwise", "run", "--on", "sim:switch8",
            "--sweep", "size=7,1024", "--sweep", "nproc-per-node=2,4", "--format", "json",
            "--report", "s.html",
            "--results", "r.jsonl", "train.py",
        ],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    rows = json.loads(done.stdout)
    assert [(row["size"], row["nproc-per-node"], row["ranks"]) for row in rows] == [
        ("1024", "2", 2), ("1024", "4", 4),
    ]  # fmt: skip
    assert 0 < rows[0]["step_time_s"] < rows[1]["step_time_s"]
    assert "at size=7 nproc-per-node=2" in done.stderr
    assert "AssertionError: size is 7" in done.stderr
    assert "Scaling with nproc-per-node" in (tmp_path / "s.html").read_text()
