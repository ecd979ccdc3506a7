"""Compare a tree of chip workers with a pool of processes and with Ray, in one run.

    python benchmarks/chip_workers.py [--quick] [--repetitions 5]

"bare" is a child that answers on an eventfd and does nothing else: what the machine's kernel takes
to wake two processes one after the other.

Peers take turns. Every side is given the same function, which does nothing, and two processes. Ray
takes part where it is installed and starts. What has no peer (idle CPU, deaths, start and end) is
measured alone. Trees are initialised before anything else starts threads, as they must be.
"""

import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from measuring import BarePing, Table, arguments, describe_machine, ratio

from rankwise.base.errors import PeerDied, WorkerDied
from rankwise.workers import DataType, TaskArgs, TensorArgType, Worker, context

try:
    import ray
except ImportError:
    ray = None


def do_nothing(*_: Any) -> None:
    """What every side runs."""


def microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e6:,.1f} us"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}/s"


def times_of(operation: Callable[[], object], count: int) -> list[float]:
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        operation()
        samples.append(time.perf_counter() - start)
    return sorted(samples)


def seconds_of_call(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


SIDES = ("ours, 1 sub", "ours, 2 subs", "bare", "pool", "ray")
"""The columns; that of a side which is not there has dashes."""
RAY_PATIENCE_S = 60.0


class Tree:
    """Our side, with as many sub workers."""

    def __init__(self, sub_count: int, placement: Any = None) -> None:
        self.worker = Worker(level=3, num_sub_workers=sub_count, placement=placement)
        self.number = self.worker.register(do_nothing)
        self.worker.init()

    def one(self) -> None:
        """One task, there and back."""
        self.worker.run(lambda orch, _args, _config: orch.submit_sub(self.number))

    def with_arrays(self, arrays: list[Any]) -> None:
        """One task that is given arrays, there and back."""
        args = TaskArgs()
        for array in arrays:
            args.add_tensor(array, TensorArgType.INOUT)
        self.worker.run(lambda orch, _args, _config: orch.submit_sub(self.number, args))

    def independent(self, count: int) -> None:
        """Tasks that have nothing to do with each other."""
        number = self.number

        def orchestrate(orch: Any, _args: Any, _config: Any) -> None:
            for _ in range(count):
                orch.submit_sub(number)

        self.worker.run(orchestrate)

    def submit_chain(self, orch: Any, count: int) -> None:
        """Tasks that all change the same tensor."""
        args = TaskArgs()
        args.add_tensor(orch.alloc((16,), DataType.FLOAT32), TensorArgType.INOUT)
        for _ in range(count):
            orch.submit_sub(self.number, args)

    def chain(self, count: int) -> None:
        """Run them."""
        self.worker.run(lambda orch, _args, _config: self.submit_chain(orch, count))

    def record(self, count: int) -> Any:
        """Record them."""
        return self.worker.record(lambda orch, _args, _config: self.submit_chain(orch, count))


class Pool:
    """concurrent.futures."""

    def __init__(self) -> None:
        self.executor = ProcessPoolExecutor(2)
        self.one()

    def one(self) -> None:
        """One call, there and back."""
        self.executor.submit(do_nothing).result()

    def with_arrays(self, arrays: list[Any]) -> None:
        """One call with arrays, there and back."""
        self.executor.submit(do_nothing, arrays).result()

    def independent(self, count: int) -> None:
        """Many at once."""
        for future in [self.executor.submit(do_nothing) for _ in range(count)]:
            future.result()

    def chain(self, count: int) -> None:
        """Each when the one before has ended."""
        for _ in range(count):
            self.one()


class RayActors:
    """Two actors."""

    def __init__(self) -> None:
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")

        class Actor:
            def call(self, _: object = None) -> None:
                pass

        self.actors = [ray.remote(Actor).remote() for _ in range(2)]
        ray.get([actor.call.remote() for actor in self.actors], timeout=RAY_PATIENCE_S)

    def one(self) -> None:
        """One call, there and back."""
        ray.get(self.actors[0].call.remote())

    def independent(self, count: int) -> None:
        """Many at once, to both in turn."""
        ray.get([self.actors[number % 2].call.remote() for number in range(count)])

    def chain(self, count: int) -> None:
        """Each takes the result of the one before."""
        last = None
        for _ in range(count):
            last = self.actors[0].call.remote(last)
        ray.get(last)


def ray_if_it_starts() -> RayActors | None:
    """Its side; or nothing, and a line that says why."""
    if ray is None:
        print("\nRay is left out: it is not installed in this environment", flush=True)
        return None
    try:
        return RayActors()
    except Exception as error:  # noqa: BLE001  # Ray raises Exceptions of no class
        ray.shutdown()
        print(f"\nRay is left out: it did not start: {error}", flush=True)
        return None


def compare_latency(sides: dict[str, Any], count: int, json_file: Any) -> None:
    """run() of one no-op task, p50 and p99, idle and beside a process that computes."""
    names = [*SIDES, "pool / ours", "ray / ours"]
    table = Table("One task that does nothing", ["what", *names], json_file)
    for label, burner_count in (("the machine's own load", 0), ("one core busy besides", 1)):
        burners = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(burner_count)
        ]
        try:
            samples: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(5):
                for name, side in sides.items():
                    samples[name] += times_of(side.one, count)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
        for percent in (50, 99):
            found = {name: statistics.quantiles(all_, n=100)[percent - 1]
                     for name, all_ in samples.items()}  # fmt: skip
            ours = found["ours, 2 subs"]
            table.row(
                f"p{percent}, {label}",
                *(microseconds(found.get(name)) for name in SIDES),
                ratio(found["pool"], ours),
                ratio(found["ray"], ours) if "ray" in found else "-",
            )


