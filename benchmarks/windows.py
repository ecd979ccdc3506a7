"""Compare windows between processes with gloo and with memcpy, on this machine, in one run.

    python benchmarks/windows.py [--quick] [--ranks 2,4] [--repetitions 5] [--json FILE]

Both sides take turns, so that a noisy neighbour hits both. A figure is the median over the
repetitions of what rank 0 saw as the median over many operations; the ranks meet before each.
gloo runs through torch.distributed on the loop-back interface; without torch it is left out.

one way      half of a ping-pong: 4 KiB put, then signalled, and the same back; gloo's is a send
             and a receive
bare eventfd the same ping-pong with nothing put, no deadline and no watch: what this machine's
             kernel and Python take to wake another process
death        from the kill of a rank to the exception in another that is in a barrier with it
idle CPU     of all ranks together, in cores, while they wait for a signal for a second
"""

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measuring
import numpy as np
from measuring import KIB, MIB, BarePing, Medians, iterations_for, median_of, median_us

from rankwise.base.errors import PeerDied
from rankwise.workers import Member, PeerWatch, WindowRegion, create_domain, plan_domain
from rankwise.workers.domains import DomainSpec

SIZES = {"4 KiB": 4 * KIB, "1 MiB": MIB, "64 MiB": 64 * MIB}
IDLE_S = 1.0


def median_lap_us(lap: Callable[[int], object], count: int) -> float:
    """Median microseconds of half a lap."""
    samples = []
    for number in range(count + 3):
        start = time.perf_counter_ns()
        lap(number)
        samples.append((time.perf_counter_ns() - start) / 2000)
    return statistics.median(samples[3:])


