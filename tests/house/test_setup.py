"""tools/setup keeps a virtual environment that works, and replaces one that does not.

Without any package index, so that what is seen is its judgement and not pip's success: it gets as
far as the first thing that it would have to download, and says so.
"""

import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}


def run_setup(
    checkout: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(checkout / "tools" / "setup"), *arguments],
        env={**os.environ, **NO_INDEX, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def copy_checkout(folder: Path) -> Path:
    (folder / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup", folder / "tools")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout, in a folder with a blank in its name, where setup has run without network."""
    folder = copy_checkout(tmp_path_factory.mktemp("a checkout"))
    first = run_setup(folder, "--python", sys.executable, "demo")
    assert "Creating .venv with Python" in first.stderr
    return folder


def test_what_pip_cannot_get_is_one_clear_line_and_a_failure(checkout: Path) -> None:
    done = run_setup(checkout, "demo")

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: pip could not install the package")
    assert "PIP_INDEX_URL" in done.stderr


def test_an_environment_that_works_is_kept_after_a_failed_installation(checkout: Path) -> None:
    marker = checkout / ".venv" / "still-the-same"
    marker.touch()

    done = run_setup(checkout, "demo")

    assert "Creating" not in done.stderr
    assert marker.exists()


def test_ctrl_c_during_an_installation_does_not_blame_the_network(checkout: Path) -> None:
    marker = checkout / ".venv" / "bin" / "python"
    begun = checkout / "begun"
    os.mkfifo(begun)
    # As pip does it: the interrupt is an error like any other.
    marker.rename(marker.with_name("the-true-python"))
    write_command(
        marker,
        'case "$*" in *"-m pip"*)\n'
        '  trap "exit 1" INT; echo > begun; while :; do sleep 1; done;; esac\n'
        'exec "$(dirname "$0")/the-true-python" "$@"',
    )
    try:
        with subprocess.Popen(
            [checkout / "tools" / "setup", "demo"],
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        ) as setup:
            begun.read_text()
            os.killpg(setup.pid, signal.SIGINT)
            _, told = setup.communicate()
    finally:
        marker.with_name("the-true-python").rename(marker)

    assert setup.returncode == 130
    assert told.splitlines()[-1] == "interrupted: .venv is not complete yet, make again goes on"


def interpreter_gone(venv: Path) -> None:
    (venv / "bin" / "python").unlink()


def interpreter_is_no_python(venv: Path) -> None:
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to(shutil.which("true") or "/bin/true")


def configuration_truncated(venv: Path) -> None:
    (venv / "pyvenv.cfg").write_text("")


def python_upgraded(venv: Path) -> None:
    (packages,) = (venv / "lib").iterdir()
    packages.rename(packages.with_name("python3.4"))


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (interpreter_gone, "its interpreter is gone"),
        (interpreter_is_no_python, "its interpreter does nothing"),
        (configuration_truncated, "its pyvenv.cfg is damaged"),
        (python_upgraded, "it has lost pip, or its Python was upgraded"),
    ],
)
def test_a_broken_environment_is_named_and_removed(
    checkout: Path, tmp_path: Path, break_it: Callable[[Path], None], reason: str
) -> None:
    venv, kept, python = checkout / ".venv", tmp_path / "kept", tmp_path / "python"
    shutil.copytree(venv, kept, symlinks=True)
    # To build it takes seconds of a processor: once is enough, see the next test.
    write_command(python, f'case "$*" in "-m venv"*) exit 1;; esac; exec {sys.executable} "$@"')
    break_it(venv)

    done = run_setup(checkout, "--python", str(python), "demo")

    assert f".venv cannot be used ({reason}): building it anew." in done.stderr
    assert "-m venv .venv' failed" in done.stderr
    assert not venv.exists()
    shutil.move(kept, venv)


def test_a_broken_environment_is_built_anew(checkout: Path) -> None:
    venv = checkout / ".venv"
    (venv / "old").touch()
    interpreter_gone(venv)

    done = run_setup(checkout, "--python", sys.executable, "demo")

    assert "building it anew" in done.stderr
    assert not (venv / "old").exists()
    subprocess.run([venv / "bin" / "python", "-c", "import pip"], check=True)


def test_without_a_python_that_is_new_enough_it_says_what_to_install(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path)

    done = run_setup(checkout, "demo", PATH=str(folder_of_commands(tmp_path / "commands")))

    assert done.returncode == 1
    assert "no Python 3.11 or newer found in PATH" in done.stderr.splitlines()[-1]


def test_some_tests_need_no_pytorch(checkout: Path) -> None:
    done = run_setup(checkout, "some-tests")

    assert "PyTorch" not in done.stderr
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    tools = [*groups["test-tools"], *groups["test-runner"]]
    assert [
        each for each in tools if isinstance(each, str) and each.startswith(("torch", "ray"))
    ] == []


@pytest.mark.parametrize("apt_works", [True, False])
def test_root_gets_iproute2_or_is_told_what_to_install(
    checkout: Path, tmp_path: Path, *, apt_works: bool
) -> None:
    commands = folder_of_commands(tmp_path / "commands", "cat", "cksum", "grep", "head", "tail")
    write_command(commands / "id", "echo 0")
    write_command(commands / "apt-get", f'echo "$*" >> {tmp_path}/asked; {apt_works!s}'.lower())

    done = run_setup(checkout, "test", PATH=str(commands))

    assert (tmp_path / "asked").read_text().splitlines()[-1].endswith(" iproute2")
    assert ("to run them: apt-get install iproute2" in done.stderr) is not apt_works
    assert done.stderr.splitlines()[-1].startswith("error: pip could not install the package")


def folder_of_commands(folder: Path, *names: str) -> Path:
    """A PATH that leads to nothing but what tools/setup itself needs, and to these."""
    folder.mkdir()
    for name in ("bash", "dirname", "env", "flock", *names):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


def write_command(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
