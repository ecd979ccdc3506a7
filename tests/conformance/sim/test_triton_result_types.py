"""Results have the types that Triton's front end gives them, and what it refuses is refused.

`triton_result_types.json` is written by `tools/triton_result_types.py`, which needs the `triton`
package; the test does not. Both run the same kernels.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rankwise.base.errors import RankwiseError
from rankwise.sim.triton import installed
from rankwise.sim.triton import language as tl

TOOL = Path(__file__).parents[3] / "tools" / "triton_result_types.py"
TABLE = json.loads(Path(__file__).with_name("triton_result_types.json").read_text())
EXPRESSIONS: dict[str, dict[str, str]] = TABLE["types"]

REFUSED = "."
FOR_NO_DEVICE = (
    "tl.dot(x, x, y", "tl.atomic_and", "tl.atomic_or", "tl.atomic_xor", "libdevice.rcp64h",
)  # fmt: skip
"""Beginnings of expressions of which some pass Triton's front end and no device has them: products
that are accumulated in integers of 8 bits, or bitwise atomics of floats. All are refused here."""


def loaded_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("triton_result_types", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = loaded_tool()
NAMES: dict[str, int] = tool.expressions(TABLE["libdevice"])
NUMBERS = {expression: at for at, expression in enumerate(NAMES)}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    with installed():
        folder = tmp_path_factory.mktemp("kernels")
        yield tool.module_of(tool.source_of(NAMES), folder, "result_types_here")


def expected(expression: str) -> dict[tuple[str, str], str]:
    """By types of `x` and `y`: the word of the result."""
    others = tool.SHORT if NAMES[expression] == 2 else ("i32",)
    found = dict.fromkeys(((word, other) for word in tool.SHORT for other in others), REFUSED)
    for words, row in EXPRESSIONS[expression].items():
        for word in words.split():
            found |= {(word, other): each for other, each in zip(others, row.split(), strict=True)}
    return found


def ours(kernels: ModuleType, function: Any, types: tuple[str, str]) -> str:
    x, y = (getattr(tl, tool.TYPES[tool.SHORT.index(word)]) for word in types)
    try:
        kernels.run[(1,)](np.ones(8192, np.int8), x, y, function)
    except RankwiseError:
        return REFUSED
    name: str = kernels.FOUND[0].name
    return str(tool.SHORT[[getattr(tl, each).name for each in tool.TYPES].index(name)])


def test_the_table_has_the_expressions_of_the_tool() -> None:
    assert list(NAMES) == list(EXPRESSIONS)


@pytest.mark.parametrize("expression", list(EXPRESSIONS))
def test_an_operation_has_the_result_type_that_triton_gives(
    kernels: ModuleType, expression: str
) -> None:
    function = getattr(kernels, f"e{NUMBERS[expression]}")

    found = {types: ours(kernels, function, types) for types in expected(expression)}

    wrong = {
        f"x {types[0]}, y {types[1]}": f"{found[types]}, not {word}"
        for types, word in expected(expression).items()
        if found[types] != word
        and not (found[types] == REFUSED and expression.startswith(FOR_NO_DEVICE))
    }
    assert wrong == {}