def plan(rank_count: int) -> DomainSpec:
    return plan_domain(
        "bench",
        range(rank_count),
        {"x": (64 * MIB // 4, "f4"), "small": (KIB, "f4")},
        signals=["ping", "pong", "end"],
    )


def be_rank_of_rankwise(member: Member, *, quick: bool) -> Medians:
    many = iterations_for(0, quick=quick)
    results = {"barrier": median_us(member.barrier, member.barrier, many)}
    source = np.ones(KIB, np.float32)

    def lap(number: int) -> None:
        if member.rank == 0:
            member.put("small", source, to=1, signal="ping")
            member.wait("pong", ge=number + 1)
        else:
            member.wait("ping", ge=number + 1)
            member.put("small", source, to=0, signal="pong")

    member.barrier()
    if member.rank < 2:
        results["put of 4 KiB + signal, one way"] = median_lap_us(lap, many)
    member["x"][:] = 0
    for name, size_bytes in SIZES.items():
        part = member["x"][: size_bytes // 4]

        def reduce(part: Any = part) -> None:
            member.all_reduce(part, out=part)

        count = iterations_for(size_bytes, quick=quick)
        results[f"all_reduce {name}, in windows"] = median_us(reduce, member.barrier, count)
        array = np.zeros(size_bytes // 4, np.float32)

        def reduce_array(array: Any = array) -> None:
            member.all_reduce(array, out=array)

        results[f"all_reduce {name}, arrays"] = median_us(reduce_array, member.barrier, count)
    member.barrier()
    if member.rank == 0:
        results |= measure_large_put(member, quick=quick)
    member.barrier()
    return results


def measure_large_put(member: Member, *, quick: bool) -> Medians:
    """A put of 64 MiB and a memcpy of as much between private arrays, in turns."""
    source = np.ones(64 * MIB // 4, np.float32)
    target = np.zeros_like(source)
    puts, copies = [], []
    for _ in range(5 if quick else 15):
        start = time.perf_counter_ns()
        member.put("x", source, to=1)
        middle = time.perf_counter_ns()
        ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)
        puts.append((middle - start) / 1000)
        copies.append((time.perf_counter_ns() - middle) / 1000)
    return {
        "put of 64 MiB": statistics.median(puts[1:]),
        "memcpy of 64 MiB": statistics.median(copies[1:]),
    }


def be_rank_of_gloo(rendezvous_file: str, *, quick: bool) -> Medians:
    import torch  # noqa: PLC0415  # only in this side's ranks
    import torch.distributed as dist  # noqa: PLC0415  # only in this side's ranks

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous_file}", rank=rank, world_size=size
    )
    many = iterations_for(0, quick=quick)
    results = {"barrier": median_us(dist.barrier, dist.barrier, many)}
    source, target = torch.ones(KIB), torch.zeros(KIB)

    def lap(number: int) -> None:
        del number
        if rank == 0:
            dist.send(source, 1)
            dist.recv(target, 1)
        else:
            dist.recv(target, 0)
            dist.send(source, 0)

    dist.barrier()
    if rank < 2:
        results["put of 4 KiB + signal, one way"] = median_lap_us(lap, many)
    for name, size_bytes in SIZES.items():
        tensor = torch.zeros(size_bytes // 4)

        def reduce(tensor: Any = tensor) -> None:
            dist.all_reduce(tensor)

        count = iterations_for(size_bytes, quick=quick)
        figure = median_us(reduce, dist.barrier, count)
        results[f"all_reduce {name}, in windows"] = figure
        results[f"all_reduce {name}, arrays"] = figure
    dist.destroy_process_group()
    return results


@contextlib.contextmanager
def ranks_of(region: WindowRegion, body: Callable[[int], object]) -> Iterator[dict[int, int]]:
    """Fork a process per rank; reap them at the end."""
    pids: dict[int, int] = {}
    for rank in range(region.rank_count):
        pid = os.fork()
        if pid == 0:
            try:
                body(rank)
            except PeerDied:
                os._exit(3)
            except BaseException as error:  # noqa: BLE001  # nothing of the parent's may run here
                print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        pids[rank] = pid
    with PeerWatch(region, pids) as watch:
        try:
            yield pids
            while watch.wait():
                pass
        finally:
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def run_rankwise(rank_count: int, *, quick: bool) -> Medians:
    spec = plan(rank_count)
    reader, writer = os.pipe()
    with create_domain(spec) as region:

        def body(rank: int) -> None:
            with Member.join(region, rank, spec) as member:
                results = be_rank_of_rankwise(member, quick=quick)
            if rank == 0:
                os.write(writer, json.dumps(results).encode())

        with ranks_of(region, body):
            pass
    os.close(writer)
    with os.fdopen(reader) as pipe:
        results: Medians = json.loads(pipe.read())
    return results


def measure_death(rank_count: int) -> float:
    """Milliseconds from the kill of the last rank to the exception in rank 0, in a barrier."""
    spec = plan(rank_count)
    reader, writer = os.pipe()
    with create_domain(spec) as region:

        def body(rank: int) -> None:
            member = Member.join(region, rank, spec)
            member.barrier()
            if rank == rank_count - 1:
                member.signal("end", to=0)
                signal.pause()
            if rank == 0:
                member.wait("end")
                os.write(writer, b"ready")
            try:
                member.barrier()
            finally:
                if rank == 0:
                    os.write(writer, str(time.monotonic_ns()).encode())

        with ranks_of(region, body) as pids:
            os.read(reader, 5)
            killed_at = time.monotonic_ns()
            os.kill(pids[rank_count - 1], signal.SIGKILL)
    raised_at = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    return (raised_at - killed_at) / 1e6


def measure_idle(rank_count: int) -> float:
    """Cores in use while all ranks wait for a signal that nobody gives."""
    spec = plan(rank_count)
    reader, writer = os.pipe()
    with create_domain(spec) as region:

        def body(rank: int) -> None:
            with Member.join(region, rank, spec) as member:
                member.barrier()
                os.write(writer, b".")
                member.wait("end", timeout=60)

        with ranks_of(region, body) as pids:
            waiting = 0
            while waiting < rank_count:
                waiting += len(os.read(reader, rank_count))
            before = cpu_of(pids)
            threading.Event().wait(IDLE_S)
            used = cpu_of(pids) - before
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)
    os.close(reader)
    os.close(writer)
    return used / IDLE_S


def cpu_of(pids: dict[int, int]) -> float:
    """Seconds of CPU that processes have used, from the scheduler's own count."""
    return sum(
        int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9 for pid in pids.values()
    )


def run_gloo(rank_count: int, *, quick: bool) -> Medians:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--gloo", str(Path(directory, "gloo"))]
        command += ["--quick"] if quick else []
        environment = {
            **os.environ,
            "WORLD_SIZE": str(rank_count),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(rank_count)
        ]
        try:
            output, _ = ranks[0].communicate(timeout=300)
            codes = [rank.wait(timeout=60) for rank in ranks]
        finally:
            measuring.end_processes(ranks)
    if any(codes):
        raise SystemExit(f"gloo: ranks ended with exit codes {codes}")
    results: Medians = json.loads(output.splitlines()[-1])
    return results


def measure_bare_one_way(*, quick: bool) -> float:
    """Microseconds until a process that another one has woken runs."""
    ping = BarePing()
    try:
        return median_us(ping.one, lambda: None, iterations_for(0, quick=quick)) / 2
    finally:
        ping.close()


def compare(rank_count: int, repetitions: int, sides: list[str], options: Any) -> None:
    runs: dict[str, list[Medians]] = {side: [] for side in sides}
    deaths, idles, bares = [], [], []
    for _ in range(repetitions):
        runs["rankwise"].append(run_rankwise(rank_count, quick=options.quick))
        deaths.append(measure_death(rank_count))
        idles.append(measure_idle(rank_count))
        bares.append(measure_bare_one_way(quick=options.quick))
        if "gloo" in runs:
            runs["gloo"].append(run_gloo(rank_count, quick=options.quick))
    ours = median_of(runs["rankwise"])
    theirs = median_of(runs["gloo"]) if "gloo" in runs else {}
    table = measuring.Table(
        f"{rank_count} ranks", ["what", "windows", "gloo", "gloo / windows"], options.json
    )
    for name, figure in ours.items():
        peer = theirs.get(name)
        table.row(
            name,
            f"{figure:,.1f} us",
            "-" if peer is None else f"{peer:,.0f} us",
            "-" if peer is None else f"{peer / figure:.1f}",
        )
    speed = ours["memcpy of 64 MiB"] / ours["put of 64 MiB"]
    table.row("a bare eventfd, one way", f"{statistics.median(bares):,.1f} us", "-", "-")
    table.row("put of 64 MiB, of memcpy's speed", f"{speed:.2f}", "-", "-")
    table.row("death of a rank in a barrier", f"{statistics.median(deaths):.1f} ms", "-", "-")
    table.row("idle CPU of all, in cores", f"{statistics.median(idles):.4f}", "-", "-")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repetitions")
    parser.add_argument("--ranks", default="2,4", help="how many, separated by commas")
    parser.add_argument("--repetitions", type=int, default=None, help="default 5, quick 1")
    parser.add_argument("--json", type=Path, help="append every figure to this file, one a line")
    parser.add_argument("--gloo", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gloo:
        print(json.dumps(be_rank_of_gloo(options.gloo, quick=options.quick)))
        return
    measuring.unwind_at_sigterm()
    measuring.describe_machine()
    sides = ["rankwise"] + ["gloo"] * (importlib.util.find_spec("torch") is not None)
    repetitions = options.repetitions or (1 if options.quick else 5)
    for rank_count in map(int, options.ranks.split(",")):
        compare(rank_count, repetitions, sides, options)


if __name__ == "__main__":
    main()
