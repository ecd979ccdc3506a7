"""`rankwise run -`: the program is what standard input holds."""

import subprocess
from pathlib import Path

import pytest
from running import RANKWISE

pytestmark = pytest.mark.system

PROGRAM = """\
import os, sys
print("rank", os.environ["RANK"], sys.argv, repr(sys.stdin.read()), sys.path[0] == "")
if "exit" in sys.argv:
    sys.exit("bad")
if "raise" in sys.argv:
    raise ValueError("worse")
"""


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = (*RANKWISE, "run", *words)
    return subprocess.run(
        command, input=PROGRAM, capture_output=True, text=True, check=False, cwd=folder, timeout=200
    )


@pytest.mark.parametrize(
    "options", [(), ("--start-method", "forkserver"), ("--on", "sim"), ("--nproc-per-node", "1")]
)
def test_each_rank_gets_the_program_of_standard_input(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = run(tmp_path, "--nproc-per-node", "2", *options, "-", "word")

    count = 1 if "1" in options else 2
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        f"[default{rank}]:rank {rank} ['-', 'word'] '' True" for rank in range(count)
    ]


@pytest.mark.parametrize("options", [(), ("--on", "sim")])
def test_failure_of_the_program_on_standard_input_shows_its_line(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = run(tmp_path, *options, "-", "raise")

    assert done.returncode == 1
    assert "the program on standard input failed after" in done.stderr
    assert (
        '      File "<stdin>", line 6, in <module>\n        raise ValueError("worse")'
        in done.stderr
    )


def test_exit_of_the_program_on_standard_input_names_its_line(tmp_path: Path) -> None:
    done = run(tmp_path, "-", "exit")

    assert "root cause: rank 0 exited with code 1: SystemExit at <stdin>:4" in done.stderr


def test_program_on_standard_input_is_refused_on_machines_elsewhere(tmp_path: Path) -> None:
    done = run(tmp_path, "--on", "ray", "-")

    assert done.returncode == 2
    assert "script - is standard input" in done.stderr


def test_empty_standard_input_is_refused(tmp_path: Path) -> None:
    command = (*RANKWISE, "run", "-")

    done = subprocess.run(
        command, input=" \n", capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert done.returncode == 2
    assert "script - is read from standard input, which is empty" in done.stderr
