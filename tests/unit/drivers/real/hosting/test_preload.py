"""What a fork server may import: certain, installed, and not shadowed."""

import json
import operator
import sys
from pathlib import Path

import numpy as np
import pytest

from rankwise.drivers.real.hosting.preload import modules_to_preload
from rankwise.launch.inside.function_payload import pack_function

STANDARD = [entry for entry in sys.path if entry]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def preload_of(folder: Path, source: str) -> tuple[str, ...]:
    script = folder / "train.py"
    script.write_text(source)
    return modules_to_preload(("script", str(script)), path=STANDARD)


def test_the_imports_at_the_top_of_a_script_count(folder: Path) -> None:
    source = (
        '"""Docs."""\n'
        "from __future__ import annotations\n"
        "import json, numpy.linalg as la\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "import json\n"
    )

    assert preload_of(folder, source) == ("json", "numpy.linalg", "concurrent.futures")


def test_imports_after_a_statement_that_does_something_do_not_count(folder: Path) -> None:
    source = 'import os\nos.environ["OMP_NUM_THREADS"] = "1"\nimport numpy\n'

    assert preload_of(folder, source) == ("os",)


@pytest.mark.parametrize(
    "inert",
    [
        "LIMIT = 3",
        "names: list[str] = ['a']",
        "def main():\n    import csv\n    print()",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import csv",
        "try:\n    import csv\nexcept ImportError:\n    csv = None",
    ],
)
def test_definitions_and_optional_imports_are_stepped_over(folder: Path, inert: str) -> None:
    found = preload_of(folder, f"import json\n{inert}\nimport argparse\n")

    assert "argparse" in found
    assert "csv" not in found


@pytest.mark.parametrize(
    "active",
    ["sys.path.insert(0, '.')", "if x:\n    pass", "@d\ndef f(): ...", "x = f()", "a.b = 1"],
)
def test_everything_else_ends_the_search(folder: Path, active: str) -> None:
    assert preload_of(folder, f"import json\n{active}\nimport argparse\n") == ("json",)


def test_the_users_own_modules_do_not_count(folder: Path) -> None:
    (folder / "model.py").write_text("raise SystemExit('must not be executed')\n")

    assert preload_of(folder, "import model\nimport json\nfrom . import sibling\n") == ("json",)


def test_a_library_that_the_users_folder_shadows_does_not_count(folder: Path) -> None:
    (folder / "json.py").write_text("")
    (folder / "numpy").mkdir()
    (folder / "numpy" / "__init__.py").write_text("")

    assert preload_of(folder, "import json\nimport numpy\nimport argparse\n") == ("argparse",)


def test_a_folder_that_merely_has_a_librarys_name_shadows_nothing(folder: Path) -> None:
    (folder / "numpy").mkdir()

    assert preload_of(folder, "import numpy\n") == ("numpy",)


def test_a_folder_with_a_main_file_is_a_script(folder: Path) -> None:
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text("import json\nimport helper\n")
    (folder / "app" / "helper.py").write_text("")

    assert modules_to_preload(("script", "app"), path=STANDARD) == ("json",)


def test_a_module_is_found_without_executing_its_package(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("raise SystemExit('must not be executed')\n")
    (folder / "package" / "train.py").write_text("import json\nimport package.model\n")
    (folder / "package" / "__main__.py").write_text("import argparse\n")

    assert modules_to_preload(("module", "package.train"), path=STANDARD) == ("json",)
    assert modules_to_preload(("module", "package"), path=STANDARD) == ("argparse",)


@pytest.mark.parametrize(
    "program",
    [
        ("script", "nowhere.py"),
        ("script", "."),
        ("script", "broken.py"),
        ("script", "binary.py"),
        ("module", "no.such.module"),
        ("executable", "/bin/true"),
        ("script",),
    ],
)
def test_what_cannot_be_read_is_not_preloaded(folder: Path, program: tuple[str, ...]) -> None:
    (folder / "broken.py").write_text("import json\ndef (:\n")
    (folder / "binary.py").write_bytes(b"import json\n\x00\xff")

    assert modules_to_preload(program) == ()


def test_a_function_needs_the_modules_that_its_pickle_names() -> None:
    payload = pack_function(operator.add, (np.arange(3), 1))

    found = modules_to_preload(("function",), payload)

    assert any(name.startswith("numpy.") for name in found)
    assert "_operator" in found


def test_a_function_that_travels_by_value_needs_the_modules_among_its_globals() -> None:
    payload = pack_function(lambda value: json.dumps(operator.neg(value)), (1,))

    found = modules_to_preload(("function",), payload)

    assert {"json", "operator", "cloudpickle.cloudpickle"} <= set(found)


def test_a_payload_that_is_no_pickle_names_nothing() -> None:
    assert modules_to_preload(("function",), b"nonsense") == ()
