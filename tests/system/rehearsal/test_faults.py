"""`--faults`: what happens to simulated ranks, and who made whom wait."""

from pathlib import Path

import pytest
from running import Finished, run, write_program

AVERAGE = (
    "import numpy as np\nfrom rankwise import collectives\nweights = np.arange(4.0)\n"
    "for _ in range(5):\n    weights = collectives.all_reduce(weights, op='mean')\n"
    "print(weights.tolist())\n"
)
USUAL = "[0.0, 1.0, 2.0, 3.0]"


def struck(folder: Path, *faults: str, text: str = AVERAGE, more: tuple[str, ...] = ()) -> Finished:
    options = [f"--faults={fault}" for fault in faults]
    program = write_program(folder, text)
    return run(
        "run", "--on=sim", "--nproc-per-node=4", "--no-prefix", *options, *more, program, cwd=folder
    )


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ("kill:rank=3@collective=4", 137, "rank 3 gets SIGKILL at operation #4 of group rankwise"),
        ("kill:rank=3,signal=15", 143, "rank 3 gets SIGTERM as it begins"),
        ("raise:rank=1,error=OSError@collective=2", 1, "root cause: rank 1 failed: OSError: fault"),
        ("late:rank=1,by=5s@collective=2", 0, "rank 1 made 3 ranks wait, 15 s of virtual time in"),
        ("late:rank=1,by=5s@collective=2", 0, "for 5 s, at all_reduce #2 (mean) of (4,) float64"),
        ("slow:rank=2,by=10ms", 0, "rank 2 made 3 ranks wait, 150 ms of virtual time in all"),
        ("slow:rank=2,by=10ms@collective=4", 0, "rank 2 made 3 ranks wait, 60 ms of virtual"),
        ("flip:rank=0,bit=64@collective=1", 0, "the operand of rank 0 has no such bit"),
        ("kill:rank=0@collective=99", 0, "never occurred: rank 0 gets SIGKILL at operation #99\n"),
        ("kill:rank=0@collective=1,group=other", 0, "SIGKILL at operation #1 of group other\n"),
    ],
)  # fmt: skip
def test_a_fault_strikes_and_is_told(fault: str, code: int, told: str, tmp_path: Path) -> None:
    finished = struck(tmp_path, fault)

    assert finished.code == code, finished.stderr
    assert told in finished.stderr
    assert finished.lines == ([USUAL] * 4 if code == 0 else [])


def test_rank_late_by_a_fault_is_root_cause_after_the_hang_timeout(tmp_path: Path) -> None:
    finished = struck(tmp_path, "late:rank=2,by=90s@collective=3", more=("--hang-timeout=60",))

    assert finished.code == 1
    assert "root cause: rank 2 has not come to all_reduce #3" in finished.stderr


def test_an_exception_of_a_fault_ends_in_the_line_that_called(tmp_path: Path) -> None:
    finished = struck(tmp_path, "raise:rank=1,error=OSError@collective=2")

    places = [line for line in finished.stderr.splitlines() if 'File "' in line]
    assert places, finished.stderr
    assert all("program.py" in place for place in places), places


def test_a_bit_flips_in_what_a_rank_brings(tmp_path: Path) -> None:
    finished = struck(tmp_path, "flip:rank=1,element=2,bit=51@collective=5")

    assert finished.lines == ["[0.0, 1.0, 2.25, 3.0]"] * 4


@pytest.mark.torch
def test_a_bit_flips_in_what_a_rank_of_torch_brings(tmp_path: Path) -> None:
    finished = struck(
        tmp_path, "flip:rank=2,element=1,bit=31@collective=2",
        text="import torch\nimport torch.distributed as dist\ndist.init_process_group()\n"
        "dist.barrier()\nparts = [torch.empty(2) for _ in range(4)]\n"
        "dist.all_gather(parts, torch.tensor([1.0, dist.get_rank()]))\n"
        "print(torch.stack(parts)[:, 1].tolist())\n",
    )  # fmt: skip

    assert finished.lines == ["[0.0, 1.0, -2.0, 3.0]"] * 4


def test_a_fault_strikes_once_though_ranks_are_started_again(tmp_path: Path) -> None:
    finished = struck(tmp_path, "kill:rank=3@collective=4", more=("--max-restarts=1",))

    assert finished.code == 0, finished.stderr
    assert finished.stderr.count("gets SIGKILL") == 1


def test_faults_come_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        "faults:\n"
        "  - {what: late, rank: 1, by: 2 s, collective: 2}\n"
        "  - {what: slow, rank: 0, by: 1 ms}\n"
    )

    finished = struck(tmp_path, "plan.yaml", "late:rank=2,by=1s")

    assert finished.code == 0, finished.stderr
    assert "rank 1 is late by 2 s" in finished.stderr
    assert "rank 0 is slow by 1 ms" in finished.stderr
    assert "rank 2 is late by 1 s" in finished.stderr


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill:rank=4@collective=1", "--faults names rank 4, and there are ranks 0 to 3"),
        (
            "nonsense",
            "neither a file nor a fault; expected one of kill, raise, late,",
        ),
        ("explode:rank=1", "--faults explode:rank=1: there is no fault 'explode' (expected one of"),
        ("kil:rank=1", "there is no fault 'kil' (did you mean kill?)"),
        ("kill:ran=1", "kill has no 'ran' (did you mean rank?)"),
        ("kill:rank=x", "rank is 'x', expected a whole number"),
        ("kill:rank=-1", "rank is -1, expected 0 or more"),
        ("kill:rank=1,signal=TERM", "signal is 'TERM', expected a number, or a name such as"),
        ("kill:rank=1,signal=999", "signal is 999, expected 1 to 64, or a name"),
        ("kill:rank=1@", "nothing follows @, expected @collective=N"),
        ("flip:rank=1", "flip needs bit (as in flip:rank=1,bit=0)"),
        ("kill:rank", "'rank' is not a field, expected NAME=VALUE"),
        ("late:rank=1,by=5", "by is '5', expected a duration with its unit, as 5s or 200ms"),
        ("raise:rank=1", "raise happens in an operation, expected @collective=N"),
        ("flip:rank=1,bit=3", "flip happens in an operation, expected @collective=N"),
        (
            "raise:rank=1,error=Foo@collective=1",
            "error is 'Foo', expected an exception such as OSError",
        ),
        (
            "raise:rank=1,error=UnicodeDecodeError@collective=1",
            "expected an exception such as OSErr",
        ),
        ("kill:rank=1@collective=0", "collective is 0, expected 1 or more"),
        ("nothing.yaml", "the plan nothing.yaml cannot be read"),
    ],
)
def test_a_fault_that_cannot_be_read_is_refused(fault: str, message: str, tmp_path: Path) -> None:
    finished = struck(tmp_path, fault)

    assert finished.code == 2
    assert message in finished.stderr
    assert len(finished.stderr.splitlines()) == 1
