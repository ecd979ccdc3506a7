"""How long until N ranks have run: scripts, functions, programs with torch.

    python benchmarks/start_up.py [--repetitions 7] [--quick] [--only PARTS]

Times are of the whole command, its own start and end included; for functions, of the call.
"""

import re
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from measuring import (
    HAS_TORCH,
    PROGRAMS,
    RANKWISE,
    TORCHRUN,
    Table,
    arguments,
    describe_machine,
    environment,
    ratio,
    seconds,
    seconds_of,
    take_turns,
)

NOTHING = str(PROGRAMS / "nothing.py")
ALL_REDUCE = str(PROGRAMS / "torch_all_reduce.py")


def rankwise(count: int, script: str, *flags: str) -> Callable[[], float]:
    command = [*RANKWISE, "run", "--standalone", "--nproc-per-node", str(count), *flags, script]
    return partial(seconds_of, command)


def torchrun(count: int, script: str) -> Callable[[], float]:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(count), script]
    return partial(seconds_of, command)


def popen(count: int, script: str) -> Callable[[], float]:
    return partial(seconds_of, [sys.executable, str(PROGRAMS / "popen.py"), str(count), script])


def function_seconds(how: str, count: int) -> float:
    """What a program that starts N functions says that the call took."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "spawners.py"), how, str(count)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout)


def cpu_and_seconds(command: Sequence[str]) -> tuple[float, float]:
    """CPU time and wall time of a whole command with all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = seconds_of(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def proportional_bytes(command: Sequence[str], count: int) -> int:
    """The memory (PSS) of a command's process tree once all ranks are here."""
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None, "it is a pipe"
        for _ in range(count):
            process.stdout.readline()
        total = sum(map(_pss, _tree(process.pid)))
        process.terminate()
        process.stdout.read()
    return total


def _tree(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
    found = [root]
    for each in found:
        found += [pid for pid, parent in parents.items() if parent == each]
    return found


def _pss(pid: int) -> int:
    with suppress(OSError):
        match = re.search(
            r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE
        )
        return int(match[1]) * 1024 if match else 0
    return 0


def measure_without_flag(options: Any) -> None:
    """Ranks that import torch, as everybody starts them."""
    table = Table(
        "Ranks that import torch and all_reduce over gloo, no option given",
        ("N", "rankwise", "/ torchrun", "subprocess", "torchrun", "one import", "CPU / torchrun",
         "PSS", "PSS / torchrun"),
        options.json,
    )  # fmt: skip
    for count in (4,) if options.quick else (4, 8):
        ours = [*RANKWISE, "run", "--standalone", "--nproc-per-node", str(count)]
        theirs = [*TORCHRUN, "--standalone", "--nproc-per-node", str(count)]
        peers = {
            "auto": [*ours, ALL_REDUCE],
            "subprocess": [*ours, "--start-method", "subprocess", ALL_REDUCE],
            "torchrun": [*theirs, ALL_REDUCE],
            "import": [sys.executable, "-c", "import torch.distributed"],
        }
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
        for _ in range(options.repetitions):
            for name, command in peers.items():
                samples[name].append(cpu_and_seconds(command))
        cpu, wall = (
            {
                name: statistics.median(each[which] for each in taken)
                for name, taken in samples.items()
            }
            for which in (0, 1)
        )
        waits = str(PROGRAMS / "torch_waits.py")
        own_bytes = proportional_bytes([*ours, waits], count)
        torchruns_bytes = proportional_bytes([*theirs, waits], count)
        table.row(
            str(count),
            seconds(wall["auto"]),
            ratio(wall["auto"], wall["torchrun"]),
            seconds(wall["subprocess"]),
            seconds(wall["torchrun"]),
            seconds(wall["import"]),
            ratio(cpu["auto"], cpu["torchrun"]),
            f"{own_bytes / 1e6:.0f} MB",
            ratio(own_bytes, torchruns_bytes),
        )


def measure_scripts(options: Any) -> None:
    """Scripts that do nothing."""
    columns = ("N", "N x Popen", "subprocess", "minus Popen", "fork server", "/ Popen")
    table = Table(
        "Trivial scripts, whole command", (*columns, "torchrun", "/ torchrun"), options.json
    )
    for count in (4, 16) if options.quick else (4, 16, 64, 256):
        peers = {
            "popen": popen(count, NOTHING),
            "subprocess": rankwise(count, NOTHING),
            "forkserver": rankwise(count, NOTHING, "--start-method", "forkserver"),
        }
        if HAS_TORCH and count <= 64:
            peers["torchrun"] = torchrun(count, NOTHING)
        median = take_turns(peers, options.repetitions)
        table.row(
            str(count),
            seconds(median["popen"]),
            seconds(median["subprocess"]),
            f"{(median['subprocess'] - median['popen']) * 1000:+.0f} ms",
            seconds(median["forkserver"]),
            ratio(median["forkserver"], median["popen"]),
            seconds(median.get("torchrun")),
            ratio(median["forkserver"], median.get("torchrun")),
        )


def measure_functions(options: Any) -> None:
    """Functions that do nothing."""
    table = Table(
        "Trivial functions, the call",
        (
            "N",
            "spawn",
            "fork server",
            "torch.multiprocessing.spawn",
            "spawn / torch",
            "warm fork server",
            "N x fork",
            "warm / fork",
        ),
        options.json,
    )
    for count in (4,) if options.quick else (4, 16, 64):
        functions = {
            how: partial(function_seconds, how, count)
            for how in ("spawn", "forkserver", "warm", "fork", *(["torch"] if HAS_TORCH else []))
        }
        # The peer needs a minute at 64: one sample of it is enough.
        median = take_turns(functions, options.repetitions, once=["torch"])
        table.row(
            str(count),
            seconds(median["spawn"]),
            seconds(median["forkserver"]),
            seconds(median.get("torch")),
            ratio(median["spawn"], median.get("torch")),
            seconds(median["warm"]),
            seconds(median["fork"]),
            ratio(median["warm"], median["fork"]),
        )


def measure_preloaded(options: Any) -> None:
    """Many ranks with torch, from a fork server that was asked for."""
    table = Table(
        "16 ranks that import torch and all_reduce over gloo",
        ("fork server, torch preloaded", "torchrun", "ratio", "one import of torch"),
        options.json,
    )
    count = 4 if options.quick else 16
    median = take_turns(
        {
            "forkserver": rankwise(
                count, ALL_REDUCE, "--start-method", "forkserver", "--preload", "torch"
            ),
            "torchrun": torchrun(count, ALL_REDUCE),
            "import": partial(seconds_of, [sys.executable, "-c", "import torch.distributed"]),
        },
        min(options.repetitions, 3),
    )
    table.row(
        seconds(median["forkserver"]),
        seconds(median["torchrun"]),
        ratio(median["forkserver"], median["torchrun"]),
        seconds(median["import"]),
    )


def main() -> None:
    parts = ("scripts", "functions", "torch", "preloaded")
    options = arguments(__doc__, repetitions=7, parts=parts)
    describe_machine()
    measures = dict(
        zip(
            parts,
            (measure_scripts, measure_functions, measure_without_flag, measure_preloaded),
            strict=True,
        )
    )
    for part in options.only:
        if HAS_TORCH or part in ("scripts", "functions"):
            measures[part](options)


if __name__ == "__main__":
    main()
