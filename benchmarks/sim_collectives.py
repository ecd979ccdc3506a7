"""CPU time of a ring all-reduce at message level, timing only: 1 MiB in 4 chunks.

- **rankwise**: `rankwise.sim.ccl.message_timing`.
- **SimPy**: the same model, a process per rank and a store per mailbox. At 1,024 ranks, which take
  it minutes, it does one chunk only (half a minute), and its figure is four times that, unless
  --long is given: chunks follow each other, so neither work nor simulated time changes by it.
- ASTRA-sim, measured apart, took 0.03 s at 64 ranks and 9.6 s at 1,024 for the same system.

All of them must give the same time: SimPy to the picosecond; the last column says by how much ours
differs from ASTRA-sim's.
"""

import statistics
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import simpy
from measuring import Table, arguments, describe_machine, seconds

from rankwise.sim.ccl.message_timing import Dimension, MessageCosts, collective_time
from rankwise.sim.hardware.quantities import Rate

SIZE, CHUNKS = 1 << 20, 4
LATENCY_NS, GIGABYTES = 500.0, 50 * 2**30 / 10**9
ENDPOINT_NS, MEMORY_GIGABYTES = 10.0, 1_600.0
ASTRA_SIM = {64: (0.03, 296_896), 1_024: (9.6, 4_206_616)}
"""CPU seconds, and the simulated time in nanoseconds."""


def by_rankwise(ranks: int) -> int:
    """Simulated picoseconds."""
    ring = Dimension(count=ranks, bandwidth_gbps=GIGABYTES, latency_ns=LATENCY_NS)
    costs = MessageCosts(endpoint_ns=ENDPOINT_NS, memory_gbps=MEMORY_GIGABYTES)
    return collective_time("all_reduce", SIZE, [ring], chunks=CHUNKS, costs=costs).picoseconds


def by_simpy(ranks: int, chunks: int = CHUNKS) -> int:
    """Simulated picoseconds of the first so many chunks."""
    environment = simpy.Environment()
    mailboxes = [simpy.Store(environment) for _ in range(ranks)]
    part = SIZE // CHUNKS // ranks
    transfer = Rate.of_gigabytes_per_second(GIGABYTES).time_for(part) + round(LATENCY_NS * 1_000)
    reduction = Rate.of_gigabytes_per_second(MEMORY_GIGABYTES).time_for(3 * part)
    endpoint = round(ENDPOINT_NS * 1_000)

    def deliver(rank: int) -> Generator[Any, Any, None]:
        yield environment.timeout(transfer)
        mailboxes[(rank + 1) % ranks].put(part)

    def worker(rank: int) -> Generator[Any, Any, None]:
        for _ in range(chunks):
            yield environment.timeout(endpoint)
            for step in range(2 * (ranks - 1)):
                environment.process(deliver(rank))
                yield mailboxes[rank].get()
                yield environment.timeout(endpoint + (reduction if step < ranks - 1 else 0))

    for rank in range(ranks):
        environment.process(worker(rank))
    environment.run()
    return int(environment.now)


def cpu_seconds(model: Callable[..., int], *given: int) -> tuple[float, int]:
    start = time.process_time()
    simulated = model(*given)
    return time.process_time() - start, simulated


def main() -> None:
    is_long = "--long" in sys.argv
    if is_long:
        sys.argv.remove("--long")
    options = arguments(__doc__, repetitions=5)
    describe_machine()
    table = Table(
        "Ring all-reduce, message level, CPU time",
        ["ranks", "rankwise", "SimPy", "/ SimPy", "ASTRA-sim", "/ ASTRA-sim", "off by"],
        options.json,
    )
    for ranks, (their_seconds, their_ns) in ASTRA_SIM.items():
        ours, simpys = [], []
        is_large = ranks > 1_000
        chunks = 1 if is_large and not is_long else CHUNKS
        for repetition in range(options.repetitions):
            took, simulated = cpu_seconds(by_rankwise, ranks)
            ours.append(took)
            if not is_large or (repetition == 0 and not options.quick):
                took, theirs = cpu_seconds(by_simpy, ranks, chunks)
                simpys.append(took * CHUNKS / chunks)
                assert simulated * chunks == theirs * CHUNKS, f"{simulated} is not {theirs}"
        our_seconds = statistics.median(ours)
        simpy_seconds = statistics.median(simpys) if simpys else None
        table.row(
            f"{ranks:,}",
            seconds(our_seconds),
            seconds(simpy_seconds),
            "-" if simpy_seconds is None else f"{our_seconds / simpy_seconds:.4f}",
            seconds(their_seconds),
            f"{our_seconds / their_seconds:.3f}",
            f"{simulated / 1_000 / their_ns - 1:+.2%}",
        )


if __name__ == "__main__":
    main()
