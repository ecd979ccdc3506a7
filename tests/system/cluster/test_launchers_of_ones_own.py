"""A launcher that somebody builds from torch's names: its own backend, agents as processes."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from running import Deaths, Running, write_program

pytestmark = pytest.mark.system

KEEP_ALIVE_S = 1
ATTEMPTS = 3
LAUNCHER = f"""
import fcntl
import hashlib
import os
import signal
import sys

from rankwise.compat.torch.elastic.agent.server import WorkerSpec
from rankwise.compat.torch.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from rankwise.compat.torch.elastic.multiprocessing import DefaultLogsSpecs, Std
from rankwise.compat.torch.elastic.rendezvous import RendezvousParameters
from rankwise.compat.torch.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    create_handler,
)


class FileBackend(RendezvousBackend):
    def __init__(self, path):
        self._path = path

    @property
    def name(self):
        return "file"

    def get_state(self):
        with self._locked():
            return self._there()

    def set_state(self, state, token=None):
        with self._locked():
            there = self._there()
            if token != (there and there[1]):
                return there and (*there, False)
            # Whole or not at all: an agent may be killed in the midst of it.
            with open(self._path + ".new", "wb") as file:
                file.write(state)
            os.replace(self._path + ".new", self._path)
            return (*self._there(), True)

    def _locked(self):
        file = open(self._path + ".lock", "ab")
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def _there(self):
        if not os.path.exists(self._path):
            return None
        with open(self._path, "rb") as file:
            state = file.read()
        return state, hashlib.sha256(state).digest()


place, name, worker, *arguments = sys.argv[1:]
handler = create_handler(
    None,
    FileBackend(place),
    RendezvousParameters(
        "file", place, "my-run", 1, 2, local_addr="127.0.0.1", last_call_timeout=3,
        keep_alive_interval={KEEP_ALIVE_S}, keep_alive_max_attempt={ATTEMPTS},
    ),
)
spec = WorkerSpec(
    role=name, local_world_size=2, rdzv_handler=handler, entrypoint=sys.executable,
    args=(worker, name, *arguments), monitor_interval=0.1, max_restarts=0,
)
agent = LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs())
result = agent.run()
handler.shutdown()
print(name, "agent ends", result.state.name, sorted(result.return_values), flush=True)
print("torch" in sys.modules, flush=True)
"""
WORKER = """
import os, sys

env = os.environ
print(sys.argv[1], "rank", env["RANK"], "of", env["WORLD_SIZE"], "pid", os.getpid(), flush=True)
assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
open(sys.argv[2]).close()  # until the test opens the other end
"""


class Bench:
    """Starts agents of one run."""

    def __init__(self, folder: Path) -> None:
        self._launcher = write_program(folder, LAUNCHER, "launcher.py")
        self._worker = write_program(folder, WORKER, "worker.py")
        self._place = folder / "state"
        self._gate = folder / "gate"
        os.mkfifo(self._gate)

    def agent(self, name: str) -> Running:
        words = (self._launcher, self._place, name, self._worker, self._gate)
        return Running(sys.executable, *map(str, words))

    def let_workers_end(self) -> int:
        return os.open(self._gate, os.O_WRONLY)


def ranks(agent: Running, world_size: int) -> list[int]:
    """The ranks of its last round, which had so many."""
    told = re.findall(rf"rank (\d) of {world_size}\b", agent.stdout)
    return sorted(int(rank) for rank in told[-2:])


def worker_pids(agent: Running) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)", agent.stdout)]


def test_agents_with_a_backend_of_their_own_meet_again_when_one_dies(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(bench.agent(name)) for name in ("A", "B"))
        for agent in (first, second):
            agent.wait_for(" of 4 ", count=2)
        assert sorted(ranks(first, 4) + ranks(second, 4)) == [0, 1, 2, 3]

        orphans = Deaths(worker_pids(second))
        second.signal(signal.SIGKILL)
        second.wait_over()
        died_at = time.monotonic()
        first.wait_for(" of 2 ", count=2)
        assert ranks(first, 2) == [0, 1]
        # No sooner than its lease allows, and not much later.
        assert time.monotonic() - died_at > KEEP_ALIVE_S * ATTEMPTS / 2
        assert orphans.survivors(within_s=30) == []

        third = stack.enter_context(bench.agent("C"))
        third.wait_for(" of 4 ", count=2)
        first.wait_for(" of 4 ", count=4)
        assert sorted(ranks(first, 4) + ranks(third, 4)) == [0, 1, 2, 3]
        gate = bench.let_workers_end()
        ends = [agent.finish() for agent in (first, third)]
        os.close(gate)

    for name, end in zip("AC", ends, strict=True):
        assert end.code == 0, end.stderr
        assert re.search(rf"{name} agent ends SUCCEEDED \[\d, \d\]\nFalse$", end.stdout.strip())


def test_what_torchs_nodes_have_left_in_the_place_is_not_read(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "state").write_bytes(b"\x80\x04\x95 a pickle of another program")

    with bench.agent("A") as agent:
        end = agent.finish()

    assert end.code == 1
    assert "RendezvousStateError: the rendezvous backend file holds 31 bytes that rankwise did" in (
        end.stderr.replace("\n", " ")
    )
