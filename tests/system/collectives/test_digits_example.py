import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rankwise.drivers.real.segments import Segment

pytestmark = pytest.mark.system

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_digits.py"
PATIENCE_S = 60


def run_alone(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    ).stdout


def run_ranks(count: int, *arguments: str) -> tuple[list[str], list[str], list[int]]:
    """What the ranks printed on stdout and stderr, and their exit codes."""
    with Segment.create(count) as segment:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(EXAMPLE), *arguments],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "RANKWISE_SEGMENT_FD": str(segment.fd),
                },
                pass_fds=(segment.fd,),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        ranks_by_pidfd = {os.pidfd_open(process.pid): rank for rank, process in enumerate(ranks)}
        while ranks_by_pidfd:
            ended, _, _ = select.select(list(ranks_by_pidfd), [], [], PATIENCE_S)
            assert ended, "the ranks have not ended"
            for pidfd in ended:
                segment.mark_dead(ranks_by_pidfd.pop(pidfd))
                os.close(pidfd)
        outputs = [process.communicate(timeout=PATIENCE_S) for process in ranks]
    return (
        [output for output, _ in outputs],
        [errors for _, errors in outputs],
        [process.returncode for process in ranks],
    )


def test_the_network_learns_to_read_digits() -> None:
    *epochs, last = run_alone().splitlines()

    assert re.match(r"epoch   1   loss \d\.\d{4}   accuracy: training +\d+\.\d%, test", epochs[0])
    found = re.match(r"world size 1: (\d+\.\d)% of the test images are read correctly", last)
    assert found is not None
    assert float(found[1]) > 95


def test_four_ranks_learn_the_same_as_one() -> None:
    alone = run_alone().splitlines()

    outputs, errors, codes = run_ranks(4)

    assert codes == [0] * 4, errors
    assert outputs[1:] == [""] * 3
    assert outputs[0].splitlines()[:-1] == alone[:-1]


@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [("raise", 1, "this failure was asked for"), ("kill", -signal.SIGKILL, "")],
)
def test_a_rank_that_fails_on_purpose_takes_the_others_along(
    how: str, code: int, cause: str
) -> None:
    _, errors, codes = run_ranks(
        3, "--fail-at-epoch", "2", "--fail-rank", "1", "--fail-how", how
    )  # fmt: skip

    assert codes == [1, code, 1]
    assert cause in errors[1]
    assert "PeerDied" in errors[0]
    assert "rank 1 has ended" in errors[2]
