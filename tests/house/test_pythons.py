"""tools/pythons finds the other Pythons of a machine, wherever their owner keeps them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
SYSTEM = Path("/usr/bin/python3")
NEEDED = ("bash", "cat", "cksum", "dirname", "env", "flock", "grep", "head", "mkdir", "rm", "tr")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment is made from the system's Python, if there is one."""
    (tmp_path / "tools").mkdir()
    for name in ("interpreters.sh", "pythons"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(SYSTEM)
    (tmp_path / "commands").mkdir()
    for name in NEEDED:
        (tmp_path / "commands" / name).symlink_to(shutil.which(name) or name)
    return tmp_path


def fake_python(path: Path, version: str) -> None:
    """Answers what it is, and can make no environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {path} {version}\n')
    path.chmod(0o755)


def run_pythons(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(checkout / "tools" / "pythons")],
        env={"PATH": str(checkout / "commands"), "HOME": str(checkout), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not os.access(SYSTEM, os.X_OK), reason="the system has no Python")
def test_pythons_are_found_in_path_and_where_pyenv_keeps_them(checkout: Path) -> None:
    home, root = checkout / ".pyenv", checkout / "elsewhere"
    fake_python(home / "versions" / "3.12.9" / "bin" / "python3.12", "3.12.9")
    fake_python(root / "versions" / "3.13.1" / "bin" / "python3.13", "3.13.1")
    # As pyenv has it: a command that is in PATH, and says that it is not chosen.
    fake_python(checkout / "commands" / "python3.12", "3.12.9")
    (checkout / "commands" / "python3.12").write_text("#!/bin/sh\nexit 127\n")

    by_home = run_pythons(checkout)
    by_variable = run_pythons(checkout, PYENV_ROOT=str(root))

    assert (by_home.returncode, by_variable.returncode) == (1, 1)
    assert "Python (system): it is what has been tested already; skipped." in by_home.stderr
    assert f"the environment of {home}/versions/3.12.9/bin/python3.12" in by_home.stderr
    assert f"the environment of {root}/versions/3.13.1/bin/python3.13" in by_variable.stderr


def test_without_an_environment_it_says_how_to_get_one(checkout: Path) -> None:
    shutil.rmtree(checkout / ".venv")

    done = run_pythons(checkout)

    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "run tools/setup test" in done.stderr
