"""A sample of the corpus beside four busy loops; `make corpus-busy` runs all of it so."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from busy import busy_loops
from corpus import FOLDER, read
from running import run, write_program

pytestmark = pytest.mark.system

WAITS_BY_POLLING = """
import os, time
if os.environ["RANK"] == "1":
    time.sleep(1000)
while True:
    time.sleep(0.01)  # for rank 1, as stores and queues do
"""
COMPUTES_IN_A_POOL = """
import threading, time
def compute():
    until = time.process_time() + 4
    while time.process_time() < until:
        sum(range(1000))
threads = [threading.Thread(target=compute) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("fine")
"""


@pytest.fixture(autouse=True)
def loops() -> Iterator[None]:
    with busy_loops(4):
        yield


def test_rank_that_waits_by_polling_hides_no_hang(tmp_path: Path) -> None:
    script = write_program(tmp_path, WAITS_BY_POLLING)

    done = run("run", "--nproc-per-node=2", "--hang-timeout=2s", "--timeout=60s", script)

    assert "the gang hung: no progress for 2 s" in done.stderr, done.stderr


def test_starved_threads_that_compute_are_no_hang(tmp_path: Path) -> None:
    script = write_program(tmp_path, COMPUTES_IN_A_POOL)

    done = run("run", "--nproc-per-node=2", "--hang-timeout=2s", script)

    assert done.code == 0, done.stderr
    assert done.stdout.count("fine") == 2


@pytest.mark.parametrize("name", ["forgets_a_barrier", "reads_a_pipe_that_nobody_writes"])
def test_culprit_is_named_on_a_busy_machine(name: str) -> None:
    program = read(FOLDER / "culprits" / f"{name}.py")
    if program.is_of_torch:
        pytest.importorskip("torch")
    hang = () if program.hang_timeout is None else (f"--hang-timeout={program.hang_timeout}s",)
    words = (f"--nproc-per-node={program.ranks}", *hang, program.path)

    done = run("run", *words, environment=program.environment)

    told = done.stderr.partition("root cause: ")[2].partition("\n")[0].rpartition("progress for ")
    root_cause = told[2].partition(" s; ")[2] if told[1] else told[2]
    assert program.names_the_culprit(root_cause), done.stderr
