"""Hundreds of workers on one machine, within the limits that a machine has."""

from pathlib import Path

import pytest
from running import RANKWISE, Running, write_program

pytestmark = pytest.mark.system


@pytest.mark.parametrize("options", [["--no-python"], ["--start-method=forkserver"]])
def test_256_workers_succeed_under_a_limit_of_1024_files(
    options: list[str], tmp_path: Path
) -> None:
    program = write_program(tmp_path, "print('hello')", "program.py")
    if "--no-python" in options:
        program = write_program(tmp_path, "#!/bin/sh\necho hello\nulimit -n >&2\n", "program")
        program.chmod(0o755)

    with Running(
        "bash", "-c", 'ulimit -Sn 1024; exec "$@"', "-", *RANKWISE, "run",
        "--nproc-per-node=256", *options, str(program),
    ) as running:  # fmt: skip
        done = running.finish()

    assert done.code == 0, done.stderr
    assert sorted(done.lines) == sorted(f"[default{rank}]:hello" for rank in range(256))
    if "--no-python" in options:
        assert done.stderr.count("]:1024\n") == 256  # the agent's limit is not the workers'


def test_a_limit_that_does_not_suffice_is_told(tmp_path: Path) -> None:
    program = write_program(tmp_path, "print('hello')")

    with Running(
        "bash", "-c", 'ulimit -n 64; exec "$@"', "-", *RANKWISE, "run",
        "--nproc-per-node=64", str(program),
    ) as running:  # fmt: skip
        done = running.finish()

    assert done.code == 1
    assert "Too many open files" in done.stderr