def compare_placement(tree: Tree, bare: BarePing, count: int, json_file: Any) -> None:
    """run() of one no-op task where the kernel places two processes, and where we do.

    A placed tree keeps this process where it is, so it exists for its own samples only.
    """
    samples: dict[str, list[float]] = {"bare": [], "by the kernel": [], "near": []}
    for _ in range(5):
        samples["bare"] += times_of(bare.one, count)
        samples["by the kernel"] += times_of(tree.one, count)
        near = Tree(1, placement="near")
        samples["near"] += times_of(near.one, count)
        near.worker.close()
    table = Table("One task that does nothing, by placement", ["what", *samples], json_file)
    for percent in (50, 90, 99):
        table.row(
            f"p{percent}",
            *(
                microseconds(statistics.quantiles(all_, n=100)[percent - 1])
                for all_ in samples.values()
            ),
        )


def costs_of_arrays(side: Any, arrays: list[Any], count: int) -> tuple[float, float]:
    """What the first array adds to a task, and each further one; of the quickest tenth."""
    samples: dict[int, list[float]] = {number: [] for number in (0, 1, 5)}
    for _ in range(count):
        for number, found in samples.items():
            found.extend(times_of(lambda n=number: side.with_arrays(arrays[:n]), 1))  # type: ignore[misc]
    quick = {number: sorted(found)[count // 10] for number, found in samples.items()}
    return quick[1] - quick[0], (quick[5] - quick[1]) / 4


def arguments_of_ours(count: int) -> tuple[float, float]:
    """As `costs_of_arrays`, with arrays that a tree shares."""
    tree = Tree(1, placement="near")
    found = costs_of_arrays(tree, [tree.worker.share(16, "f4") for _ in range(5)], count)
    tree.worker.close()
    return found


def compare_rates(sides: dict[str, Any], count: int, repetitions: int, json_file: Any) -> None:
    """Independent tasks and dependent chains per second."""
    names = [name for name in SIDES if name != "bare"]
    table = Table("Tasks per second", ["what", *names, "ours / pool"], json_file)
    for label, method in (("independent", "independent"), ("dependent chain", "chain")):
        found: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repetitions):
            for name, side in sides.items():
                number = count if name.startswith("ours") else max(100, count // 20)
                operation = getattr(side, method)
                found[name].append(
                    number / seconds_of_call(lambda o=operation, n=number: o(n))  # type: ignore[misc]
                )
        medians = {name: statistics.median(values) for name, values in found.items()}
        table.row(
            label,
            *(rate(medians.get(name)) for name in names),
            ratio(medians["ours, 2 subs"], medians["pool"]),
        )
    tree: Tree = sides["ours, 1 sub"]
    graph = tree.record(count)
    graph.replay()
    replay = statistics.median(seconds_of_call(graph.replay) for _ in range(repetitions))
    print(f"\nThe chain of {count} as a recorded graph on one sub worker: {rate(count / replay)}")
    one = tree.record(1)
    one.replay()
    latency = times_of(one.replay, 1000)
    print(f"A recorded graph of one task, p50: {microseconds(latency[len(latency) // 2])}")


def cpu_seconds(pids: list[int]) -> float:
    """CPU time that processes have used."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def descendants() -> list[int]:
    """All processes beneath this one."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8") as file:  # noqa: PTH123
                    parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, front = [], [os.getpid()]
    while front:
        front = [pid for pid, parent in parents.items() if parent in front]
        found += front
    return found


def measure_life(json_file: Any, *, quick: bool) -> None:
    """Start and end, idle CPU, deaths."""
    table = Table("Life", ["what", "ours", "wanted"], json_file)
    starts, ends = [], []
    for _ in range(1 if quick else 5):
        worker = Worker(level=3, num_sub_workers=32)
        starts.append(seconds_of_call(worker.init))
        ends.append(seconds_of_call(worker.close))
    table.row("init(), 32 sub workers", f"{statistics.median(starts) * 1e3:.0f} ms", "300 ms")
    table.row("close(), 32 sub workers", f"{statistics.median(ends) * 1e3:.0f} ms", "80 ms")

    idle_s = 2 if quick else 10
    with Worker(level=3, num_sub_workers=8) as worker:
        worker.init()
        family = descendants()
        before = cpu_seconds(family)
        time.sleep(idle_s)
        used = (cpu_seconds(family) - before) / idle_s
        table.row("idle tree of 8, of one core", f"{used:.1%}", "1 %")

    table.row("child killed in a task: exception after", *deaths(1 if quick else 9))
    table.row("its peer in a barrier raises after", *peer_deaths(1 if quick else 9))
    for state in ("idle", "busy"):
        gone = statistics.median(
            seconds_until_all_are_gone(state) for _ in range(1 if quick else 5)
        )
        table.row(f"root killed, {state}: all gone after", f"{gone * 1e3:.1f} ms", "100 ms")


def deaths(repetitions: int) -> tuple[str, str]:
    with Worker(level=3, num_sub_workers=2) as worker:
        worker.init()
        killed_at = worker.share((1,), "f8")

        def die(_: TaskArgs) -> None:
            killed_at[0] = time.perf_counter()
            os.kill(os.getpid(), signal.SIGKILL)

        number = worker.register(die)
        samples = []
        for _ in range(repetitions):
            try:
                worker.run(lambda orch, _args, _config: orch.submit_sub(number))
            except WorkerDied:
                samples.append(time.perf_counter() - killed_at[0])
            worker.run(lambda orch, _args, _config: orch.submit_sub_group(do_nothing, [None] * 2))
    return f"{statistics.median(samples) * 1e3:.1f} ms", "10 ms"


def peer_deaths(repetitions: int) -> tuple[str, str]:
    with Worker(level=3, num_sub_workers=2) as worker:
        worker.init()
        times = worker.share((2,), "f8")

        def meet_or_die(_: TaskArgs) -> None:
            member = context()["pair"]
            if member.rank == 1:
                member.wait("ready", ge=1, timeout=30)
                times[0] = time.perf_counter()
                os.kill(os.getpid(), signal.SIGKILL)
            member.signal("ready", to=1)
            try:
                member.barrier(timeout=30)
            except PeerDied:
                times[1] = time.perf_counter()

        number = worker.register(meet_or_die)

        def orchestrate(orch: Any, _args: Any, _config: Any) -> None:
            orch.domain("pair", signals=["ready"], subs=True)
            orch.submit_sub_group(number, [None, None], workers=[0, 1])

        samples = []
        for _ in range(repetitions):
            try:
                worker.run(orchestrate)
            except WorkerDied:
                samples.append(float(times[1] - times[0]))
            worker.run(lambda orch, _args, _config: orch.submit_sub_group(do_nothing, [None] * 2))
    return f"{statistics.median(samples) * 1e3:.1f} ms", "10 ms"


ROOT = """
import os, signal, sys
from rankwise.workers import Worker
def busy(args):
    while True: pass
def tell(args): os.write(1, f"{os.getpid()} {os.getppid()} ".encode())
root, inner = Worker(level=4, num_sub_workers=2), Worker(level=3, num_sub_workers=2)
root.add_worker(inner)
def nested(orch, args, config):
    os.write(1, f"{os.getpid()} {os.getppid()} ".encode())
    orch.submit_sub_group(tell, [None, None])
number = root.register(nested)
root.init()
def both(orch, args, config):
    orch.submit_next_level(number)
    orch.submit_sub_group(tell, [None, None])
root.run(both)
os.write(1, b"\\n")
if sys.argv[1] == "idle": signal.pause()
root.run(lambda orch, args, config: orch.submit_sub_group(busy, [None, None]))
"""


def seconds_until_all_are_gone(state: str) -> float:
    root = subprocess.Popen([sys.executable, "-c", ROOT, state], stdout=subprocess.PIPE, text=True)
    assert root.stdout is not None
    pids = {int(pid) for pid in root.stdout.readline().split()}
    pidfds = [os.pidfd_open(pid) for pid in sorted(pids)]
    start = time.perf_counter()
    root.kill()
    for pidfd in pidfds:
        select.select([pidfd], [], [], 30)
    seconds = time.perf_counter() - start
    for pidfd in pidfds:
        os.close(pidfd)
    root.wait()
    root.stdout.close()
    return seconds


def main() -> None:
    options = arguments(__doc__, repetitions=5)
    describe_machine()
    measure_life(options.json, quick=options.quick)
    # Trees first: the peers start threads.
    count = 100 if options.quick else 1000
    ours = arguments_of_ours(count)
    sides: dict[str, Any] = {"ours, 1 sub": Tree(1), "ours, 2 subs": Tree(2), "bare": BarePing()}
    compare_placement(sides["ours, 1 sub"], sides["bare"], count, options.json)
    sides["pool"] = Pool()
    pools = costs_of_arrays(sides["pool"], [np.zeros(16, "f4") for _ in range(5)], count)
    table = Table("What arrays add to a task", ["what", "ours, shared", "pool"], options.json)
    for label, mine, others in zip(("the first", "each further one"), ours, pools, strict=True):
        table.row(label, microseconds(mine), microseconds(others))
    if (rays := ray_if_it_starts()) is not None:
        sides["ray"] = rays
    compare_latency(sides, count, options.json)
    sides.pop("bare").close()
    compare_rates(sides, 5_000 if options.quick else 50_000, options.repetitions, options.json)
    sides["pool"].executor.shutdown()
    for name in ("ours, 1 sub", "ours, 2 subs"):
        sides[name].worker.close()


if __name__ == "__main__":
    main()
