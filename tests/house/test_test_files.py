"""pytest imports test files by their base name, so two files of one name are refused."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent.parent


def test_base_names_of_test_files_are_unique() -> None:
    packaged = {path.parent for path in TESTS.rglob("__init__.py")}
    names = Counter(path.name for path in TESTS.rglob("test_*.py") if path.parent not in packaged)

    assert [name for name, count in names.items() if count > 1] == []
