"""Compare collectives over a segment with gloo's, on this machine, in one run.

    python benchmarks/collectives.py [--quick] [--ranks 2,4] [--repetitions 5] [--over tcp]

With `--over tcp`, each of our ranks is a node of its own: nothing goes through shared memory. Both
sides take turns, so that a noisy neighbour hits both. A figure is the median over the
repetitions of what rank 0 saw as the median over many operations; the ranks meet before each.
gloo runs through torch.distributed on the loop-back interface; without torch it is left out.

Rows with `CPU` are the CPU time of rank 0's process, all its threads, for an operation and the
barrier before it. They tell most where others keep the machine busy: gloo has two threads for each
rank, and gets two shares of the processors.
"""

import argparse
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from measuring import (
    KIB,
    MIB,
    WARM_UPS,
    Medians,
    end_processes,
    iterations_for,
    median_of,
    median_us,
    unwind_at_sigterm,
)

from rankwise.drivers.real.cpus import usable_cpu_count
from rankwise.drivers.real.segments import Segment

SIZES = {"4 KiB": 4 * KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "64 MiB": 64 * MIB}


def measure_all(
    make_operation: Callable[[int], Callable[[], object]],
    barrier: Callable[[], object],
    *,
    quick: bool,
) -> Medians:
    results = {"barrier": median_us(barrier, barrier, iterations_for(0, quick=quick))}
    for name, size_bytes in SIZES.items():
        count = iterations_for(size_bytes, quick=quick)
        operation = make_operation(size_bytes)
        begun = time.process_time()
        results[f"all_reduce {name}"] = median_us(operation, barrier, count)
        cpu_us = (time.process_time() - begun) * 1e6
        results[f"all_reduce {name}, CPU"] = cpu_us / (count + WARM_UPS)
    return results


def be_rank_of_rankwise(*, quick: bool) -> Medians:
    import numpy as np  # noqa: PLC0415  # only in this side's ranks

    from rankwise import collectives  # noqa: PLC0415  # only in this side's ranks

    communicator = collectives.default_communicator()

    def make_operation(size_bytes: int) -> Callable[[], object]:
        array = np.zeros(size_bytes // 4, np.float32)
        return lambda: communicator.all_reduce(array, out=array)

    return measure_all(make_operation, communicator.barrier, quick=quick)


def be_rank_of_gloo(rendezvous_file: str, *, quick: bool) -> Medians:
    import torch  # noqa: PLC0415  # only in this side's ranks
    import torch.distributed as dist  # noqa: PLC0415  # only in this side's ranks

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous_file}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )

    def make_operation(size_bytes: int) -> Callable[[], object]:
        tensor = torch.zeros(size_bytes // 4)
        return lambda: dist.all_reduce(tensor)

    results = measure_all(make_operation, dist.barrier, quick=quick)
    dist.destroy_process_group()
    return results


def nodes_of_one_rank(stack: ExitStack, rank_count: int) -> list[dict[str, int]]:
    """For each rank the descriptors that it gets where it is alone on its node, and MASTER_PORT."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=rank_count))
    segments = [stack.enter_context(Segment.create(1)) for _ in range(rank_count)]
    port = listener.getsockname()[1] - 1
    ranks = [{"RANKWISE_SEGMENT_FD": each.fd, "MASTER_PORT": port} for each in segments]
    ranks[0]["RANKWISE_COLLECTIVES_FD"] = listener.fileno()
    return ranks


def run_world(side: str, rank_count: int, *, quick: bool, over_tcp: bool) -> Medians:
    """Run one side's ranks once; what rank 0 measured."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        if over_tcp:
            own = nodes_of_one_rank(stack, rank_count)
        else:
            segment = stack.enter_context(Segment.create(rank_count))
            own = [{"RANKWISE_SEGMENT_FD": segment.fd}] * rank_count
        command = [sys.executable, __file__, "--side", side]
        command += ["--rendezvous-file", str(Path(directory, "gloo"))]
        command += ["--quick"] if quick else []
        environment = {
            **os.environ,
            "WORLD_SIZE": str(rank_count),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks = [
            subprocess.Popen(
                command,
                env={
                    **environment,
                    **({"RANKWISE_COLLECTIVES_KEY": "00"} if over_tcp else {}),
                    **{name: str(value) for name, value in own[rank].items()},
                    "RANK": str(rank),
                    "GROUP_RANK": str(rank),
                    "RANKWISE_LOCAL_RANK": "0",
                    "MASTER_ADDR": "127.0.0.1",
                },
                pass_fds=[value for name, value in own[rank].items() if name.endswith("_FD")],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(rank_count)
        ]
        try:
            output, _ = ranks[0].communicate(timeout=300)
            codes = [rank.wait(timeout=60) for rank in ranks]
        finally:
            end_processes(ranks)
    if any(codes):
        raise SystemExit(f"{side}: ranks ended with exit codes {codes}")
    results: Medians = json.loads(output.splitlines()[-1])
    return results


def print_table(rank_count: int, medians: dict[str, Medians]) -> None:
    print(f"\n{rank_count} ranks\n")
    print("| what | rankwise | gloo | gloo / rankwise |")
    print("| --- | ---: | ---: | ---: |")
    for name, ours in medians["rankwise"].items():
        theirs = medians["gloo"][name] if "gloo" in medians else None
        peer = f"{theirs:,.0f} us | {theirs / ours:.1f}" if theirs is not None else "- | -"
        print(f"| {name} | {ours:,.1f} us | {peer} |", flush=True)


def parse() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repetitions")
    parser.add_argument("--ranks", default="2,4", help="world sizes, separated by commas")
    parser.add_argument("--repetitions", type=int, default=None, help="default 5, quick 1")
    parser.add_argument("--over", choices=["shared memory", "tcp"], default="shared memory")
    parser.add_argument("--side", choices=["rankwise", "gloo"], help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous-file", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.side == "rankwise":
        print(json.dumps(be_rank_of_rankwise(quick=options.quick)))
        return
    if options.side == "gloo":
        print(json.dumps(be_rank_of_gloo(options.rendezvous_file, quick=options.quick)))
        return
    unwind_at_sigterm()
    sides = ["rankwise", "gloo"]
    if importlib.util.find_spec("torch") is None:
        sides.remove("gloo")
        print("gloo is left out: torch is not installed in this environment")
    repetitions = options.repetitions or (1 if options.quick else 5)
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    print(f"{usable_cpu_count()} CPUs, {system}; "
          f"float32 sum in place, medians of {repetitions} run(s)")  # fmt: skip
    for rank_count in map(int, options.ranks.split(",")):
        runs: dict[str, list[Medians]] = {side: [] for side in sides}
        for _ in range(repetitions):
            for side in sides:
                world = run_world(
                    side, rank_count, quick=options.quick, over_tcp=options.over == "tcp"
                )
                runs[side].append(world)
        print_table(rank_count, {side: median_of(results) for side, results in runs.items()})


if __name__ == "__main__":
    main()
