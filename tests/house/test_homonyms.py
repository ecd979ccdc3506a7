"""A name stands for one thing, unless a reason is written down."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import homonyms  # type: ignore[import-not-found]  # noqa: E402  # found by the line above


def package(folder: Path, **modules: str) -> homonyms.Source:
    """A package of these modules; `one__two` is the module `two` in the folder `one`."""
    for name, text in modules.items():
        path = folder / "rankwise" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return homonyms.read(folder / "rankwise")


def test_two_classes_of_one_name_in_one_room_are_found(tmp_path: Path) -> None:
    source = package(tmp_path, room__one="class Row: ...", room__two="x = 1\n\nclass Row: ...")

    places = ("rankwise.room.one:1", "rankwise.room.two:3")
    assert homonyms.homonymous_classes(source) == [homonyms.Homonym("Row", places)]


@pytest.mark.parametrize(
    "statement",
    [
        "import rankwise.there.two",
        "from rankwise.there import two",
        "def late():\n    from rankwise.there.two import Row as Other",
    ],
)
def test_classes_in_rooms_of_which_one_imports_the_other_are_found(
    tmp_path: Path, statement: str
) -> None:
    source = package(
        tmp_path, here__one=f"{statement}\n", here__a="class Row: ...", there__two="class Row: ..."
    )

    assert [each.name for each in homonyms.homonymous_classes(source)] == ["Row"]


def test_classes_that_a_third_room_imports_are_found(tmp_path: Path) -> None:
    source = package(
        tmp_path, here__a="class Row: ...", there__b="class Row: ...",
        third__c="from rankwise.here.a import Row\n",
        third__d="from rankwise.there import Row as Other",
    )  # fmt: skip

    assert [each.name for each in homonyms.homonymous_classes(source)] == ["Row"]


def test_classes_in_rooms_that_are_strangers_are_no_homonyms(tmp_path: Path) -> None:
    source = package(tmp_path, here__one="import os\nclass Row: ...", there__two="class Row: ...")

    assert homonyms.homonymous_classes(source) == []


def test_classes_in_rooms_that_are_strangers_are_counted_apart(tmp_path: Path) -> None:
    source = package(
        tmp_path, here__one="class Row: ...\nclass Line: ...", there__two="class Row: ...",
        here__three="class Line: ...",
    )  # fmt: skip

    places = ("rankwise.here.one:1", "rankwise.there.two:1")
    assert homonyms.distant_classes(source) == [homonyms.Homonym("Row", places)]


def test_a_file_name_counts_from_three_rooms_on_and_a_package_never(tmp_path: Path) -> None:
    rooms = {
        f"{room}__{name}": "" for room in "abc" for name in ("words", "folder__x", "folder__y")
    }
    two = package(tmp_path, a__words="", b__words="", b__c__words="")
    assert [each.name for each in homonyms.homonymous_files(two)] == ["words"]

    found = [each.name for each in homonyms.homonymous_files(package(tmp_path, **rooms))]
    assert "words" in found
    assert "folder" not in found


def test_a_homonym_without_a_reason_and_a_reason_without_a_homonym_are_problems() -> None:
    found = [homonyms.Homonym("Row", ("rankwise.a:1", "rankwise.b:2"))]

    lines = homonyms.problems("class", found, {"Line": "an old reason"}, frozenset({"Row"}))

    assert lines == [
        "class Row: rankwise.a:1, rankwise.b:2",
        "class Line: is no homonym any more, take its reason off the list",
    ]


def test_every_homonym_of_the_package_has_a_reason(capfd: pytest.CaptureFixture[str]) -> None:
    code = homonyms.main()
    assert code == 0, capfd.readouterr().out
