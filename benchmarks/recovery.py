"""How long ranks that train are held up by the death of one of them.

    python benchmarks/recovery.py [--repetitions 5] [--quick] [--only warm,cold,machines]

From the SIGKILL of a rank to the end of the first step after it, on all of 8 ranks with a DDP model
on gloo: recovered by `rankwise.recover`, and all started again. Instants are taken with the
machine's monotonic clock by the ranks themselves. Two nodes are two agents on this machine, which
meet in an embedded store. `--only warm` leaves out what imports torch again, which takes longest.

Machines are network namespaces, each with an address of its own: two of four ranks and a spare one,
which meet in an etcd elsewhere. One is lost with all its processes, and no connection is closed.
They need root and an etcd, or are left out.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from measuring import (
    HAS_TORCH,
    PROGRAMS,
    RANKWISE,
    Table,
    arguments,
    describe_machine,
    end_processes,
    environment,
    ratio,
    scratch_directory,
    seconds,
    take_turns,
)

_TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "system" / "cluster")]

from etcd_servers import etcd_cluster, find_etcd  # noqa: E402
from nodes_in_namespaces import may_make_namespaces, network  # noqa: E402
from running import Running, wait_for_any  # noqa: E402

RANKS = 8
PROGRAM = str(PROGRAMS / "recovering.py")
PATIENCE = 120.0
PARTS = ("warm", "cold", "machines")
"""Cold are the ranks that import torch again."""
WARM = ("--start-method", "forkserver", "--preload", "torch,torch._dynamo")


def meeting(nodes: int) -> tuple[str, ...]:
    """How the agents find each other."""
    if nodes == 1:
        return ("--standalone",)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    endpoint = ("--rdzv-backend", "embedded", "--rdzv-endpoint", f"127.0.0.1:{port}")
    return ("--nnodes", str(nodes), "--rdzv-id", "recovery", *endpoint)


def held_up(launcher: Sequence[str], how: str, nodes: int = 1) -> float:
    """Seconds from the death of a rank until all have done a step again."""
    flags = (*meeting(nodes), "--nproc-per-node", str(RANKS // nodes), "--max-restarts", "1")
    with scratch_directory() as directory, (directory / "said").open("w+") as said:
        command = [*launcher, *flags, PROGRAM, str(directory), how]
        agents = [
            subprocess.Popen(command, env=environment(), stdout=said, stderr=said)
            for _ in range(nodes)
        ]
        try:
            codes = [agent.wait(PATIENCE) for agent in agents]
        finally:
            end_processes(agents)
        if any(codes):
            said.seek(0)  # torch prints a stack per broken connection: of no use unless a run fails
            raise SystemExit(f"{said.read()}\n{' '.join(command)} failed")
        last = max(int((directory / f"step.1.{rank}").read_text()) for rank in range(RANKS))
        return (last - int((directory / "killed").read_text())) / 1e9


def held_up_on_machines(library: str, how: str, *, loses_machine: bool) -> float:
    """Seconds from the loss of a rank, or of a machine, until all ranks have done a step again."""
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_directory())
        lan = stack.enter_context(network())
        etcd = stack.enter_context(etcd_cluster(folder, host=lan.address))
        ((host, port),) = etcd.endpoints
        nodes = [lan.add_node() for _ in range(3)]
        words = (
            *("run", "--nnodes", "2", "--nproc-per-node", str(RANKS // 2), "--max-restarts", "1"),
            *("--rdzv-id", "machines", "--rdzv-backend", "etcd"),
            *("--rdzv-endpoint", f"{host}:{port}", *(WARM if library == "torch" else ())),
            *(str(PROGRAMS / "recovering_on_machines.py"), library, how),
        )
        agents = [
            stack.enter_context(node.start(*words, environment={"OMP_NUM_THREADS": "1"}))
            for node in nodes
        ]
        wait_for_any(agents, "is a spare", stream="stderr")
        wait_for_any(agents, "first step", count=RANKS)
        running = [number for number, agent in enumerate(agents) if first_steps(agent)]
        lost = running[-1]
        began = time.monotonic_ns()
        if loses_machine:
            nodes[lost].lose()
        else:
            os.kill(first_steps(agents[lost])[0][0], signal.SIGKILL)
        wait_for_any(agents, "first step", count=2 * RANKS)
        steps = [at for agent in agents for _, at in first_steps(agent)]
        agents[running[0]].signal(signal.SIGTERM)
        agents[running[0]].finish()
        return (max(steps) - began) / 1e9


def first_steps(agent: Running) -> list[tuple[int, int]]:
    """The process and the instant of each call whose first step was done."""
    found = re.findall(r"first step (\d+) (\d+)[.]", agent.stdout)
    return [(int(pid), int(at)) for pid, at in found]


def measure_machines(table: Table, options: argparse.Namespace) -> None:
    for library in ("numpy",) if options.quick else ("numpy", "torch"):
        for loses_machine in (True,) if options.quick else (False, True):
            event = "a machine is lost, a spare takes its place" if loses_machine else "a rank dies"
            measured = take_turns(
                {
                    how: partial(held_up_on_machines, library, how, loses_machine=loses_machine)
                    for how in ("recover", "restart")
                },
                options.repetitions,
            )
            for how, taken in measured.items():
                name = "rankwise.recover" if how == "recover" else "all ranks start again"
                words = f"{name}, {library} on two machines: {event}"
                table.row(words, seconds(taken), ratio(taken, measured["restart"]))


def main() -> None:
    options = arguments(__doc__, repetitions=5, parts=PARTS, quick_parts=("warm", "machines"))
    if not HAS_TORCH:
        raise SystemExit("this benchmark needs torch")
    describe_machine()
    table = Table(
        f"From the kill of a rank to the next step of all {RANKS}",
        ("what", "time", "of a whole restart, torch preloaded"),
        options.json,
    )
    if "machines" in options.only and may_make_namespaces() and find_etcd() is not None:
        measure_machines(table, options)
    if "warm" in options.only or "cold" in options.only:
        measure_nodes(table, options)


def measure_nodes(table: Table, options: argparse.Namespace) -> None:
    warm, cold = (*RANKWISE, "run", *WARM), (*RANKWISE, "run")
    for nodes, place in ((1, ""), (2, " on two nodes")):
        launchers = {
            f"rankwise.recover{place}, torch preloaded": (warm, "recover"),
            f"all ranks start again{place}, torch preloaded": (warm, "restart"),
        }
        if "cold" in options.only:
            launchers[f"all ranks start again{place}"] = (cold, "restart")
        measured = take_turns(
            {name: partial(held_up, *each, nodes) for name, each in launchers.items()},
            options.repetitions,
        )
        for name, taken in measured.items():
            whole = measured[f"all ranks start again{place}, torch preloaded"]
            table.row(name, seconds(taken), ratio(taken, whole))


if __name__ == "__main__":
    main()
