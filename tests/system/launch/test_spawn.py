"""`rankwise.spawn` does what torch.multiprocessing.spawn does."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import WITHIN_S, Deaths, numbers_after, start_program

import rankwise
from rankwise.launch.run.job import StartMethodName

pytestmark = pytest.mark.system


def succeed(rank: int, directory: str) -> None:
    Path(directory, str(rank)).touch()


def wait_for_ever(rank: int) -> None:
    signal.pause()


def raise_in_one(rank: int) -> None:
    if rank == 1:
        raise LookupError("nothing there")
    signal.pause()


def exit_in_one(rank: int) -> None:
    if rank == 1:
        sys.exit(7)
    signal.pause()


def die_in_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def exit_well(rank: int) -> None:
    sys.exit(0)


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_every_process_is_given_its_number_and_the_arguments(
    method: StartMethodName, tmp_path: Path
) -> None:
    assert rankwise.spawn(succeed, (str(tmp_path),), nprocs=3, start_method=method) is None

    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_output_comes_as_it_was_written(capfd: pytest.CaptureFixture[str]) -> None:
    rankwise.spawn(print, nprocs=1, start_method="forkserver")

    assert capfd.readouterr() == ("0\n", "")


def test_a_context_tells_pids_waits_for_a_while_and_joins(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR)

    def wait(rank: int, path: str) -> None:
        os.read(os.open(path, os.O_RDONLY), 1)

    context = rankwise.spawn(wait, (str(tmp_path / "gate"),), nprocs=2, join=False)

    pids = context.pids()
    assert len(set(pids)) == 2
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert context.join(timeout=0.01) is False
    os.write(gate, b"go")
    assert context.join() is True
    assert context.join() is True
    os.close(gate)
    assert context.pids() == pids


def test_a_context_that_is_told_to_stop_ends_its_processes() -> None:
    context = rankwise.spawn(wait_for_ever, nprocs=2, join=False)
    deaths = Deaths(context.pids())

    context.stop()

    with pytest.raises(rankwise.GangError, match="stopped"):
        context.join()
    assert deaths.survivors(within_s=0) == []


UNJOINED = """
import os, sys, rankwise

def work(rank):
    with open("fifo") as file:
        print(file.read(), flush=True)

context = rankwise.spawn(work, nprocs=1, join=False, daemon=sys.argv[1] == "daemon")
print("pid", *context.pids(), flush=True)
"""


def test_a_program_waits_at_its_end_for_processes_that_nobody_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "fifo")

    with start_program(UNJOINED, tmp_path, "no") as running:
        running.wait_for("pid")
        (tmp_path / "fifo").write_text("late")
        done = running.finish()

    assert done.lines[1] == "late"
    assert done.code == 0


def test_daemons_end_with_their_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "fifo")

    with start_program(UNJOINED, tmp_path, "daemon") as running:
        done = running.finish()
    (pid,) = numbers_after("pid", done.stdout)

    assert done.code == 0
    assert Deaths([pid]).survivors(WITHIN_S) == []


def test_an_interrupt_while_joining_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    program = """
import os, signal, rankwise

def work(rank):
    print("pid", os.getpid(), flush=True)
    signal.pause()

try:
    rankwise.spawn(work, nprocs=2)
except KeyboardInterrupt:
    print("interrupted")
"""
    with start_program(program, tmp_path) as running:
        deaths = Deaths(numbers_after("pid", running.wait_for("pid ", count=2)))
        running.signal_group(signal.SIGINT)
        done = running.finish()

    assert deaths.survivors(within_s=0) == []
    assert done.lines[2:] == ["interrupted"]


def test_all_failures_are_known(tmp_path: Path) -> None:
    with pytest.raises(rankwise.ProcessRaisedException) as caught:
        rankwise.spawn(raise_in_one, nprocs=3, start_method="forkserver")

    root, *others = caught.value.failures
    assert root.rank == 1
    assert {failure.rank for failure in others} == {0, 2}


@pytest.mark.torch
@pytest.mark.parametrize("function", [raise_in_one, exit_in_one, die_in_one, exit_well])
def test_failures_are_told_as_torch_tells_them(function: Callable[[int], None]) -> None:
    multiprocessing = pytest.importorskip("torch.multiprocessing")

    def what_comes_of(spawn: Any, *, join: bool) -> dict[str, Any]:
        try:
            context = spawn(function, nprocs=2, join=join)
            while not join and not context.join():
                pass
        except Exception as raised:  # noqa: BLE001  # theirs and ours are strangers
            error: Any = raised
            return {
                "kind": type(error).__name__,
                "message": "\n".join(
                    line for line in str(error).splitlines() if not line.startswith("  ")
                ),
                "error_index": error.error_index,
                "exit_code": getattr(error, "exit_code", None),
                "signal_name": getattr(error, "signal_name", None),
                "has_pid": error.error_pid > 0,
            }
        return {}

    theirs = what_comes_of(multiprocessing.spawn, join=True)

    assert what_comes_of(rankwise.spawn, join=True) == theirs
    assert what_comes_of(rankwise.spawn, join=False) == theirs


def test_limit_on_the_start_is_checked() -> None:
    with pytest.raises(rankwise.ConfigError, match="start_timeout is 0, expected more than 0"):
        rankwise.spawn(wait_for_ever, start_timeout=0)
