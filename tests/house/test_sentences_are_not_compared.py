"""A sentence that rankwise wrote is for people: no decision compares it (ADR 0089, ADR 0105)."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "rankwise"
ROOMS = (
    "core", "launch/cluster", "launch/looking", "launch/run", "sim/runtime", "simranks/run",
    "simranks/world",
)  # fmt: skip
SENTENCES = ("detail", "message", "sentence", "text", "verdict")
"""How sentences are named."""
JUSTIFIED = {
    "launch/cluster/console_announcements.py": "leaves out an endpoint that a line names already",
    "launch/run/log_layout.py": "a number in an option, as the user wrote it",
    "sim/runtime/multiprocessing.py": "leaves out a line of code that a text names already",
    "simranks/run/sweeps.py": "the source of a program",
}


def test_no_decision_compares_a_sentence() -> None:
    found = {
        str(path.relative_to(SOURCE))
        for room in ROOMS
        for path in sorted((SOURCE / room).rglob("*.py"))
        if [*comparisons_of_sentences(ast.parse(path.read_text()))]
    }

    assert found == set(JUSTIFIED)


def comparisons_of_sentences(tree: ast.AST) -> Iterator[str]:
    """Comparisons of a name for a sentence with anything but nothing at all."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        operands = [node.left, *node.comparators]
        nothing = (each for each in operands if isinstance(each, ast.Constant))
        if any(each.value in {None, ""} for each in nothing):
            continue
        if any(_name(each).strip("_") in SENTENCES for each in operands):
            yield ast.unparse(node)


def _name(node: ast.expr) -> str:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=str() as name)):
            return name
        case _:
            return ""


def test_a_comparison_of_sentences_is_found() -> None:
    tree = ast.parse("a.text == last\nheader['verdict'] != verdict\ntext == ''\nb.rank == 3")

    assert [*comparisons_of_sentences(tree)] == ["a.text == last", "header['verdict'] != verdict"]
