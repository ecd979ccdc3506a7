"""What users read has a subject: a rank, a node, a process, and not whoever or nobody."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ODD = re.compile(r"\b(whoever|whomever|nobody|befall\w*|lest|shall)\b", re.IGNORECASE)

ARCHAIC = re.compile(r"\b(whoever|whomever|befall\w*|lest|shall)\b", re.IGNORECASE)
"""Also in docstrings, comments and pages, where "nobody" may be the plainest word."""


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """The strings of a module that are no docstrings, with their lines."""
    tree = ast.parse(source)
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.lineno, node.value


def test_odd_words_are_found_in_messages_and_not_in_docstrings() -> None:
    source = '"""Nobody."""\nraise ValueError(f"{x}: nobody answers")\n'

    assert [(line, bool(ODD.search(text))) for line, text in texts_of(source)] == [(2, True)]


def test_messages_and_help_texts_name_their_subjects() -> None:
    odd = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line, text in texts_of(path.read_text())
        if ODD.search(text)
    ]

    assert odd == []


def test_generated_references_name_their_subjects() -> None:
    pages = [ROOT / "docs" / name for name in ("cli.md", "python-reference.md")]

    assert [(page.name, found) for page in pages if (found := ODD.findall(page.read_text()))] == []


def test_no_module_and_no_page_has_archaic_words() -> None:
    modules = sorted((ROOT / "src").rglob("*.py"))
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "adr"]
    odd = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in [*modules, *sorted(pages)]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ARCHAIC.search(line)
    ]

    assert modules
    assert pages
    assert odd == []
