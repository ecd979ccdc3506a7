"""How long ranks that train are held up by the death of one of them.

    python benchmarks/recovery.py [--repetitions 5]

From the SIGKILL of a rank to the end of the first step after it, on all of 8 ranks with a DDP model
on gloo: recovered by `rankwise.recover`, and all started again. Instants are taken with the
machine's monotonic clock by the ranks themselves. Two nodes are two agents on this machine, which
meet in an embedded store.
"""

import socket
import subprocess
from collections.abc import Sequence
from functools import partial

from measuring import (
    HAS_TORCH,
    PROGRAMS,
    RANKWISE,
    Table,
    arguments,
    describe_machine,
    environment,
    ratio,
    scratch_directory,
    seconds,
    take_turns,
)

RANKS = 8
PROGRAM = str(PROGRAMS / "recovering.py")
PATIENCE = 120.0
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
    with scratch_directory() as directory:
        command = [*launcher, *flags, PROGRAM, str(directory), how]
        agents = [
            subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
            for _ in range(nodes)
        ]
        codes = [agent.wait(PATIENCE) for agent in agents]
        if any(codes):
            raise SystemExit(f"{' '.join(command)} failed")
        last = max(int((directory / f"step.1.{rank}").read_text()) for rank in range(RANKS))
        return (last - int((directory / "killed").read_text())) / 1e9


def main() -> None:
    options = arguments(__doc__, repetitions=5)
    if not HAS_TORCH:
        raise SystemExit("this benchmark needs torch")
    describe_machine()
    warm, cold = (*RANKWISE, "run", *WARM), (*RANKWISE, "run")
    launchers: dict[str, tuple[Sequence[str], str, int]] = {
        "rankwise.recover, torch preloaded": (warm, "recover", 1),
        "all ranks start again, torch preloaded": (warm, "restart", 1),
        "all ranks start again": (cold, "restart", 1),
        "rankwise.recover on two nodes, torch preloaded": (warm, "recover", 2),
        "all ranks start again on two nodes, torch preloaded": (warm, "restart", 2),
        "all ranks start again on two nodes": (cold, "restart", 2),
    }
    measured = take_turns(
        {name: partial(held_up, *each) for name, each in launchers.items()}, options.repetitions
    )
    table = Table(
        f"From the kill of a rank to the next step of all {RANKS}",
        ("what", "time", "of a whole restart's"),
        options.json,
    )
    for name, taken in measured.items():
        table.row(name, seconds(taken), ratio(taken, measured["all ranks start again"]))


if __name__ == "__main__":
    main()
