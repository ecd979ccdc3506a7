"""What an automatic fork server finds that its imports have done."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

WATCH = """
import sys
from rankwise.drivers.real.hosting.import_watch import ImportWatch
watch = ImportWatch(frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"}))
import watched
sys.stderr.write(repr(watch.finish()))
sys.stderr.flush()
import os
os._exit(0)
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os; dict(os.environ), os.environ.copy(), os.environ.get('HOME')", ""),
        ("import json, threading, multiprocessing, logging", ""),
        ("import os; os.environ['OTHER'] = '1'", ""),
        ("import os; os.environ.get('RANK')", "read RANK, which differs by rank"),
        ("import os; os.environb.get(b'RANK')", "read RANK, which differs by rank"),
        ("import os; os.getenv('LOCAL_RANK', '0')", "read LOCAL_RANK, which differs by rank"),
        ("import os; 'WORLD_SIZE' in os.environ", "read WORLD_SIZE, which differs by rank"),
        ("import os; os.environ.setdefault('RANK', '0')", "read RANK, which differs by rank"),
        ("import os; os.environ['RANK'] = '7'", "set RANK, which differs by rank"),
        ("import socket; KEPT = socket.socket()", "left a descriptor open (socket:"),
        ("KEPT = open('/dev/null')", "left a descriptor open (/dev/null)"),
        ("import sys; print('loud', file=sys.stderr)", "wrote 'loud' to the console"),
        ("import os; os.write(1, b'loud\\n')", "wrote 'loud' to the console"),
        ("import signal; signal.signal(12, print)", "set a handler of signal 12"),
        ("import faulthandler; faulthandler.enable()", "enabled faulthandler"),
        ("import sys; sys.setprofile(lambda *_: None)", "are traced or profiled"),
        ("import os; os.chdir('/')", "changed the working directory"),
        ("import subprocess; P = subprocess.Popen(['true'])", "started a process"),
        ("import beside", "loaded beside from"),
        (
            """from threading import *
Thread(target=Event().wait, name='bee', daemon=True).start()""",
            "started threads (bee)",
        ),
    ],
)
def test_watch_names_what_forks_would_notice(text: str, reason: str, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "watched.py").write_text(text)
    (tmp_path / "beside.py").write_text("")

    done = subprocess.run(
        [sys.executable, "-c", WATCH],
        env={"PYTHONPATH": f"{packages}:{tmp_path}", "HOME": "/root"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stderr.strip("'\"").startswith(reason)
    assert bool(reason) == (len(done.stderr) > 2)
    assert done.stdout == ""
