"""What `--install` puts into somebody's own folders, and the man page."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rankwise.cli.main import invoke


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_installs_itself_on_request(
    shell: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invoke(["completion", shell])
    script = capsys.readouterr().out

    assert invoke(["completion", shell, "--install"]) == 0
    told = capsys.readouterr().out
    (written,) = (path for path in data.rglob("*") if path.is_file())
    assert written.read_text() == script.removesuffix("\n")
    assert told.startswith(f"completion of {shell}: {written}")


def test_what_cannot_be_installed_is_told_in_one_line(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "man").touch()

    assert invoke(["man", "--install"]) == 2

    error = capsys.readouterr().err
    assert "rankwise.1 cannot be written: " in error
    assert error.count("\n") == 1


def test_the_man_page_names_every_command_and_can_be_formatted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    invoke(["man"])
    page = capsys.readouterr().out

    assert "\n.SS rankwise sim bench [OPTIONS] [NAME]\n" in page
    assert "\n.B \\-\\-max\\-restarts" in page
    if shutil.which("groff") is None:
        pytest.skip("there is no groff to format it with")
    formatted = subprocess.run(
        ["groff", "-man", "-Tutf8", "-Kutf8", "-ww"],
        input=page,
        capture_output=True,
        text=True,
        check=True,
    )
    assert formatted.stderr == ""
    assert "Run a program of many ranks" in formatted.stdout
