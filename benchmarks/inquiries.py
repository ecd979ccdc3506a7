"""What the ledger of a run over nodes costs and brings: two agents with four ranks each, here.

    python benchmarks/inquiries.py

Each agent's CPU time is the kernel's count, in a second of the middle of the run, with and without
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
import sys
import tempfile
import time
from pathlib import Path

PREAMBLE = """
import sys, time, numpy, rankwise
from rankwise import collectives
rank, x = rankwise.rank(), numpy.ones(1024, numpy.float32)
began_at = time.monotonic()
"""
MOVING = """
while collectives.all_reduce(numpy.float64(time.monotonic() - began_at < 12))[()] == 8:
    time.sleep(0.005)
"""
LATE = """
for _ in range(12):
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
SECONDS = 8
TURNS = 5


def start(program: str, folder: Path, *options: str) -> list["subprocess.Popen[str]"]:
    """Start two agents of a job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    path = folder / "program.py"
    path.write_text(program)
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "rankwise", "run", "--nnodes", "2"),
                *("--nproc-per-node", "4", "--rdzv-id", "inquiries", "--rdzv-backend", "embedded"),
                *("--rdzv-endpoint", endpoint, "--log-dir", str(folder / f"node{number}")),
                *options,
                str(path),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for number in range(2)
    ]


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


def cost(what: str, program: str, *options: str) -> None:
    """Print what a run of that program costs its agents."""
    with tempfile.TemporaryDirectory() as name:
        agents = start(program, Path(name), *options)
        time.sleep(3)
        began, began_at = [cpu_seconds(agent.pid) for agent in agents], time.monotonic()
        time.sleep(SECONDS)
        took = time.monotonic() - began_at
        used = [
            cpu_seconds(agent.pid) - before for agent, before in zip(agents, began, strict=True)
        ]
        codes = [agent.wait() for agent in agents]
        count, total = bytes_exchanged(Path(name))
    shown = ", ".join(f"{1000 * seconds / took:.1f}" for seconds in used)
    print(f"{what}: CPU of the agents {shown} ms/s; {count} values, {total} bytes; codes {codes}")


def time_to_the_end() -> float:
    """Seconds from a differing call to the end of the last agent."""
    with tempfile.TemporaryDirectory() as name:
        agents = start(DIFFERING, Path(name), *PRELOADED)
        told = "".join(agent.communicate()[0] for agent in agents)
        ended_at = time.time()
    return ended_at - max(map(float, re.findall(r"differs at ([\d.]+)", told)))


def main() -> None:
    """Measure all."""
    for what, program in (("moving", MOVING), ("a rank is late", LATE)):
        cost(what, PREAMBLE + program)
        cost(f"{what}, --no-ledger", PREAMBLE + program, "--no-ledger")
    ends = [time_to_the_end() for _ in range(TURNS)]
    print(
        f"from a differing call to the end: median {statistics.median(ends):.2f} s, most"
        f" {max(ends):.2f} s"
    )


if __name__ == "__main__":
    main()
