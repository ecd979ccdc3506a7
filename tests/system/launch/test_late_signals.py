"""A signal that comes when a run is done does not undo its success."""

import os
import select
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import free_ports
from running import numbers_after, run_program, start, write_program

pytestmark = pytest.mark.system

LAUNCHER = """
import atexit, os, signal, sys
from rankwise.cli.main import main

class Alarmed:
    def __init__(self, stream, moment):
        self.stream, self.moment = stream, moment

    def write(self, text):
        if self.moment in text:
            os.kill(os.getpid(), {signum})
        return self.stream.write(text)

    def flush(self):
        self.stream.flush()

if {moment!r} == "exit":
    atexit.register(os.kill, os.getpid(), {signum})
else:
    sys.stderr = Alarmed(sys.stderr, {moment!r})
main(["run", "--log-dir", *sys.argv[1:], "--tee", "3", "--no-prefix", "--no-python", "true"])
"""
LINGERS = """
import os, signal
from rankwise.cli.main import main
from rankwise.drivers.real.stores.embedded_server import EmbeddedServer

close = EmbeddedServer.close

def close_under_signals(server, linger):
    for signum in {signals}:
        os.kill(os.getpid(), signum)
    close(server, linger)

EmbeddedServer.close = close_under_signals
main(["run", "--nnodes", "1:2", "--rdzv-backend", "embedded", "--rdzv-endpoint",
      "127.0.0.1:{port}", "--rdzv-conf", "last_call_timeout=0.1", "--no-python", "true"])
"""
UNTIL_OPENED = "import os; print('pid', os.getpid(), flush=True); open({fifo!r}).read()"
WITH_PLUGIN = ("--event-log-handler", "console")
SEVERAL_NODES = ("--rdzv-backend", "embedded", "--rdzv-conf", "last_call_timeout=0.1")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["logs are in", "exit"])
@pytest.mark.parametrize("options", [(), WITH_PLUGIN, ("--nnodes", "1:2", *SEVERAL_NODES)])
def test_a_signal_after_the_run_does_not_change_the_exit_code(
    options: tuple[str, ...], moment: str, signum: signal.Signals, tmp_path: Path
) -> None:
    launcher = LAUNCHER.format(moment=moment, signum=int(signum))
    (port,) = free_ports(1)
    endpoint = ("--rdzv-endpoint", f"127.0.0.1:{port}") if "--nnodes" in options else ()

    done = run_program(launcher, tmp_path, str(tmp_path / "logs"), *options, *endpoint)

    assert done.code == 0, done.stderr


@pytest.mark.parametrize("repetition", range(5))
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_signal_that_comes_when_all_ranks_have_ended_comes_too_late(
    nodes: int, repetition: int, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    options = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", *SEVERAL_NODES)
    with ExitStack() as stack:
        agents, ranks = [], {}
        for node in range(nodes):
            fifo = tmp_path / f"fifo{node}"
            os.mkfifo(fifo)
            folder = tmp_path / str(node)
            folder.mkdir()
            program = write_program(folder, UNTIL_OPENED.format(fifo=str(fifo)))
            command = ("run", "--no-prefix", *(options if nodes > 1 else ()), program)
            agents.append(stack.enter_context(start(*command)))
        for node, agent in enumerate(agents):
            (pid,) = numbers_after("pid", agent.wait_for("pid "))
            ranks[os.pidfd_open(pid)] = tmp_path / f"fifo{node}"
        for rank, fifo in ranks.items():
            fifo.write_bytes(b"")
            assert select.select([rank], [], [], 60)[0], "the rank ends"
            os.close(rank)
        agents[repetition % nodes].signal(signal.SIGTERM)

        assert [agent.finish().code for agent in agents] == [0] * nodes


def test_a_node_that_waits_until_others_know_the_end_answers_the_first_signal_to_end(
    tmp_path: Path,
) -> None:
    signals = [int(each) for each in (signal.SIGTSTP, signal.SIGTERM, signal.SIGTERM)]

    done = run_program(LINGERS.format(signals=signals, port=free_ports(1)[0]), tmp_path)

    assert done.code == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "SIG" in line] == [
        "rankwise: SIGTERM: the run is over; this node ends when the others know it"
    ]
