"""The same programs on simulated ranks, with a machine and without, and on real processes.

Every printed line is the same.

The programs print hashes of tensors, so that sums in another order would show.
"""

from collections.abc import Callable
from contextlib import chdir
from functools import partial
from pathlib import Path

import pytest
from preloaded import Preloaded
from running import Finished

PROGRAMS = Path(__file__).parent / "programs"


def lines_of(
    run: Callable[..., Finished], program: Path, folder: Path, nprocs: int, *options: str
) -> list[str]:
    folder.mkdir()
    with chdir(folder):
        finished = run(
            f"--nproc-per-node={nprocs}", "--no-prefix", *options, str(program),
            environment={"CHECKPOINT": str(folder / "checkpoint")},
        )  # fmt: skip
    assert finished.code == 0, finished.stderr
    assert "rankwise: warning" not in finished.stderr
    return sorted(finished.lines)


@pytest.mark.torch
@pytest.mark.system
@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_prints_the_same_lines(
    program: Path,
    nprocs: int,
    preloaded: Preloaded,
    run_on_torch: Callable[..., Finished],
    tmp_path: Path,
) -> None:
    simulated = lines_of(
        partial(preloaded.run, "run"), program, tmp_path / "simulated", nprocs, "--on=sim"
    )
    real = lines_of(run_on_torch, program, tmp_path / "real", nprocs, "--standalone")

    assert simulated == real
    assert len(real) >= nprocs
    if nprocs == 4:  # a modelled machine changes no number
        timed = lines_of(
            partial(preloaded.run, "run"),
            program,
            tmp_path / "timed",
            nprocs,
            "--on=sim:pod64",
            "--virtual-clock",
        )
        assert timed == simulated
