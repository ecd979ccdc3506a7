"""Commands by which users have nodes checked: how long they may take, and what is left of them."""

import os
import select
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from rankwise.launch.cluster import fitness
from rankwise.launch.cluster.fitness import NodeCheck, Unfit, unfitness

PATIENCE_MS = 60_000


@pytest.fixture
def living(tmp_path: Path) -> Iterator[int]:
    """A pipe in the file system, which is closed when whoever has opened it to write is gone."""
    os.mkfifo(tmp_path / "living")
    fd = os.open(tmp_path / "living", os.O_RDONLY | os.O_NONBLOCK)
    yield fd
    os.close(fd)


def hangs(folder: Path) -> str:
    """A command with a child, both of which hold the pipe; it says so."""
    return f"exec 3> {folder}/living; echo begun >&3; sleep 1000; true"


def wait_until_begun(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(PATIENCE_MS), "the check has not started"
    assert os.read(fd, 100) == b"begun\n"


def is_gone(fd: int) -> bool:
    """Whether the command and its child end, as they do soon after a SIGKILL."""
    poll = select.poll()
    poll.register(fd, 0)  # the end alone
    return any(event & select.POLLHUP for _, event in poll.poll(PATIENCE_MS))


def test_a_check_that_hangs_is_killed_with_its_children_and_named(
    tmp_path: Path, living: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitness, "COMMAND_PATIENCE_S", 0.25)

    command = hangs(tmp_path)
    # It counts as closed only when somebody has opened it, for which the check may lack the time.
    os.close(os.open(tmp_path / "living", os.O_WRONLY))

    found = unfitness((command,), (), NodeCheck())

    assert found == Unfit(
        f"the node check {command!r} did not end within 0.25 s, and was killed", "run it by hand"
    )
    assert is_gone(living)


def test_a_check_that_nobody_waits_for_is_killed_with_its_children(
    tmp_path: Path, living: int
) -> None:
    check = NodeCheck()
    found: list[Unfit | None] = []
    thread = Thread(target=lambda: found.append(check.run(hangs(tmp_path))))
    thread.start()
    wait_until_begun(living)

    check.end()
    thread.join(PATIENCE_MS / 1000)

    assert is_gone(living)
    (unfit,) = found
    assert unfit is not None
    assert "was ended by signal 9" in unfit.reason


def test_no_check_is_started_when_the_agent_is_at_its_end(tmp_path: Path) -> None:
    check = NodeCheck()
    check.end()

    assert check.run(f"touch {tmp_path}/started") is not None
    assert not (tmp_path / "started").exists()


def test_checks_are_run_until_one_fails(tmp_path: Path) -> None:
    commands = ("true", "echo this; echo no accelerator; exit 3", f"touch {tmp_path}/third")

    found = unfitness(commands, (), NodeCheck())

    assert found is not None
    assert found.reason == f"the node check {commands[1]!r} ended with exit code 3: no accelerator"
    assert found.hint == "fix what it reports, then start rankwise again on this node"
    assert not (tmp_path / "third").exists()
