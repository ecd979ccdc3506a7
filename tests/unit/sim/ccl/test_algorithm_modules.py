"""Algorithms of users' own: whatever goes wrong in them is one error with their file and line."""

import sys
from pathlib import Path

import numpy as np
import pytest

from rankwise.base.errors import ConfigError
from rankwise.cli.sim_failures import tell_failure
from rankwise.sim import GraphEngine, RuntimeContext, SpawnException
from rankwise.sim.ccl import algorithm_modules
from rankwise.sim.ccl.configuration import load_configuration
from rankwise.sim.ccl.plan import CollectiveRequest, plan

HEAD = "from rankwise.sim.ccl.program import Copy, Fold, Receive, Send, Span\n"
NAME = "users_algorithm"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    plan.cache_clear()
    return tmp_path


def write(folder: Path, body: str, head: str = HEAD) -> Path:
    file = folder / f"{NAME}.py"
    file.write_text(head + body)
    return file


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = 1\nraise RuntimeError('boom')\n", r"RuntimeError: boom, at {file}:2 in <module>"),
        ("x = 1\nx.y\n", r"AttributeError: .*, at {file}:2"),
        ("def program(task) yield\n", r"SyntaxError: .*, at {file}:1"),
        ("\nimport sys\nsys.exit(3)\n", r"SystemExit: 3, at {file}:3"),
        ("import no_such_thing_at_all\n", r"No module named 'no_such_thing_at_all', at {file}:1"),
    ],
)
def test_a_module_that_fails_at_its_import_is_named_with_its_line(
    body: str, message: str, folder: Path
) -> None:
    file = write(folder, body, head="")

    with pytest.raises(ConfigError, match=message.format(file=file)) as caught:
        load_configuration({"algorithms": {"mine": {"module": NAME}}})

    assert "algorithms.mine.module" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "    yield 1 // task.root\n",
            r"failed for rank 0 of 2: ZeroDivisionError: .*, at {file}:4",
        ),
        (
            "    yield 'hello'\n",
            r"instruction 0 of rank 0 is 'hello', expected Send.*, at {file}:4",
        ),
        ("    return 7\n", r"failed for rank 0 of 2: TypeError"),
        ("    yield Send('one', Span(0, 1))\n", r"whose peer is not a rank, at {file}:4"),
        ("    yield Send(1, (0, 1))\n", r"expected spans of whole elements"),
        ("    yield Send(1, Span(0, task.elements / 2))\n", r"expected spans of whole elements"),
        ("    yield Fold(None, Span(0, 1))\n", r"expected spans of whole elements"),
        (
            "    while True:\n        yield Copy(Span(0, 1), Span(1, 2))\n",
            r"more than 64 instr.*, at {file}:5",
        ),
        (
            "    yield from ()\ndef scratch_elements(task):\n    return -1\n",
            r"scratch_.*is -1.*, at {file}:5",
        ),
        (
            "    yield from ()\ndef scratch_elements(task):\n    return task.no\n",
            r"failed to tell the scratch of rank 0: AttributeError: .*, at {file}:6",
        ),
    ],
)
def test_a_program_that_cannot_be_used_is_named_with_its_module(
    body: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithm_modules, "INSTRUCTIONS_MOST", 64)
    file = write(folder, "COLLECTIVE = 'all_reduce'\ndef program(task):\n" + body)

    with pytest.raises(ConfigError, match=message.format(file=file)) as caught:
        plan(CollectiveRequest(NAME, "all_reduce", 2, 8))

    assert NAME in str(caught.value)


def test_the_line_is_the_users_even_if_a_library_has_raised(folder: Path) -> None:
    file = write(
        folder,
        "import numpy\nCOLLECTIVE = 'all_reduce'\n"
        "def program(task):\n    yield numpy.linalg.inv(numpy.zeros((2, 2)))\n",
    )

    with pytest.raises(ConfigError, match=f"LinAlgError: .*, at {file}:5 in program"):
        plan(CollectiveRequest(NAME, "all_reduce", 2, 8))


def test_ranks_whose_algorithm_fails_are_told_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(folder, "COLLECTIVE = 'all_reduce'\ndef program(task):\n    yield 1 // 0\n")
    torch = RuntimeContext(
        GraphEngine("default"),
        ccl={"algorithms": {"mine": {"module": NAME}}, "collectives": {"all_reduce": "mine"}},
    )

    with pytest.raises(SpawnException, match=f"at {file}:4 in program") as caught:
        torch.multiprocessing.spawn(
            lambda _rank: torch.distributed.all_reduce(torch.ones(4)), nprocs=2
        )

    message = str(caught.value)
    assert message.startswith(f"the algorithm's module '{NAME}' failed for rank 0 of 2: ")
    assert f"(called at {__file__}:" in message
    assert "\n" not in message
    assert torch._pending_worker_waits == []
    assert caught.value.failures == ()
    assert tell_failure(caught.value, "program") == 1
    assert capsys.readouterr().err == f"rankwise sim: error: {message}\n"


def test_numpys_integers_are_whole_elements(folder: Path) -> None:
    write(
        folder,
        "import numpy\nCOLLECTIVE = 'broadcast'\n"
        "def program(task):\n    all = Span(numpy.int64(0), numpy.int64(task.elements))\n"
        "    yield Receive(0, all) if task.rank else Send(numpy.int64(1), all)\n",
    )

    planned = plan(CollectiveRequest(NAME, "broadcast", 2, 8))

    assert planned.elements_sent() == {(0, 1): 8}
    assert np.sum(planned.lengths) == 16
