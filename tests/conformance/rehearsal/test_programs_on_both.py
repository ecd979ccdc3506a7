"""The same programs on simulated ranks, with a machine and without, and on real processes.

Every printed line is the same.

The programs print hashes of tensors, so that sums in another order would show.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from preloaded import Preloaded
from running import Finished, run

PROGRAMS = Path(__file__).parent / "programs"
# Real ranks would spend most of their time on torch's import. It is done once, and then forked.
PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)


def modules_to_preload(program: Path) -> str:
    text = program.read_text()
    return ",".join(["torch._dynamo", *(module for module in PRELOADED if module in text)])


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    with Preloaded("torch._dynamo", *PRELOADED) as process:
        yield process


def lines_of(
    run: Callable[..., Finished], program: Path, folder: Path, nprocs: int, *options: str
) -> list[str]:
    folder.mkdir()
    finished = run(
        "run", f"--nproc-per-node={nprocs}", "--no-prefix", *options, str(program),
        environment={"CHECKPOINT": str(folder / "checkpoint")}, cwd=folder,
    )  # fmt: skip
    assert finished.code == 0, finished.stderr
    assert "rankwise: warning" not in finished.stderr
    return sorted(finished.lines)


@pytest.mark.torch
@pytest.mark.system
@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("program", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_prints_the_same_lines(
    program: Path, nprocs: int, preloaded: Preloaded, tmp_path: Path
) -> None:
    simulated = lines_of(preloaded.run, program, tmp_path / "simulated", nprocs, "--on=sim")
    real = lines_of(
        run, program, tmp_path / "real", nprocs, "--standalone", "--start-method=forkserver",
        f"--preload={modules_to_preload(program)}",
    )  # fmt: skip

    assert simulated == real
    assert len(real) >= nprocs
    if nprocs == 4:  # a modelled machine changes no number
        timed = lines_of(
            preloaded.run, program, tmp_path / "timed", nprocs, "--on=sim:pod64", "--virtual-clock"
        )
        assert timed == simulated
