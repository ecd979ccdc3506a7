"""Machines are fed through one door: no module calls `handle` or `tick` but those named here."""

import ast
from pathlib import Path

import rankwise

SOURCE = Path(rankwise.__file__).parent
FEEDING = {"handle", "tick"}
THE_DOOR = "drivers/feed.py"
WITHIN_A_MACHINE = {
    "core/agent/machine.py": "an agent is made of machines, which nobody else sees",
    "core/agent/replay.py": "feeds what a journal holds, and compares",
    "core/gang/machine.py": "a deadline that is told as a fact",
    "core/rendezvous/machine.py": "the same",
    "core/watch/machine.py": "the same",
}
"""Who feeds a machine without the door, and why; docs/adr/0017 has the reasons."""
NOT_A_MACHINE = ("sim/runtime/", "sim/benches/")
"""There a `handle` is an operation that is waited for, as in torch."""


def those_who_feed() -> set[str]:
    """Modules with an attribute `handle` or `tick` of something, be it called or handed on."""
    return {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if b".handle" in (text := path.read_bytes()) or b".tick" in text  # to parse all takes long
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in FEEDING
    }


def test_nobody_feeds_a_machine_but_through_the_door() -> None:
    feeding = {name for name in those_who_feed() if not name.startswith(NOT_A_MACHINE)}

    assert feeding == {THE_DOOR, *WITHIN_A_MACHINE}
