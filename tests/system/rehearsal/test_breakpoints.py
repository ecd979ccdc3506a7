"""`breakpoint()` in a simulated rank: pdb on the terminal, and the world stands still."""

import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import PATIENCE_S, RANKWISE, write_program

PROGRAM = """\
import rankwise
from rankwise import collectives

def train(rate):
    collectives.barrier()
    if rankwise.rank() == 1:
        {stop}
    collectives.barrier()
    return rate * 2

print("rank", rankwise.rank(), train(rankwise.rank() + 0.5))
"""


class Terminal:
    """The user's end of a terminal in which a command runs."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.seen = ""

    def wait_for(self, text: str) -> str:
        """What has come up to this text, since the last time."""
        until = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            assert select.select([self._fd], [], [], until - time.monotonic())[0], self.seen
            try:
                self.seen += os.read(self._fd, 4096).decode().replace("\r\n", "\n")
            except OSError:  # the other end is closed
                raise AssertionError(self.seen) from None
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())


Simulated = tuple[Terminal, subprocess.Popen[bytes]]


@contextmanager
def simulated(text: str, folder: Path, *options: str) -> Iterator[Simulated]:
    ours, theirs = pty.openpty()
    command = [
        *RANKWISE, "run", "--on=sim", "--nproc-per-node=3", *options, write_program(folder, text),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder
    ) as process:
        os.close(theirs)
        try:
            yield Terminal(ours), process
        finally:
            process.kill()
            os.close(ours)


@pytest.mark.parametrize("stop", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_pdb_opens_in_the_rank_and_shows_the_others(stop: str, tmp_path: Path) -> None:
    with simulated(PROGRAM.format(stop=stop), tmp_path) as (terminal, process):
        stopped = terminal.wait_for("(rank 1) (Pdb) ")
        terminal.type("p rate")
        value = terminal.wait_for("(rank 1) (Pdb) ")
        terminal.type("ranks")
        ranks = terminal.wait_for("(rank 1) (Pdb) ")
        terminal.type("ranks 0")
        whole = terminal.wait_for("(rank 1) (Pdb) ")
        terminal.type("ranks 7")
        missing = terminal.wait_for("(rank 1) (Pdb) ")
        terminal.type("c")
        terminal.wait_for("[default1]:\x1b[0mrank 1 3.0")  # its prefix has a colour
        assert process.wait(PATIENCE_S) == 0

    assert "program.py(8)train()\n-> collectives.barrier()" in stopped
    assert "1.5" in value
    assert "rank 0 waits for barrier #2" in ranks
    assert "rank 1 is here\n" in ranks
    assert ranks.count('program.py", line 8, in train') == 3
    assert whole.index("line 11, in <module>") < whole.index("line 8, in train")
    assert "threading" not in whole
    assert "there is no rank 7, expected 0 to 2" in missing


def test_ranks_that_may_go_on_are_told_as_such(tmp_path: Path) -> None:
    program = (
        "import rankwise\nrankwise.collectives.barrier()\nif rankwise.rank() == 2: breakpoint()\n"
    )
    with simulated(program, tmp_path) as (terminal, _):
        terminal.wait_for("(rank 2) (Pdb) ")
        terminal.type("ranks")
        ranks = terminal.wait_for("(rank 2) (Pdb) ")

    assert "rank 0 can go on\n" in ranks


def test_who_types_is_no_rank_that_hangs(tmp_path: Path) -> None:
    program = PROGRAM.format(stop="breakpoint()")

    with simulated(program, tmp_path, "--hang-timeout=4s") as (terminal, process):
        terminal.wait_for("(rank 1) (Pdb) ")
        terminal.type("import subprocess; subprocess.run(['sleep', '8.5']).returncode")
        terminal.wait_for("(rank 1) (Pdb) ")
        terminal.type("c")
        assert process.wait(PATIENCE_S) == 0


def test_the_debugger_steps_through_a_wait(tmp_path: Path) -> None:
    with simulated(PROGRAM.format(stop="breakpoint()"), tmp_path) as (terminal, process):
        terminal.wait_for("(rank 1) (Pdb) ")
        terminal.type("next")
        assert "-> return rate * 2" in terminal.wait_for("(rank 1) (Pdb) ")
        terminal.type("c")
        assert process.wait(PATIENCE_S) == 0


def test_who_quits_ends_the_rank(tmp_path: Path) -> None:
    with simulated(PROGRAM.format(stop="breakpoint()"), tmp_path) as (terminal, process):
        terminal.wait_for("(rank 1) (Pdb) ")
        terminal.type("q")
        terminal.wait_for("rank 1 failed: bdb.BdbQuit")
        assert process.wait(PATIENCE_S) == 1
