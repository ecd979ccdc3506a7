"""Docstrings stand behind what they describe."""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import rankwise

SOURCE = Path(rankwise.__file__).parent


def texts_behind_texts(tree: ast.AST) -> Iterator[int]:
    """Lines of texts that follow another one: what they described stands elsewhere."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for before, each in pairwise(body) if isinstance(body, list) else ():
            if _is_text(before) and _is_text(each):
                yield each.lineno


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def test_no_docstring_has_lost_what_it_describes() -> None:
    assert list(texts_behind_texts(ast.parse('A = 1\nB = 2\n"""Of B."""\n"""Of A."""'))) == [4]

    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line in texts_behind_texts(ast.parse(path.read_bytes()))
    ]

    assert found == []
