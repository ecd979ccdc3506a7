import runpy
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "run_arguments.py"))
TEXTS: dict[Path, str] = TOOL["texts"]()


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_the_typed_texts_of_options_are_current(path: Path) -> None:
    assert path.read_text() == TEXTS[path], "write them anew: python tools/run_arguments.py"


def test_a_text_that_lacks_its_place_is_an_error() -> None:
    with pytest.raises(AssertionError, match="expected once"):
        TOOL["_between"]("a\nb\n", "a\n", "c\n", "text")
