"""Events per second of the simulator's kernel, with SimPy beside it on the same models.

- **relay**: N processes, each of which waits a while, takes a token from the one before it and
  hands one to the next: a ring pipeline, as collectives are. Delays differ from process to process.
- **hold**: N processes that only let time pass.
- **timers**: the same, with an event for each delay (`yield simulator.timer(delay)`).
- **counter**: N processes that share a resource of N / 10 places: request, hold, release.

An event is one time that a process goes on: both sides do the same number of them. The
peers take turns. Then the same once more with the compiled kernel, which is made for it, where
mypyc and a C compiler are. Targets: 2.5 times SimPy's rate, and 4 times for hold and timers with
compiled parts.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import simpy
from measuring import arguments, environment

from rankwise.sim.kernel import Channel, CreditPool, Simulator
from rankwise.sim.kernel import simulator as event_loop

ROOT = Path(__file__).resolve().parent.parent


def relay_rankwise(count: int, rounds: int) -> tuple[int, int]:
    simulator = Simulator()
    mailboxes = [Channel(simulator) for _ in range(count)]

    def worker(rank: int) -> Generator[Any, Any, None]:
        following, own, delay = mailboxes[(rank + 1) % count], mailboxes[rank], 5 + rank % 7
        for step in range(rounds):
            yield delay
            following.put(step)
            yield own.get()

    for rank in range(count):
        simulator.process(worker(rank))
    simulator.run()
    return simulator.now, 2 * count * rounds


def relay_simpy(count: int, rounds: int) -> tuple[int, int]:
    environment = simpy.Environment()
    mailboxes = [simpy.Store(environment) for _ in range(count)]

    def worker(rank: int) -> Generator[Any, Any, None]:
        following, own, delay = mailboxes[(rank + 1) % count], mailboxes[rank], 5 + rank % 7
        for step in range(rounds):
            yield environment.timeout(delay)
            following.put(step)
            yield own.get()

    for rank in range(count):
        environment.process(worker(rank))
    environment.run()
    return int(environment.now), 2 * count * rounds


def hold_rankwise(count: int, rounds: int) -> tuple[int, int]:
    simulator = Simulator()

    def worker(delay: int) -> Generator[Any, Any, None]:
        for _ in range(rounds):
            yield delay

    for rank in range(count):
        simulator.process(worker(1_000 + rank))
    simulator.run()
    return simulator.now, count * rounds


def timers_rankwise(count: int, rounds: int) -> tuple[int, int]:
    simulator = Simulator()

    def worker(delay: int) -> Generator[Any, Any, None]:
        for _ in range(rounds):
            yield simulator.timer(delay)

    for rank in range(count):
        simulator.process(worker(1_000 + rank))
    simulator.run()
    return simulator.now, count * rounds


def hold_simpy(count: int, rounds: int) -> tuple[int, int]:
    environment = simpy.Environment()

    def worker(delay: int) -> Generator[Any, Any, None]:
        for _ in range(rounds):
            yield environment.timeout(delay)

    for rank in range(count):
        environment.process(worker(1_000 + rank))
    environment.run()
    return int(environment.now), count * rounds


def counter_rankwise(count: int, rounds: int) -> tuple[int, int]:
    simulator = Simulator()
    places = CreditPool(simulator, count // 10)

    def worker(delay: int) -> Generator[Any, Any, None]:
        for _ in range(rounds):
            yield places.spend()
            yield delay
            places.give_back()

    for rank in range(count):
        simulator.process(worker(10 + rank % 7))
    simulator.run()
    return simulator.now, 2 * count * rounds


def counter_simpy(count: int, rounds: int) -> tuple[int, int]:
    environment = simpy.Environment()
    places = simpy.Resource(environment, count // 10)

    def worker(delay: int) -> Generator[Any, Any, None]:
        for _ in range(rounds):
            request = places.request()
            yield request
            yield environment.timeout(delay)
            places.release(request)

    for rank in range(count):
        environment.process(worker(10 + rank % 7))
    environment.run()
    return int(environment.now), 2 * count * rounds


Model = Callable[[int, int], tuple[int, int]]
MODELS: dict[str, tuple[Model, Model]] = {
    "relay": (relay_rankwise, relay_simpy),
    "hold": (hold_rankwise, hold_simpy),
    "timers": (timers_rankwise, hold_simpy),
    "counter": (counter_rankwise, counter_simpy),
}


def events_per_second(model: Model, count: int, rounds: int) -> tuple[float, int]:
    start = time.process_time()
    end, events = model(count, rounds)
    return events / (time.process_time() - start), end


def main() -> None:
    options = arguments(__doc__, repetitions=5)
    rounds = 20 if options.quick else 100
    repetitions = 1 if options.quick else options.repetitions
    is_compiled = not event_loop.__file__.endswith(".py")
    print(f"The kernel is {'compiled' if is_compiled else 'pure Python'}.\n")
    print("| model | processes | rankwise | SimPy | ratio |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, (ours, theirs) in MODELS.items():
        for count in (100, 1_000):
            figures: dict[str, list[float]] = {"rankwise": [], "simpy": []}
            for _ in range(repetitions):
                rate, our_end = events_per_second(ours, count, rounds)
                figures["rankwise"].append(rate)
                rate, their_end = events_per_second(theirs, count, rounds)
                figures["simpy"].append(rate)
                assert our_end == their_end, f"{name}: the two models are not the same"
            fast, slow = (statistics.median(figures[peer]) for peer in ("rankwise", "simpy"))
            print(f"| {name} | {count} | {fast:,.0f}/s | {slow:,.0f}/s | {fast / slow:.2f} |")
            if options.json is not None:
                with options.json.open("a") as out:
                    record: dict[str, object] = {
                        "benchmark": "sim_kernel",
                        "model": name,
                        "processes": count,
                    }
                    record |= {"is_compiled": is_compiled, "events_per_second": figures}
                    out.write(json.dumps(record) + "\n")
    if not is_compiled:
        run_compiled(sys.argv[1:])


def run_compiled(words: list[str]) -> None:
    """Do all of it again with a copy of the package whose kernel is compiled."""
    with tempfile.TemporaryDirectory(prefix="compiled_kernel_") as folder:
        shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True)
        tool = [sys.executable, str(ROOT / "tools" / "compile_kernel.py"), folder]
        made = subprocess.run(tool, capture_output=True, text=True, check=False)
        print()
        if made.returncode:
            print(f"No compiled kernel: {(made.stderr or made.stdout).strip().splitlines()[-1]}")
            return
        again = [sys.executable, __file__, *words]
        subprocess.run(again, env=environment(PYTHONPATH=folder), check=True)


if __name__ == "__main__":
    main()
