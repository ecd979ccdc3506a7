"""YAML with notes: read back it is what was written, and each note stands above its line."""

from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from rankwise.launch.manifests.noted_yaml import WIDTH, Noted, document

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12),
    st.text("ab: #-\n\xa0\x85\u2028", max_size=6),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), TEXTS)
NOTES = st.text("abc de,:#-", min_size=1, max_size=150).filter(str.strip)
TREES = st.dictionaries(
    TEXTS,
    st.recursive(
        SCALARS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(TEXTS, inner, max_size=3),
            st.builds(Noted, inner, NOTES),
        ),
        max_leaves=12,
    ),
    max_size=4,
)


def plain(tree: Any) -> Any:
    if isinstance(tree, Noted):
        return plain(tree.value)
    if isinstance(tree, dict):
        return {key: plain(each) for key, each in tree.items()}
    if isinstance(tree, list):
        return [plain(each) for each in tree]
    return tree


@given(tree=TREES, head=NOTES)
def test_notes_change_nothing_of_what_is_read_back(tree: dict[str, Any], head: str) -> None:
    assert yaml.safe_load(document(tree, head=head)) == plain(tree)


def test_a_note_stands_above_the_line_that_it_speaks_of() -> None:
    text = document(
        {
            "spec": {
                "replicas": Noted(3, "a majority survives"),
                "rules": [Noted({"action": "Ignore", "why": "x"}, "first"), Noted("b", "second")],
            }
        },
        head="What it is.",
    )

    assert text == (
        "# What it is.\n"
        "spec:\n"
        "  # a majority survives\n"
        "  replicas: 3\n"
        "  rules:\n"
        "  # first\n"
        "  - action: Ignore\n"
        "    why: x\n"
        "  # second\n"
        "  - b\n"
    )


def test_a_long_note_is_wrapped_and_a_long_value_is_not() -> None:
    text = document({"args": Noted(["a b " * 50], "word " * 50)})

    notes = [line for line in text.splitlines() if line.startswith("#")]
    assert len(notes) > 1
    assert all(len(line) <= WIDTH for line in notes)
    assert max(map(len, text.splitlines())) > WIDTH
