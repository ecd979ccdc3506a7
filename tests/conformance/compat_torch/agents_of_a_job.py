"""Agents in processes of their own, as programs compose them: what the tests of jobs start."""

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rankwise.compat.torch.elastic.agent.server.api import RunResult, WorkerSpec
from rankwise.compat.torch.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from rankwise.compat.torch.elastic.multiprocessing import DefaultLogsSpecs
from rankwise.compat.torch.elastic.multiprocessing.errors import ChildFailedError, record
from rankwise.compat.torch.elastic.rendezvous import RendezvousParameters
from rankwise.compat.torch.elastic.rendezvous.registry import get_rendezvous_handler
from rankwise.compat.torch.launcher import LaunchConfig, elastic_launch

LONG_S = 100.0


class Node(NamedTuple):
    """One agent of a job: what its workers do, and where it meets the others."""

    backend: str
    endpoint: str
    run_id: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    size: int = 1
    role: str = "trainer"
    nodes_min: int = 1
    nodes_max: int = 1
    restarts_max: int = 0
    is_host: bool = True
    patience_s: float = 30


@record
def run_agent(node: Node) -> RunResult:
    """Be the agent; raises ChildFailedError if its workers fail for good."""
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend=node.backend,
            endpoint=node.endpoint,
            run_id=node.run_id,
            min_nodes=node.nodes_min,
            max_nodes=node.nodes_max,
            is_host=node.is_host,
        )
    )
    spec = WorkerSpec(
        role=node.role,
        local_world_size=node.size,
        entrypoint=node.function,
        args=node.args,
        rdzv_handler=handler,
        max_restarts=node.restarts_max,
        monitor_interval=0.01,
    )
    agent = LocalElasticAgent(
        spec, logs_specs=DefaultLogsSpecs(), exit_barrier_timeout=node.patience_s
    )
    try:
        result = agent.run()
    finally:
        handler.shutdown()
    if result.is_failed():
        raise ChildFailedError(spec.get_entrypoint_name(), result.failures)
    return result


def threads_after_agent(node: Node) -> list[str]:
    """Be the agent; return the threads that its run has left, once the last has had time to end."""
    before = set(threading.enumerate())
    run_agent(node)
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(LONG_S)
    return [thread.name for thread in left if thread.is_alive()]


def run_job(nodes: list[Node]) -> list[RunResult]:
    """Run an agent for each node, at the same time; return what became of each."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(nodes), mp_context=context) as pool:
        agents = [pool.submit(run_agent, node) for node in nodes]
        results = [agent.result(LONG_S) for agent in agents]
    return [result for result in results if result is not None]


def places() -> tuple[int, ...]:
    """What a worker is told of its place."""
    names = ("RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    return tuple(int(os.environ[name]) for name in names)


def come_and_wait_unless_told(fifo: str, told: str) -> int:
    """Write a byte into a FIFO and wait to be ended, unless the file `told` is there."""
    if not Path(told).exists():
        with open(fifo, "w") as said:  # noqa: PTH123
            said.write(".")
        threading.Event().wait()
    return int(os.environ["RANK"])


def fail_once_on_rank_1(path: str) -> int:
    """Fail in the first life; the others wait to be ended."""
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0:
        return int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["RANK"] == "1":
        raise LookupError(path)
    threading.Event().wait()
    return -1


def exceed_a_timer() -> None:
    """Take a timer of no length from the agent's server, and wait."""
    from rankwise.compat.torch.elastic import timer  # noqa: PLC0415  # loads torch

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=0):
        threading.Event().wait()


def raise_on_all() -> None:
    """Fail with an exception of this rank's own."""
    raise LookupError(f"rank {os.environ['RANK']} has nothing")


def report_signal_then_wait(path: str) -> None:
    """Write the own pid into a FIFO, and wait."""
    with open(path, "w") as fifo:  # noqa: PTH123
        fifo.write(str(os.getpid()))
    threading.Event().wait()


def launch_and_tell(fifo: str, report: str) -> None:
    """Launch a worker that waits; tell what came of a signal, and what was left of the launch."""
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    config = LaunchConfig(
        1, 1, 1, rdzv_backend="embedded", rdzv_endpoint="localhost:0", run_id="told to stop"
    )
    told: dict[str, Any] = {}
    try:
        elastic_launch(config, report_signal_then_wait)(fifo)
    except Exception as error:  # noqa: BLE001  # its kind is what the test asks for
        told["error"] = type(error).__name__
        told["signal"] = getattr(error, "sigval", None)
    told["handlers_are_back"] = before == {s: signal.getsignal(s) for s in before}
    Path(report).write_text(json.dumps(told))
