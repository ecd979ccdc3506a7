import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

WALK = Path(__file__).parents[2] / "tools" / "walk"
TOOL: dict[str, Any] = runpy.run_path(str(WALK / "__main__.py"), run_name="walk")
HOOK: dict[str, Any] = runpy.run_path(str(WALK / "hook.py"), run_name="hook")
LOGS = "rankwise.drivers.real.logs."


@pytest.mark.system
def test_a_line_is_followed_from_its_pipe_to_the_console() -> None:
    calls = TOOL["record"](TOOL["WALKS"]["line"])

    passed = TOOL["modules"](calls)
    between = TOOL["hops"](calls)
    assert passed[0] == f"{LOGS}pump"
    assert {f"{LOGS}channel", f"{LOGS}shared_fd"} <= set(passed)
    assert all(call.module != call.calling_module for call in between)
    assert {(call.calling_module, call.module) for call in between} >= {
        (f"{LOGS}pump", f"{LOGS}channel"),
        (f"{LOGS}channel", f"{LOGS}console"),
    }


def test_a_source_folder_without_the_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/walk", "failure", "--source", "/nonexist"])

    with pytest.raises(SystemExit) as ended:
        TOOL["main"]()

    assert ended.value.code == 2
    assert "error: --source is /nonexist, expected the src folder" in capsys.readouterr().err


def test_a_hop_counts_once_however_many_processes_made_it() -> None:
    call = TOOL["Call"]
    calls = [call(1, "b", "g", "a", "f"), call(2, "b", "h", "b", "g"), call(3, "b", "g", "a", "f")]

    assert TOOL["hops"](calls) == calls[:1]
    assert TOOL["modules"](calls) == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "is_carrier"),
    [
        ("a thing to follow", True),
        (b"the thing", True),
        (memoryview(b"thing"), True),
        ([{"key": ("thing",)}], True),
        (ValueError("thing"), True),
        (113, True),
        (True, False),
        (114, False),
        ("another", False),
        (TOOL["Walk"], False),
    ],
)
def test_a_value_that_contains_a_mark_carries_it(value: object, is_carrier: bool) -> None:
    hook = HOOK["Hook"]("/", "/", ["thing", 113, 1])

    def callee(self: object, value: object) -> bool:  # found in the frame
        frame = sys._getframe()  # what a hook is given
        return bool(hook._has_mark(hook._arguments(frame), 6))

    assert callee("thing", value) is is_carrier
