"""What the ledger of a run over nodes costs and brings: two agents with four ranks each, here.

    python benchmarks/inquiries.py [--repetitions 5] [--quick]

Each agent's CPU time is the kernel's count, per second in the middle of the run, with and without
the ledger; bytes are those of the values that the agents ask the store to take, by their journals.
A program whose calls move asks nothing; in the other one a rank comes a second late to every call.
Then: from a call of torch, on gloo, in which one rank differs, to the end of both agents.
"""

import base64
import json
import os
import re
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from measuring import (
    HAS_TORCH,
    RANKWISE,
    arguments,
    describe_machine,
    end_processes,
    environment,
    scratch_directory,
)

PREAMBLE = """
import sys, time, numpy, rankwise
from rankwise import collectives
rank, x = rankwise.rank(), numpy.ones(1024, numpy.float32)
seconds = int(sys.argv[1])
began_at = time.monotonic()
"""
MOVING = """
while collectives.all_reduce(numpy.float64(time.monotonic() - began_at < seconds))[()] == 8:
    time.sleep(0.005)
"""
LATE = """
for _ in range(seconds):
    time.sleep(rank == 7)
    collectives.all_reduce(x)
"""
DIFFERING = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(1024)
dist.all_reduce(x)
print("differs at", time.time(), flush=True)
dist.broadcast(x, 0) if rank == 7 else dist.all_reduce(x)
"""
PRELOADED = ("--start-method=forkserver", "--preload=torch.distributed")
PATIENCE = 120.0
START_SECONDS, LAST_SECONDS = 3, 1
"""What is left out at both ends of a run."""


@contextmanager
def job(
    program: str, *options: str, words: Sequence[str] = ()
) -> Iterator[tuple[list["subprocess.Popen[str]"], Path]]:
    """Two agents of a job, and the folder with their journals."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    with scratch_directory() as folder:
        path = folder / "program.py"
        path.write_text(program)
        agents = [
            subprocess.Popen(
                [
                    *(*RANKWISE, "run", "--nnodes", "2", "--nproc-per-node", "4"),
                    *("--rdzv-id", "inquiries", "--rdzv-backend", "embedded"),
                    *("--rdzv-endpoint", endpoint, "--log-dir", str(folder / f"node{number}")),
                    *(*options, str(path), *words),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment(),
            )
            for number in range(2)
        ]
        try:
            yield agents, folder
        finally:
            end_processes(agents)


def cpu_seconds(pid: int) -> float:
    """The CPU time that a process has used, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bytes_exchanged(folder: Path) -> tuple[int, int]:
    """How many values about calls the agents have written, and their bytes."""
    sizes = []
    for journal in folder.glob("node*/*/journal.jsonl"):
        for line in journal.read_text().splitlines():
            effect = json.loads(line).get("effect") or {}
            puts = (effect.get("transaction") or {}).get("puts", ())
            sizes += [
                len(base64.b64decode(put["value"]))
                for put in puts
                if put["key"].endswith("shared/inquiry") or "/nodes/books/" in put["key"]
            ]
    return len(sizes), sum(sizes)


def cost(what: str, program: str, seconds: int, *options: str) -> None:
    """Print what a run of that program, of so many seconds, costs its agents."""
    with job(program, *options, words=[str(seconds)]) as (agents, folder):
        time.sleep(START_SECONDS)
        began, began_at = [cpu_seconds(agent.pid) for agent in agents], time.monotonic()
        time.sleep(seconds - START_SECONDS - LAST_SECONDS)
        took = time.monotonic() - began_at
        used = [
            cpu_seconds(agent.pid) - before for agent, before in zip(agents, began, strict=True)
        ]
        codes = [agent.wait(PATIENCE) for agent in agents]
        if any(codes):
            raise SystemExit(f"{what}: the agents ended with {codes}")
        count, total = bytes_exchanged(folder)
    shown = ", ".join(f"{1000 * each / took:.1f}" for each in used)
    print(f"{what}: CPU of the agents {shown} ms/s; {count} values, {total} bytes", flush=True)


def time_to_the_end() -> float:
    """Seconds from a differing call to the end of the last agent."""
    with job(DIFFERING, *PRELOADED) as (agents, _):
        told = "".join(agent.communicate(timeout=PATIENCE)[0] for agent in agents)
        ended_at = time.time()
    return ended_at - max(map(float, re.findall(r"differs at ([\d.]+)", told)))


def main() -> None:
    """Measure all."""
    options = arguments(__doc__, repetitions=5)
    describe_machine()
    seconds = 6 if options.quick else 12
    for what, program in (("moving", MOVING), ("a rank is late", LATE)):
        cost(what, PREAMBLE + program, seconds)
        cost(f"{what}, --no-ledger", PREAMBLE + program, seconds, "--no-ledger")
    if not HAS_TORCH:
        return
    ends = [time_to_the_end() for _ in range(options.repetitions)]
    print(
        f"from a differing call to the end: median {statistics.median(ends):.2f} s, most"
        f" {max(ends):.2f} s"
    )


if __name__ == "__main__":
    main()
