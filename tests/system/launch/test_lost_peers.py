"""Ranks that fail since another one has died: that one is the root cause, whenever it is told."""

import re
from pathlib import Path

import pytest
from etcd_servers import free_ports
from running import run, start, wait_until, write_program

pytestmark = pytest.mark.system

DIES = """
import os, socket
if os.environ["RANK"] == "0":
    listener = socket.create_server(("127.0.0.1", int(os.environ["PORT"])))
    listener.accept()[0].recv(1)
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
while True:
    try:
        peer = socket.create_connection(("127.0.0.1", int(os.environ["PORT"])))
        break
    except ConnectionRefusedError:
        pass
memory = bytearray(64 << 20)  # which the kernel takes down before it tells of the death
peer.close()
{death}
"""
DEATHS = {"os.abort()": "SIGABRT", "os.kill(os.getpid(), 9)": "SIGKILL", "os._exit(3)": "code 3"}


@pytest.mark.parametrize("death", DEATHS)
def test_rank_that_dies_is_the_root_cause_though_its_peer_tells_of_it_first(
    death: str, tmp_path: Path
) -> None:
    script = write_program(tmp_path, DIES.format(death=death))

    done = run("run", "--nproc-per-node=2", script, environment={"PORT": str(free_ports(1)[0])})

    root_cause = done.stderr.partition("root cause: ")[2].partition("\n")[0]
    assert root_cause.startswith("rank 1 "), done.stderr
    assert DEATHS[death] in root_cause


def test_rank_that_a_peer_fails_after_it_is_no_consequence(tmp_path: Path) -> None:
    """As when a download has failed, or torch's watchdog aborts when its peer is gone."""
    script = write_program(
        tmp_path,
        """
import os, time
if os.environ["RANK"] == "0":
    raise TimeoutError("HTTPSConnectionPool(host='data.example'): Read timed out.")
time.sleep(1)
os.abort()
""",
    )

    done = run("run", "--nproc-per-node=2", script)

    assert "root cause: rank 0 failed: TimeoutError" in done.stderr


def test_stopped_rank_is_named_where_another_one_fails(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import os, pathlib, signal, time
place = pathlib.Path(__file__).with_name("pid")
if os.environ["RANK"] == "1":
    place.with_suffix(".new").write_text(str(os.getpid()))
    place.with_suffix(".new").rename(place)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
while not place.exists():
    time.sleep(0.01)
state = pathlib.Path("/proc", place.read_text(), "stat")
while state.read_text().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
raise ValueError("bad")
""",
    )

    done = run("run", "--nproc-per-node=2", script)

    assert "root cause: rank 0 failed: ValueError: bad" in done.stderr
    assert "rank 1 was stopped by a signal (SIGSTOP) or a debugger until then" in done.stderr


def test_stopped_rank_is_named_and_ends_at_once(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1000)
""",
    )

    done = run("run", "--nproc-per-node=2", "--hang-timeout=1s", script)

    assert done.code == 124
    assert "rank 1 is stopped by a signal (SIGSTOP) or a debugger" in done.stderr
    assert "did not end within" not in done.stderr


def test_rank_that_stands_still_on_its_way_to_a_step_goes_on_when_the_run_is_stopped(
    tmp_path: Path,
) -> None:
    script = write_program(
        tmp_path,
        """
import os, signal, time, rankwise
steps = 0
while not rankwise.should_stop():
    steps += 1
    time.sleep(0.01)
    if os.environ["RANK"] == "0" and steps == 1:
        print("goes on", flush=True)
    if os.environ["RANK"] == "1" and steps == 1:
        print(f"pid {os.getpid()} stops", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
print("saved", flush=True)
""",
    )
    with start("run", "--nproc-per-node=2", script) as running:
        running.wait_for("goes on")
        line = running.wait_for("stops")
        state = Path("/proc", re.findall(r"pid (\d+)", line)[0], "stat")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
        running.signal(15)
        done = running.finish()

    assert done.code == 143, done.stderr
    assert done.stdout.count("saved") == 2, done.stderr
