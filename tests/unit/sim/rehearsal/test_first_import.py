"""What stands for a package is installed when a program imports that, and not before."""

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from rankwise.simranks.world.first_import import FirstImport

PACKAGE = "rankwise_no_such_package"


class Installed:
    """Puts a module into the table, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1
        module = ModuleType(PACKAGE)
        module.answer = 42  # type: ignore[attr-defined]
        module.__spec__ = ModuleSpec(PACKAGE, None, is_package=True)
        sys.modules[PACKAGE] = module


@pytest.fixture
def install() -> Iterator[Installed]:
    own_import, finders = builtins.__import__, list(sys.meta_path)
    installed = Installed()
    with FirstImport(PACKAGE, library="library", then=installed):
        yield installed
    assert builtins.__import__ is own_import
    assert sys.meta_path == finders
    sys.modules.pop(PACKAGE, None)


def executed(statement: str, module: str) -> None:
    exec(statement, {"__name__": module})


def test_the_first_import_statement_of_a_program_installs(install: Installed) -> None:
    executed(f"import {PACKAGE}; assert {PACKAGE}.answer == 42", "program")
    executed(f"from {PACKAGE} import answer", "program")

    assert install.times == 1


@pytest.mark.parametrize("way", ["importlib.import_module", "import_module"])
def test_a_program_that_imports_by_a_function_installs_though_the_library_has_the_package(
    install: Installed, way: str
) -> None:
    sys.modules[PACKAGE] = ModuleType(PACKAGE)
    imports = "import importlib; from importlib import import_module"

    executed(f"{imports}; assert not hasattr({way}('{PACKAGE}'), 'answer')", "library.part")
    assert install.times == 0
    executed(f"{imports}; assert {way}('{PACKAGE}').answer == 42", "program")

    assert install.times == 1


def test_imports_of_the_library_do_not_count(install: Installed) -> None:
    with pytest.raises(ModuleNotFoundError):
        executed(f"import {PACKAGE}", "library.part")

    assert install.times == 0


def test_imports_among_the_packages_own_modules_do_not_count(install: Installed) -> None:
    with pytest.raises(ModuleNotFoundError):
        executed(f"import {PACKAGE}", f"{PACKAGE}.knobs")

    assert install.times == 0


def test_what_the_library_has_imported_before_is_not_what_a_program_gets(
    install: Installed,
) -> None:
    real = sys.modules[PACKAGE] = ModuleType(PACKAGE)
    executed(f"import {PACKAGE}", "library")
    assert sys.modules[PACKAGE] is real

    executed(f"import {PACKAGE}; assert {PACKAGE}.answer == 42", "program")


def test_imports_of_other_packages_do_not_count(install: Installed) -> None:
    executed(f"import json, {__name__.partition('.')[0]}", "program")

    assert install.times == 0


@pytest.mark.parametrize(
    "question", [importlib.import_module, importlib.util.find_spec], ids=lambda each: each.__name__
)
def test_other_ways_to_ask_install_too(install: Installed, question: object) -> None:
    assert callable(question)

    found = question(PACKAGE)

    assert install.times == 1
    assert found.__name__ == PACKAGE if isinstance(found, ModuleType) else found.name == PACKAGE
    assert importlib.import_module(PACKAGE).answer == 42
