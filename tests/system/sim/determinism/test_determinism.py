"""A run is the same to the byte, whatever surrounds it: in this tree and on every machine.

Each of the surroundings is a process of its own. What they leave is compared byte by byte, and its
digests with those that are kept in the tree: so every machine that runs this test is compared with
all others. How to renew them is told in `representative_runs.py`.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from representative_runs import GOLDEN, digests

pytestmark = pytest.mark.system

PATIENCE_S = 110
PROGRAM = Path(__file__).with_name("representative_runs.py")

SURROUNDINGS = {
    "plain": {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"},
    "strange": {
        "PYTHONHASHSEED": "4711", "TZ": "Asia/Kolkata", "LC_ALL": "C", "OMP_NUM_THREADS": "4",
        "COLUMNS": "40", "LANG": "tr_TR.UTF-8", "PYTHONOPTIMIZE": "", "PYTHONMALLOC": "malloc",
    },
}  # fmt: skip


def run_in(name: str, folder: Path) -> Path:
    """Make the runs among some surroundings: variables, CPUs, working directory, home."""
    home = folder / f"home of {name}"
    home.mkdir()
    one_cpu = {min(os.sched_getaffinity(0))}
    confine = partial(os.sched_setaffinity, 0, one_cpu) if name == "strange" else None
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / name)],
        cwd=home if name == "strange" else folder,
        env={**os.environ, **SURROUNDINGS[name], "HOME": str(home), "TMPDIR": str(home)},
        preexec_fn=confine,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_in("plain", tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("words", [[], ["--help"], ["--frobnicate"], ["runs", "--renew"]])
def test_what_is_no_folder_is_not_taken_for_one(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == (0 if words == ["--help"] else 2)
    assert "usage:" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(600)
def test_runs_leave_the_same_bytes_whatever_surrounds_them(plain: Path, tmp_path: Path) -> None:
    strange = run_in("strange", tmp_path)

    names = [
        sorted(each.relative_to(folder) for each in folder.rglob("*.*"))
        for folder in (plain, strange)
    ]
    assert names[0] == names[1]
    differing = [
        name for name in names[0] if (plain / name).read_bytes() != (strange / name).read_bytes()
    ]
    assert differing == []


@pytest.mark.timeout(600)
def test_runs_leave_the_bytes_that_they_leave_on_every_other_machine(plain: Path) -> None:
    kept = GOLDEN.read_text().splitlines()

    assert list(digests(plain)) == kept, (
        f"if the change is meant to alter them: python {PROGRAM.name} --renew, see there"
    )


def test_no_run_is_empty(plain: Path) -> None:
    empty = sorted(
        str(path.relative_to(plain)) for path in plain.rglob("*.*") if not path.stat().st_size
    )

    assert empty == ["faults/exhausts.jsonl", "faults/waits.jsonl"]  # nothing was carried out


def test_a_permuted_schedule_gives_the_same_values_in_another_order(plain: Path) -> None:
    logs = [(plain / name / "op_log.jsonl").read_bytes() for name in ("ranks", "permuted_ranks")]
    values = [(plain / name / "values.bin").read_bytes() for name in ("ranks", "permuted_ranks")]

    assert logs[0] != logs[1]
    assert len(values[0]) == len(values[1])
