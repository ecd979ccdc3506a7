"""Only core/matching numbers calls and messages, compares them, lists missing ranks and orders."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from rankwise.core import matching

SOURCE = Path(__file__).parents[2] / "src" / "rankwise"
TRANSPORTS = (
    "collectives.barrier",
    "collectives.communicator",
    "collectives.tcp",
    "collectives.transport",
    "core.ledger.blame",
    "sim.runtime.collective_calls",
    "sim.runtime.pending_collectives",
    "simranks.world.collective_groups",
)
"""The modules in which calls of ranks meet."""
ROOMS = ("collectives", "drivers/real", "launch/looking", "sim/runtime", "simranks", "workers")
COUNTERS = {
    "drivers/real/stores/embedded_protocol.py: _number": "seals the messages of a store in order",
    "drivers/real/tree/requests.py: _calls": "names requests between chip workers",
    "drivers/real/worker/call_ring.py: numbers": "runs without rankwise; a test compares it",
    "sim/runtime/collective_calls.py: _begun": "counts the ranks of one collective, for races",
    "simranks/world/collective_groups.py: calls": "counts the calls of a run, for its report",
    "simranks/world/scheduler.py: _numbers": "names threads",
    "simranks/world/rank_events.py: operations": "labels what is recorded for a comparison",
}
"""What counts calls beside the matcher, and why."""
NAMES_OF_COUNTERS = ("begun", "calls", "number", "numbers", "operations", "posted")
RULES = (
    "agree", "behind", "digest_of", "ends_meet", "missing", "missing_peer", "next_number",
    "order_break", "parties",
)  # fmt: skip
CHECKSUMS_OF_OTHER_THINGS = {"simranks/torch/in_flight.py": "the values of a tensor"}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_transport_takes_its_rules_from_the_matcher(name: str) -> None:
    module = import_module(f"rankwise.{name}")

    taken = [each for each in matching.__all__ if each in vars(module)]

    assert {"GroupMessages", "Matcher", "Match", "MemberCalls", *RULES} & set(taken)
    assert all(getattr(module, each) is getattr(matching, each) for each in taken)


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("matcher", {"agree", "missing", "next_number", "order_break"}),
        ("messages", {"ends_meet", "next_number"}),
    ],
)
def test_the_classes_of_the_matcher_decide_by_the_functions_that_transports_call(
    name: str, rules: set[str]
) -> None:
    tree = ast.parse((SOURCE / f"core/matching/{name}.py").read_text())

    called = {
        node.func.id
        for each in tree.body
        if isinstance(each, ast.ClassDef)
        for node in ast.walk(each)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert rules <= called
    assert all(
        vars(import_module(f"rankwise.core.matching.{name}"))[each] is getattr(matching, each)
        for each in rules
    )


def test_no_module_of_a_transport_has_a_rule_of_its_own() -> None:
    own = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in modules()
        for name in own_rules(ast.parse(path.read_text()))
    }

    assert own == set()


def own_rules(tree: ast.Module) -> Iterator[str]:
    """Lists of missing members, comparisons of tags, and functions with a rule's name."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Name(id="missing" | "absent" as name)],
                value=ast.ListComp(
                    generators=[ast.comprehension(ifs=[ast.Compare(ops=[ast.NotIn()])])]
                ),
            ):
                yield name
            case ast.Compare(left=ast.Attribute(attr="tag"), ops=[ast.Eq() | ast.NotEq()]):
                yield "tag"  # compared with that of another message
            case _:
                pass
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name in RULES:
            yield statement.name


def test_a_rule_of_a_modules_own_is_found() -> None:
    tree = ast.parse(
        "def parties(): ...\nabsent = [rank for rank in members if rank not in come]\n"
        "fits = self.peer == other.rank and self.tag == other.tag"
    )

    assert list(own_rules(tree)) == ["absent", "tag", "parties"]


def test_what_ranks_call_is_compared_by_the_digest_of_its_fields() -> None:
    found = {
        str(path.relative_to(SOURCE))
        for path in modules()
        if "crc32" in set(called_in(ast.parse(path.read_text())))
    }

    assert found == set(CHECKSUMS_OF_OTHER_THINGS)
    assert "crc32" in called_in(ast.parse((SOURCE / "core/matching/call_digest.py").read_text()))


def called_in(tree: ast.AST) -> Iterator[str]:
    """The names of the functions that are called."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                yield name
            case _:
                pass


def test_no_module_of_a_transport_counts_calls_by_itself() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in modules()
        for name in counters(ast.parse(path.read_text()))
    }

    assert found == set(COUNTERS)


def modules() -> Iterator[Path]:
    return (path for room in ROOMS for path in sorted((SOURCE / room).rglob("*.py")))


def counters(tree: ast.AST) -> Iterator[str]:
    """What is counted up by one and has the name of a count of calls."""
    for node in ast.walk(tree):
        match node:
            case ast.AugAssign(target=target, op=ast.Add(), value=ast.Constant(value=1)):
                counted: ast.expr = target
            case ast.Assign(
                targets=[target], value=ast.BinOp(op=ast.Add(), right=ast.Constant(value=1))
            ):
                counted = target
            case ast.Assign(
                targets=[target], value=ast.Call(func=ast.Name(id="count"), args=[_, *_])
            ):
                counted = target
            case _:
                continue
        while isinstance(counted, ast.Subscript):
            counted = counted.value
        if isinstance(counted, ast.Attribute) and counted.attr.strip("_") in NAMES_OF_COUNTERS:
            yield counted.attr


def test_a_counter_of_calls_is_found() -> None:
    tree = ast.parse(
        "self._operations += 1\nself.begun[rank] = self.begun[rank] + 1\nplace += 1\n"
        "self.numbers = count(1)"
    )

    assert list(counters(tree)) == ["_operations", "begun", "numbers"]
