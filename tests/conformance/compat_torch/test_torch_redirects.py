"""Redirection of standard streams: torch's and ours through the same program."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_sides import RANKWISE, TORCH, Load, load_from

# Python and C have a buffer each, which is written whenever it is full, in the middle of a line
# perhaps. So each of them has letters of its own, by which its part of the file is found again.
PROGRAM = """
import ctypes, importlib, subprocess, sys
side, directory = sys.argv[1:]
redirects = importlib.import_module(f"{side}.elastic.multiprocessing.redirects")
libc = redirects.get_libc()

print("python before")
libc.printf(b"c before\\n")
sys.stderr.write("err before\\n")
open(f"{directory}/out", "w").write("what was there before is gone")
with redirects.redirect_stdout(f"{directory}/out"), redirects.redirect_stderr(f"{directory}/err"):
    print("inside", end=",")
    libc.printf(b"INSIDE;")
    subprocess.run(["sh", "-c", "echo 12345; echo child err >&2"])
    sys.stderr.write("err inside\\n")
    for _ in range(50_000):
        libc.printf(b"LINE;")
        print("line", end=",")
print("python after")
libc.printf(b"c after\\n")
try:
    with redirects.redirect("stdout", f"{directory}/failed"):
        print("python failing")
        raise ValueError
except ValueError:
    print("python recovered")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_python_c_and_children_write_to_the_file_until_the_block_ends(
    side: str, tmp_path: Path, unbuffered: str
) -> None:
    if side == TORCH:
        pytest.importorskip("torch")
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, side, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )

    inside = (tmp_path / "out").read_text()
    outside = set(finished.stdout.splitlines())
    assert re.sub("[^a-z,]", "", inside) == "inside," + 50_000 * "line,"
    assert re.sub("[^A-Z;]", "", inside) == "INSIDE;" + 50_000 * "LINE;"
    assert re.sub("[a-z,A-Z;]", "", inside) == "12345\n"
    assert {"python before", "c before", "python after", "c after", "python recovered"} == outside
    assert (tmp_path / "err").read_text().splitlines() == ["child err", "err inside"]
    assert (tmp_path / "failed").read_text() == "python failing\n"
    assert "err before" in finished.stderr


def test_other_streams_are_refused(load: Load, tmp_path: Path) -> None:
    redirects = load("multiprocessing.redirects")

    with pytest.raises(ValueError, match="stdin"), redirects.redirect("stdin", str(tmp_path / "x")):
        pass


def test_a_stream_in_memory_is_redirected_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # torch raises io.UnsupportedOperation: such a stream has no descriptor.
    redirects = load_from(RANKWISE, "multiprocessing.redirects")

    print("before")
    with redirects.redirect_stdout(str(tmp_path / "out")):
        print("inside")
    print("after")

    assert (tmp_path / "out").read_text() == "inside\n"
    assert capsys.readouterr().out == "before\nafter\n"
