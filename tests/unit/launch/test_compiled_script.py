"""A script is compiled once for all workers of a node, if that changes nothing that they show."""

import marshal
import os
from pathlib import Path

import pytest

from rankwise.drivers.real.worker.bootstrap import stamp_of_script
from rankwise.launch.run.compiled_script import compiled_script


def test_the_code_is_the_one_that_python_makes_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("answer = 42\n")

    compiled = compiled_script(str(script))

    stamp = stamp_of_script(script.stat())
    assert compiled.startswith(stamp)
    code = marshal.loads(compiled[len(stamp) :])
    assert code == compile("answer = 42\n", str(script), "exec")
    assert code.co_filename == str(script)


def test_a_relative_path_is_made_absolute_as_python_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path)

    compiled = compiled_script("./train.py")

    stamp = stamp_of_script(Path("train.py").stat())
    assert marshal.loads(compiled[len(stamp) :]).co_filename == f"{tmp_path}/./train.py"


@pytest.mark.parametrize(
    "source",
    [b"def\n", b"x = 1 is 1\n", b"\0", b"# coding: klingon\n", b"\xff"],
    ids=["syntax-error", "syntax-warning", "null-byte", "unknown-coding", "not-text"],
)
def test_what_a_compiler_complains_of_is_left_to_the_workers(tmp_path: Path, source: bytes) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(source)

    assert compiled_script(str(script)) == b""


def test_nothing_is_compiled_of_a_script_that_is_missing_or_a_directory(tmp_path: Path) -> None:
    assert compiled_script(str(tmp_path)) == b""
    assert compiled_script(str(tmp_path / "none.py")) == b""


def test_what_may_never_end_is_left_to_the_workers(tmp_path: Path) -> None:
    fifo = tmp_path / "train.py"
    os.mkfifo(fifo)

    assert compiled_script(str(fifo)) == b""
    assert compiled_script("/dev/zero") == b""


def test_a_pipe_without_a_name_is_read_for_all_workers() -> None:
    read, write = os.pipe()
    os.write(write, b"a = 1\n")
    os.close(write)

    assert compiled_script(f"/dev/fd/{read}")
    os.close(read)


def test_a_script_that_was_changed_has_another_stamp(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("a = 1\n")
    before = script.stat()

    script.write_text("b = 2\n")
    os.utime(script, ns=(before.st_atime_ns, before.st_mtime_ns + 1))

    assert not compiled_script(str(script)).startswith(stamp_of_script(before))
