"""Which modules each rank imports for itself, by where they lie and who has put them there."""

from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest

from rankwise.simranks.world.modules import UserModules
from rankwise.simranks.world.places import owner_of

RECORD = "installed-1.0.dist-info/RECORD"


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


def found(name: str, folder: Path) -> ModuleSpec:
    """The spec of a module or of a submodule, without importing anything."""
    package, _, inner = name.partition(".")
    spec = PathFinder.find_spec(package, [str(folder)])
    if spec is not None and inner:
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    assert spec is not None, f"{name} is in {folder}"
    return spec


def is_users(name: str, folder: Path, *packages: str) -> bool:
    users = UserModules(lambda _: None, {}, packages)
    return users.is_users(found(name, folder))


def test_what_an_installer_has_recorded_is_shared_wherever_it_lies(tmp_path: Path) -> None:
    write(tmp_path, "installed/__init__.py", "installed/part.py", "single.py", "train.py", RECORD)
    (tmp_path / RECORD).write_text("installed/__init__.py,sha256=1,0\nsingle.py,sha256=2,0\n")

    assert not is_users("installed", tmp_path)
    assert not is_users("installed.part", tmp_path)
    assert not is_users("single", tmp_path)
    assert is_users("train", tmp_path)
    assert is_users("installed", tmp_path, "installed"), "named by --import-per-rank"


def test_records_without_files_name_packages(tmp_path: Path) -> None:
    write(tmp_path, "installed/__init__.py", "single.py", "installed.egg-info/top_level.txt")
    (tmp_path / "installed.egg-info" / "top_level.txt").write_text("installed\nsingle\n")

    assert not is_users("installed", tmp_path)
    assert not is_users("single", tmp_path)


def test_sources_that_are_installed_from_where_they_lie_are_the_users(tmp_path: Path) -> None:
    records = ("own.egg-info/top_level.txt", "own.egg-info/SOURCES.txt")
    write(tmp_path, "own/__init__.py", *records)
    (tmp_path / records[0]).write_text("own\n")

    assert is_users("own", tmp_path)


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_what_a_process_can_import_once_is_shared_without_any_record(
    package: str, tmp_path: Path
) -> None:
    write(tmp_path, f"{package}/__init__.py", f"{package}/inner/__init__.py", "torchlike.py")

    assert not is_users(package, tmp_path)
    assert not is_users(f"{package}.inner", tmp_path)
    assert is_users("torchlike", tmp_path)


def test_lines_of_installed_packages_are_a_librarys_wherever_they_lie(tmp_path: Path) -> None:
    write(tmp_path, "torch/__init__.py", "torch/inner/__init__.py", "train.py")

    assert not is_users("torch", tmp_path)
    assert is_users("train", tmp_path)

    assert owner_of(str(tmp_path / "torch" / "inner" / "__init__.py")) == "library"
    assert owner_of(str(tmp_path / "train.py")) == "user"
    assert owner_of(str(tmp_path / "torch_train.py")) == "user"
