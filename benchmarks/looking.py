"""What it costs an agent to be looked at, by `rankwise top` or by Prometheus.

    python benchmarks/looking.py [--repetitions 3] [--quick]

CPU time, as the kernel counts it for all threads of the agent, over some hundred questions to a run
whose ranks call a collective every 50 ms; what the agent does in that time without them is taken
out. A look each second of so many microseconds is so many millionths of a core.
"""

import re
import statistics
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen

from measuring import PROGRAMS, RANKWISE, Table, arguments, describe_machine, environment

from rankwise.base.units import SECOND, Duration
from rankwise.cli.runs_here import deadline_after
from rankwise.launch.control.client import ask_all, list_runs

PROGRAM = str(PROGRAMS / "stepping.py")
RANKS = (1, 8, 32)
QUESTIONS = 200
PATIENCE = Duration(60 * SECOND)


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    ran_ns = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
    return ran_ns / SECOND


def cost_of(pid: int, question: Callable[[], object]) -> float:
    """Seconds of the agent's CPU for one question, without what it does anyway meanwhile."""
    idle = rate_of(pid)
    began, before = time.monotonic(), cpu_s(pid)
    for _ in range(QUESTIONS):
        question()
    used, lasted = cpu_s(pid) - before, time.monotonic() - began
    return (used - idle * lasted) / QUESTIONS


def rate_of(pid: int) -> float:
    """Seconds of CPU per second, while nobody looks."""
    began, before = time.monotonic(), cpu_s(pid)
    time.sleep(2)
    return (cpu_s(pid) - before) / (time.monotonic() - began)


def measured(ranks: int) -> tuple[float, float, float]:
    """CPU seconds of a status, of a scrape, and of a rank's `should_stop`."""
    command = [*RANKWISE, "run", f"--nproc-per-node={ranks}", "--health-port=0", "--no-prefix"]
    with Popen([*command, PROGRAM], env=environment(), stdout=PIPE, stderr=PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            assert run.stderr is not None
            told = (re.search(r"(http://\S+)/health", line) for line in run.stderr)
            address = next(found[1] for found in told if found)
            steps = statistics.median(float(run.stdout.readline()) for _ in range(ranks))
            (asked,) = (each for each in list_runs() if each.pid == run.pid)
            status = cost_of(run.pid, lambda: ask_all([asked], "status", deadline_after(PATIENCE)))
            scrape = cost_of(run.pid, lambda: urllib.request.urlopen(f"{address}/metrics").read())
            return status, scrape, steps
        finally:
            run.terminate()


def main() -> None:
    options = arguments(__doc__, repetitions=3)
    describe_machine()
    table = Table(
        "CPU time of one look",
        ("ranks", "status (rankwise top)", "GET /metrics", "a rank's should_stop"),
        options.json,
    )
    for ranks in RANKS[:2] if options.quick else RANKS:
        samples = [measured(ranks) for _ in range(options.repetitions)]
        medians = (statistics.median(each) for each in zip(*samples, strict=True))
        table.row(str(ranks), *(f"{value * 1e6:.3g} us" for value in medians))


if __name__ == "__main__":
    main()
