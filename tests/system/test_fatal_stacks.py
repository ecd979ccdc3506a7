"""faulthandler's real words, through a real pipe, into the report."""

import os
import subprocess
import sys

import pytest

from rankwise.drivers.real.report_pipe import Ready, ReportPipe
from rankwise.launch.telling.failure_report.stacks import fatal_lines, innermost_frames, read_stacks

pytestmark = pytest.mark.system

PROGRAM = """
import faulthandler, os, signal, sys, threading

fd = int(sys.argv[1])
faulthandler.enable(fd)
faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)
os.write(fd, b'\\x1e{"kind": "ready", "pid": 7}\\n')
bell = threading.Event()
entered = threading.Event()

def idle():
    entered.set()
    bell.wait()

threading.Thread(target=idle, daemon=True).start()
entered.wait()

def innermost():
    os.kill(os.getpid(), signal.SIGUSR1)
    os.write(fd, b'\\x1e{"kind": "err')
    os.kill(os.getpid(), signal.SIGSEGV)

innermost()
"""


def test_the_stacks_of_a_real_program_are_read_even_after_a_record_that_was_cut() -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(writing)], pass_fds=[writing]
    ) as program:
        os.close(writing)
        pipe = ReportPipe()
        reports = []
        while chunk := os.read(reading, 13):
            reports += pipe.feed(chunk)
        reports += pipe.finish()
        os.close(reading)

    assert program.returncode == -11
    assert reports == [Ready(7)]
    on_demand = pipe.take_stacks()
    assert len(read_stacks(on_demand).threads) == 2
    assert innermost_frames(on_demand)[0].endswith(" in innermost")
    fatal = fatal_lines(pipe.fatal_stacks)
    assert fatal[0] == "Fatal Python error: Segmentation fault"
    assert sum(line.endswith(" in innermost") for line in fatal) == 1
    assert any(line.endswith(" in idle") for line in fatal)
