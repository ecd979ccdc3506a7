"""How long ranks that train are held up by the death of one of them.

    python benchmarks/recovery.py [--repetitions 5] [--only warm,cold]

From the SIGKILL of a rank to the end of the first step after it, on all of 8 ranks with a DDP model
on gloo: recovered by `rankwise.recover`, and all started again. Instants are taken with the
machine's monotonic clock by the ranks themselves. Two nodes are two agents on this machine, which
meet in an embedded store. `--only warm` leaves out what imports torch again, which takes longest.
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
PARTS = ("warm", "cold")
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
        codes = [agent.wait(PATIENCE) for agent in agents]
        if any(codes):
            said.seek(0)  # torch prints a stack per broken connection: of no use unless a run fails
            raise SystemExit(f"{said.read()}\n{' '.join(command)} failed")
        last = max(int((directory / f"step.1.{rank}").read_text()) for rank in range(RANKS))
        return (last - int((directory / "killed").read_text())) / 1e9


def main() -> None:
    options = arguments(__doc__, repetitions=5, parts=PARTS)
    if not HAS_TORCH:
        raise SystemExit("this benchmark needs torch")
    describe_machine()
    table = Table(
        f"From the kill of a rank to the next step of all {RANKS}",
        ("what", "time", "of a whole restart, torch preloaded"),
        options.json,
    )
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
