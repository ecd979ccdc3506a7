"""The file of `--results`: one owner, whole lines, and nobody else's file touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError
from rankwise.sim.reporting.sweep_table import SweptCase
from rankwise.simranks.run.results_file import ResultsFile, entries_in


def kept(path: Path, *keys: str) -> None:
    with ResultsFile(str(path)) as file:
        for key in keys:
            file.keep(key, SweptCase(point={"n": key}))


def test_what_is_kept_is_there_for_the_next_sweep(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    kept(path, "a", "b")

    with ResultsFile(str(path)) as file:
        assert file.done == {key: SweptCase(point={"n": key}) for key in "ab"}


def test_a_file_cut_at_any_byte_loses_the_torn_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    kept(path, "a", "b")
    whole = path.read_bytes()

    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with ResultsFile(str(path)) as file:
            assert len(file.done) == max(0, whole[:size].count(b"\n") - 1)
        kept(path, "c")
        assert path.read_bytes().endswith(b"}\n")


def test_a_second_sweep_is_refused_while_the_first_one_has_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"

    with ResultsFile(str(path)) as first:
        with pytest.raises(ConfigError, match="is in use by another sweep"):
            ResultsFile(str(path))
        first.keep("a", SweptCase(point={}))
        assert list(entries_in(str(path))) == ["a"]
    kept(path, "b")


@pytest.mark.parametrize("content", ["hello", "hello\n", '{"rankwise": "other"}\n', "\n"])
def test_a_file_of_something_else_is_left_as_it_is(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)

    with pytest.raises(ConfigError, match="is not a file of --results"):
        ResultsFile(str(path))
    assert path.read_text() == content


@pytest.mark.parametrize(
    "line", ["{}", "nonsense", "[]", '{"key": "a", "case": 5}', '{"key": "a"}']
)
def test_a_line_that_is_no_result_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    kept(path, "a")
    with path.open("a") as file:
        file.write(line + "\n")

    with pytest.raises(ConfigError, match="line 3: this is no result"):
        ResultsFile(str(path))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    for path in (tmp_path / "fifo", Path("/dev/full")):
        with pytest.raises(ConfigError, match="is not a regular file"):
            ResultsFile(str(path))
    with pytest.raises(ConfigError, match="there is no directory"):
        ResultsFile(str(tmp_path / "none" / "r.jsonl"))


_FILLS = """
import resource, signal, sys
from rankwise.simranks.run.results_file import ResultsFile
from rankwise.sim.reporting.files import NotWritten
from rankwise.sim.reporting.sweep_table import SweptCase
file = ResultsFile(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
try:
    for number in range(100):
        file.keep(str(number), SweptCase(point={"n": "x" * 30}))
except NotWritten as error:
    print(error)
"""


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"

    done = subprocess.run(
        [sys.executable, "-c", _FILLS, str(path)], capture_output=True, text=True, check=True
    )

    assert "cannot be written: File too large; it has 2 results" in done.stdout
    with ResultsFile(str(path)) as file:
        assert list(file.done) == ["0", "1"]
