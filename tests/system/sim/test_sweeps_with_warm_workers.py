"""Processes that are forked for each command of a sweep."""

import os
import sys
from pathlib import Path

import pytest

from rankwise.simranks.run import cores

pytestmark = pytest.mark.system

MARKING = """
import os

with open(os.environ["MARKS"], "a") as marks:
    print(os.getpid(), file=marks)
"""


def test_each_worker_imports_modules_once_for_all_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "marking.py").write_text(MARKING)
    marks = tmp_path / "marks"
    monkeypatch.setenv("MARKS", str(marks))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    ended: dict[int, tuple[int, str]] = {}

    cores.run_commands(
        {number: ("sim", "topology", f"no-{number}") for number in range(4)},
        lambda number, code, tail: ended.update({number: (code, tail)}),
        ["marking"],
    )

    assert len(marks.read_text().split()) == min(4, len(os.sched_getaffinity(0)))
    for number in range(4):
        code, tail = ended[number]
        assert code == 2
        assert f"no-{number}" in tail


def test_death_of_a_worker_is_the_outcome_of_its_command_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying.py").write_text("import os\n\nos._exit(3)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    ended: dict[int, int] = {}

    cores.run_commands(
        dict.fromkeys(range(3), ("--version",)),
        lambda number, code, _tail: ended.update({number: code}),
        ["dying"],
    )

    assert ended == {0: 3, 1: 3, 2: 3}
