"""Which scripts ranks are forked for without being asked, and what is remembered."""

import os
from pathlib import Path

import pytest

from rankwise.core.gang.vocabulary import GangSpec
from rankwise.drivers.real.hosting.preload import leading_imports
from rankwise.launch.fork_server import with_automatic_start
from rankwise.launch.run import automatic_start
from rankwise.launch.run.automatic_start import decided, recalled, remember, server_settings
from rankwise.launch.run.job import Job, Module, Script, StartMethod

PACKAGES = {"numpy", "click"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def job_of(text: str, folder: Path, **attributes: object) -> Job:
    (folder / "train.py").write_text(text)
    described = {
        "program": Script("train.py"),
        "gang": GangSpec(size=2),
        "run_id": "run",
        "start_method": StartMethod.AUTO,
        **attributes,
    }
    return Job(**described)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "found", "obstacle"),
    [
        ("import numpy", ["numpy"], ""),
        (
            "'doc'\nfrom __future__ import annotations\nimport os, sys\nimport numpy as np",
            ["numpy"],
            "",
        ),
        ("import numpy.random\nfrom click.core import Option", ["numpy.random", "click.core"], ""),
        ("X = 1\ndef f(a, b=2): return g(a)\nimport numpy", ["numpy"], ""),
        ("import os\nos.environ['A'] = '1'\nimport numpy", [], "line 2 does something"),
        ("import numpy\nprint()\nimport click", ["numpy"], "line 2 does something"),
        ("def f(a=print()): ...\nimport numpy", [], "line 1 does something"),
        ("@print\ndef f(): ...\nimport numpy", [], "line 2 does something"),
        ("class C: ...\nimport numpy", [], "line 1 does something"),
        ("import msgspec\nimport numpy", [], "line 1 imports msgspec"),
        ("import numpy, msgspec, click", ["numpy"], "line 1 imports msgspec"),
        ("import own\nimport numpy", [], "line 1 imports own, which is not installed"),
        ("from . import own\nimport numpy", [], "line 1 imports a module of its own package"),
        (
            "try: import click\nexcept ImportError: pass\nimport numpy",
            [],
            "line 1 has imports that may fail",
        ),
        ("if True: import numpy", [], "line 1 does something"),
        ("import numpy\nx =", [], "it is not a Python source file"),
        ("import numpy\0", [], "it is not a Python source file"),
    ],
)
def test_imports_before_anything_else_are_found(text: str, found: list[str], obstacle: str) -> None:
    import sys  # noqa: PLC0415  # of this interpreter

    assert leading_imports(text.encode(), sys.path, PACKAGES) == (found, obstacle)


def test_module_of_the_same_name_beside_the_script_ends_the_imports(folder: Path) -> None:
    import sys  # noqa: PLC0415  # of this interpreter

    (folder / "random.py").touch()

    found, obstacle = leading_imports(b"import random, numpy", [str(folder), *sys.path], PACKAGES)

    assert (found, obstacle) == ([], "line 1 imports random, which is not installed")


def test_quick_imports_may_come_before_a_slow_one_and_need_no_server_alone(folder: Path) -> None:
    both, _ = decided(job_of("import yaml\nimport numpy\n", folder), os.environ)
    alone, line = decided(job_of("import yaml\n", folder), os.environ)

    assert both.preload == ("yaml", "numpy")
    assert alone.preload is None
    assert "it ends, before an import of torch, numpy and the like" in line


def test_script_without_slow_imports_is_not_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(automatic_start, "decided")
    job = job_of("import json  # and not numpy\nprint('import numpy')\n", folder)

    assert with_automatic_start(job, os.environ) == (job, "")


def test_reason_of_an_earlier_run_counts_until_the_script_changes(folder: Path) -> None:
    job, _ = decided(job_of("import numpy\n", folder), os.environ)
    assert job.preload == ("numpy",)

    remember(job, "it reads RANK")

    again, line = decided(job_of("import numpy\n", folder), os.environ)
    changed, _ = decided(job_of("import numpy\nx = 1\n", folder), os.environ)
    assert again.preload is None
    assert line == "each rank starts an interpreter of its own: it reads RANK"
    assert changed.preload == ("numpy",)


def test_old_reasons_are_forgotten(folder: Path) -> None:
    job, _ = decided(job_of("import numpy\n", folder), os.environ)
    remember(job, "it reads RANK")
    (entry,) = (folder / "cache" / "rankwise" / "starts").iterdir()
    assert recalled(entry.name) == "it reads RANK"

    os.utime(entry, (1, 1))

    assert recalled(entry.name) == ""


def test_memory_keeps_the_newest_reasons(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic_start, "_REASONS_MAX", 3)
    for number in range(5):
        job, _ = decided(job_of(f"import numpy\nx = {number}\n", folder), os.environ)
        remember(job, str(number))
        for entry in (folder / "cache" / "rankwise" / "starts").iterdir():
            os.utime(entry, (int(entry.read_text()) + 1,) * 2)

    kept = {entry.read_text() for entry in (folder / "cache" / "rankwise" / "starts").iterdir()}
    assert kept == {"2", "3", "4"}


def test_full_disk_leaves_nothing_half_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = decided(job_of("import numpy\n", folder), os.environ)

    def refuse(_from: str, _to: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    remember(job, "it reads RANK")

    assert list((folder / "cache" / "rankwise" / "starts").iterdir()) == []


def test_server_has_the_environment_of_ranks_without_what_differs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("MINE", "kept")
    job = job_of("import numpy\n", folder, environment={"OMP_NUM_THREADS": "4"})

    environment, watched = server_settings(job)

    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"} <= set(watched)
    assert not environment.keys() & set(watched)
    assert (environment["MINE"], environment["OMP_NUM_THREADS"]) == ("kept", "4")
    assert environment.get("OPENBLAS_NUM_THREADS") == os.environ.get("OPENBLAS_NUM_THREADS")


def test_packages_of_a_module_come_before_it(folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import numpy.random\n")
    (package / "tool.py").write_text("import numpy\n")
    job = job_of("", folder, program=Module("package.tool"))

    assert decided(job, os.environ)[0].preload == ("numpy.random", "numpy")
