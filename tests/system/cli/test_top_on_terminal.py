"""`rankwise top` on a real terminal, looking at a real run to its end and beyond."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest
from running import PATIENCE_S, RANKWISE, WITHIN_S, run, start, write_program

pytest.importorskip("textual")

pytestmark = pytest.mark.system

STANDS = """
import signal, rankwise
from rankwise import collectives
collectives.barrier()
if rankwise.rank() == 1:
    print("begun on 1", flush=True)
    signal.pause()
collectives.barrier()
"""


class Terminal:
    """A terminal of 80 columns with a command on it."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color"}
        for size in ("COLUMNS", "LINES"):
            environment.pop(size, None)
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        self.written = ""

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.written:
            ready = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"{text!r} has not come\n{self.written}"
            self.written += os.read(self._ours, 1 << 16).decode(errors="replace")

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def finish(self) -> int:
        """Read on, so that its last words find room, until it has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.written += os.read(self._ours, 1 << 16).decode(errors="replace")
                except OSError:
                    break  # nobody holds the other end any more
        code = self.process.wait(PATIENCE_S)
        os.close(self._ours)
        return code


def test_top_follows_a_run_to_its_end_and_keeps_the_last_picture(tmp_path: Path) -> None:
    script = write_program(tmp_path, STANDS)
    with start("run", "--nproc-per-node=3", "--no-prefix", script) as running:
        running.wait_for("begun on 1")
        terminal = Terminal(*RANKWISE, "top", str(running.pid), "--interval=200ms")
        try:
            terminal.wait_for("awaited")
            terminal.wait_for("waiting")
            terminal.wait_for("rankwise why")
            run("stop", "--now", str(running.pid))
            running.finish(WITHIN_S)

            terminal.wait_for("stopped")
            assert terminal.process.poll() is None
            terminal.press("q")
            code = terminal.finish()
        finally:
            terminal.process.kill()

    assert code == 0
    assert "Traceback" not in terminal.written
    assert "RuntimeWarning" not in terminal.written
