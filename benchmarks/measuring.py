"""What the benchmarks share: peers that take turns, medians, ratios, Markdown tables.

Peers alternate within a repetition, so that whatever else the machine does hits all of them.
Figures of different runs are not comparable; each table carries its own peers.
"""

import argparse
import compileall
import importlib.util
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import rankwise
from rankwise.drivers.real.cpus import usable_cpu_count
from rankwise.drivers.real.hosting.prctl import die_with_parent

Value = TypeVar("Value")
PROGRAMS = Path(__file__).parent / "programs"
HAS_TORCH = importlib.util.find_spec("torch") is not None
RANKWISE = [sys.executable, "-m", "rankwise"]
if (_script := shutil.which("rankwise", path=str(Path(sys.executable).parent))) is not None:
    RANKWISE = [_script]
WARM_UPS = 3
"""How many operations are made before those that are measured."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def arguments(
    description: str | None,
    *,
    repetitions: int,
    parts: Sequence[str] = (),
    quick_parts: Sequence[str] = (),
) -> argparse.Namespace:
    """The options that every benchmark takes, and `--only` for some of several parts."""
    unwind_at_sigterm()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only show that it works: one repetition, small sizes, no peer that takes long",
    )
    parser.add_argument("--json", type=Path, help="append every figure to this file, one a line")
    if parts:
        parser.add_argument(
            "--only", metavar="PARTS", help=f"some of {','.join(parts)} (default: all)"
        )
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 1
    if parts:
        default = quick_parts if options.quick and quick_parts else parts
        options.only = default if options.only is None else options.only.split(",")
        if unknown := [part for part in options.only if part not in parts]:
            parser.error(f"--only is {','.join(unknown)}, expected some of {','.join(parts)}")
    return options


def unwind_at_sigterm() -> None:
    """Let SIGTERM end this benchmark as Ctrl-C does, so that it ends what it has started."""

    def unwind(signum: int, _: object) -> None:
        signal.signal(signum, lambda *_: None)  # `timeout` sends it twice, and one is enough
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, unwind)
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))


def apart(function: Callable[[], Value]) -> Value:
    """What a function gives in a fresh process, which has a heap and a peak of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(function).result()


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for one sample."""
    with tempfile.TemporaryDirectory(prefix="benchmark_") as name:
        yield Path(name)


def output_of_run(*words: str, patience_s: float) -> str:
    """What `rankwise run` with these words prints; a run that fails ends the benchmark."""
    done = subprocess.run(
        [*RANKWISE, "run", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=patience_s,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"rankwise run {' '.join(words)} failed:\n{done.stderr}")
    return done.stdout


def environment(**added: str) -> dict[str, str]:
    """The environment of a sample: one thread per rank."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **added}


def seconds_of(command: Sequence[str], **added: str) -> float:
    """Wall time of a whole command that must succeed."""
    start = time.perf_counter()
    done = subprocess.run(
        command, env=environment(**added), capture_output=True, check=False, timeout=600
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n"
            f"{done.stdout.decode(errors='replace')[-2000:]}"
            f"{done.stderr.decode(errors='replace')[-2000:]}"
        )
    return seconds


def end_processes(processes: Sequence["subprocess.Popen[Any]"]) -> None:
    """End launchers, which end their ranks, or ranks; one that does not within 20 s is killed."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def take_turns(
    peers: Mapping[str, Callable[[], float]], repetitions: int, *, once: Sequence[str] = ()
) -> dict[str, float]:
    """The median of each peer's samples; peers in `once` are sampled in one repetition only."""
    samples: dict[str, list[float]] = {name: [] for name in peers}
    for repetition in range(repetitions):
        for name, sample in peers.items():
            if repetition == 0 or name not in once:
                samples[name].append(sample())
    return {name: statistics.median(values) for name, values in samples.items()}


KIB, MIB = 1 << 10, 1 << 20
Medians = dict[str, float]
"""What one run of some ranks has measured, in microseconds, by name."""


def iterations_for(size_bytes: int, *, quick: bool) -> int:
    """How often an operation on so many bytes is done."""
    count = 1000 if size_bytes <= 64 * KIB else 100 if size_bytes <= MIB else 10
    return max(3, count // 5) if quick else count


def median_us(operation: Callable[[], object], meet: Callable[[], object], count: int) -> float:
    """Median microseconds of an operation that all ranks begin together."""
    samples = []
    for _ in range(count + WARM_UPS):
        meet()
        start = time.perf_counter_ns()
        operation()
        samples.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(samples[WARM_UPS:])


def median_of(runs: Sequence[Medians]) -> Medians:
    """The median of each figure over several runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


class BarePing:
    """A child that does nothing but answer: what two processes need to wake each other.

    It is forked, so make it before there are threads.
    """

    def __init__(self) -> None:
        """Start the child."""
        self._there, self._back = os.eventfd(0), os.eventfd(0)
        parent = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            die_with_parent(parent)
            while True:
                os.eventfd_read(self._there)
                os.eventfd_write(self._back, 1)

    def one(self) -> None:
        """Wake it, and sleep until it has woken us."""
        os.eventfd_write(self._there, 1)
        os.eventfd_read(self._back)

    def close(self) -> None:
        """End the child."""
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        os.close(self._there)
        os.close(self._back)


class Table:
    """A Markdown table that is printed row by row, as the figures come."""

    def __init__(self, title: str, columns: Sequence[str], json_file: Path | None = None) -> None:
        """Print the heading."""
        self._columns = columns
        self._title = title
        self._json_file = json_file
        print(f"\n### {title}\n")
        print(f"| {' | '.join(columns)} |")
        print(f"| --- |{' ---: |' * (len(columns) - 1)}", flush=True)

    def row(self, name: str, *cells: str) -> None:
        """Print one row."""
        print(f"| {' | '.join((name, *cells))} |", flush=True)
        if self._json_file is not None:
            line = dict(zip(self._columns, (name, *cells), strict=False), table=self._title)
            with self._json_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def seconds(value: float | None) -> str:
    """A duration as a table cell; a dash for a peer that was not there."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def ratio(value: float, reference: float | None) -> str:
    """How many times `reference` a value is."""
    return "-" if not reference else f"{value / reference:.2f}"


def describe_machine() -> None:
    """Say on what the figures were measured.

    Compiles rankwise first: an editable installation in an environment that forbids writing byte
    code would compile it anew in every sample, as no user's installation does.
    """
    compileall.compile_dir(str(Path(rankwise.__file__).parent), quiet=1)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    print(
        f"{usable_cpu_count()} CPUs, {memory_gib:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
        + (f", torch {_torch_version()}" if HAS_TORCH else ", no torch: its peers are left out")
    )


def _torch_version() -> str:
    from importlib.metadata import version  # noqa: PLC0415  # rarely needed

    return version("torch")
