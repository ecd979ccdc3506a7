"""YAML with comments that say why: PyYAML writes the values, and the notes are put between lines.

A tree of dicts, lists and scalars may have a `Noted` anywhere in place of a value. Its note becomes
a comment above the line on which the key or the item begins. Comments never change what is read
back: they are whole lines, and a test compares.
"""

import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

WIDTH = 100
_NEVER_WRAPPED = 1_000_000
"""PyYAML would fold long words of a command line in unexpected places."""


class Noted(NamedTuple):
    """A value, and why it is what it is."""

    value: Any
    why: str


def document(tree: Any, *, head: str = "") -> str:
    """One document of YAML, keys in the order of the tree, without `---`.

    Args:
        tree: dicts with text keys, lists, scalars, `Noted`.
        head: a comment above everything.
    """
    notes: dict[tuple[str | int, ...], str] = {}
    text = yaml.safe_dump(
        _without_notes(tree, (), notes),
        sort_keys=False,
        default_flow_style=False,
        # PyYAML writes some characters that end lines (U+0085) so that it cannot read them back.
        allow_unicode=False,
        width=_NEVER_WRAPPED,
    )
    above: dict[int, str] = {
        line: notes[path] for path, line in _beginnings(yaml.compose(text), ()) if path in notes
    }
    written = [f"{line}\n" for line in _comment(head, "")]
    for number, line in enumerate(text.splitlines(keepends=True)):
        indent = line[: len(line) - len(line.lstrip(" "))]
        written += (f"{comment}\n" for comment in _comment(above.get(number, ""), indent))
        written.append(line)
    return "".join(written)


def _without_notes(
    tree: Any, path: tuple[str | int, ...], notes: dict[tuple[str | int, ...], str]
) -> Any:
    if isinstance(tree, Noted):
        notes[path] = tree.why
        return _without_notes(tree.value, path, notes)
    if isinstance(tree, dict):
        return {key: _without_notes(each, (*path, key), notes) for key, each in tree.items()}
    if isinstance(tree, list):
        return [_without_notes(each, (*path, index), notes) for index, each in enumerate(tree)]
    return tree


def _beginnings(
    node: yaml.Node | None, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], int]]:
    """Each key and each item, with the line on which it begins."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, key.value)
            yield here, key.start_mark.line
            yield from _beginnings(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item.start_mark.line
            yield from _beginnings(item, (*path, index))


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in text.splitlines():
        yield from textwrap.wrap(
            line,
            max(40, WIDTH - len(indent)),
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
            break_long_words=False,
            break_on_hyphens=False,
        ) or [f"{indent}#"]
