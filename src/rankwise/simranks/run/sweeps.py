"""A sweep: one simulation per combination of values, each in a process of its own, on all cores.

A combination that fails is told, and does not take the others with it. With a file of results
(`results_file`), combinations that it has are not run again. Their keys hold all that decides the
outcome: the program's own bytes, its arguments, the machine, and the versions. Modules that the
program imports from files of its own are not part of them.
"""

import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rankwise.base.errors import DEVICE_FULL_EXIT_CODE, ConfigError
from rankwise.sim.reporting.files import NotWritten
from rankwise.sim.reporting.sweep_table import BENCH, PREDICTION, TIME, SweepTable, SweptCase
from rankwise.simranks.run.cores import deal, run_commands
from rankwise.simranks.run.results_file import ResultsFile, entries_in

if TYPE_CHECKING:
    from rankwise.sim.benches.session import BenchSettings

Point = Mapping[str, str]
Progress = Callable[[int, int], None]
"""Is told how many cases are done, and how many of these have run now."""
_MODULES = ("torch", "torch.distributed", "torch.distributed.tensor.parallel")


class SweepOutcome(NamedTuple):
    """How a sweep ended.

    Attributes:
        table: what has been done.
        reused: how many of its combinations a file of results had.
        is_interrupted: whether Ctrl-C has ended it.
        problem: why the file of results could not be written; empty if it could.
    """

    table: SweepTable
    reused: int
    is_interrupted: bool
    problem: str


def points_of(over: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Every combination of the values, the last key varying fastest."""
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def sweep(
    program: str | os.PathLike[str],
    over: Mapping[str, Sequence[object]],
    *,
    topology: str = "default",
    fields: Mapping[str, object] | None = None,
    ccl: str | None = None,
    seed: int = 0,
    timing_only: bool = False,
    results: str | os.PathLike[str] | None = None,
) -> SweepTable:
    """Simulate a program for every combination of values, on all cores.

    Args:
        program: the name of a bench, or the path of a program or of Chakra traces.
        over: for each key the values that it takes: parameters of the program, fields of the
            machine (`system.sips.count`) or of the collectives, as for `--set`.
        topology: a preset or a file.
        fields: values that stay.
        ccl: configuration of the collectives, a file.
        seed: of random tensors.
        timing_only: compute times only, without numbers.
        results: a file that keeps what is done: what it has is not run again.

    Raises:
        ConfigError: a key or value cannot be used, or another sweep has the file.
        KeyboardInterrupt: by Ctrl-C; what is done is in the file.
        NotWritten: the file could not be written.
    """
    from rankwise.sim.benches.session import BenchSettings, check_keys  # noqa: PLC0415  # it brings numpy

    name = os.fspath(program)
    for key, values in over.items():
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise ConfigError(f"over: {key} is {values!r}, expected a list of values")
    texts = {key: [str(value) for value in values] for key, values in over.items()}
    if not texts or not all(texts.values()):
        raise ConfigError("over has no values, expected at least one key with values")
    settings = BenchSettings(
        program=name,
        is_file=name.endswith((".py", ".et")),
        topology=topology,
        ccl=ccl,
        fields={key: str(value) for key, value in (fields or {}).items()},
        seed=seed,
        has_data=not timing_only,
    )
    check_keys(settings, texts)
    done = sweep_settings(
        settings, points_of(texts), None if results is None else os.fspath(results)
    )
    if done.problem:
        raise NotWritten(done.problem)
    if done.is_interrupted:
        raise KeyboardInterrupt
    return done.table


def read_results(path: str | os.PathLike[str]) -> SweepTable:
    """The table in a file of `--results`, in the order in which its cases were done.

    Raises:
        ConfigError: it is no such file.
    """
    name = os.fspath(path)
    cases = list(entries_in(name).values())
    return SweepTable(list(cases[0].point) if cases else [], cases, _kind_of(cases), name)


def _kind_of(cases: Sequence[SweptCase]) -> str:
    rows = [row for case in cases for row in case.rows]
    if any("step_time_s" in row for row in rows):
        return PREDICTION
    return BENCH if any("bench" in row for row in rows) else TIME


def sweep_settings(
    settings: "BenchSettings",
    points: Sequence[Point],
    results: str | None,
    progress: Progress = lambda _done, _ran: None,
) -> SweepOutcome:
    """Simulate settings with every point."""
    wanted = [
        msgspec.structs.replace(settings, fields={**settings.fields, **point}) for point in points
    ]
    keys = [_key_of_settings(each) for each in wanted] if results is not None else []

    def run(numbers: Sequence[int], keep: Callable[[int, SweptCase], None]) -> None:
        deal(
            "rankwise.simranks.run.sweeps:measure",
            {number: wanted[number] for number in numbers},
            lambda number, case: keep(
                number, msgspec.structs.replace(case, point=dict(points[number]))
            ),
            lambda number, death: keep(
                number, SweptCase(point=dict(points[number]), failure=death)
            ),
        )

    return _sweep(_SweepPlan(points, keys, results, settings.program), run, progress)


def measure(settings: "BenchSettings") -> SweptCase:
    """Simulate one combination; what runs in a worker."""
    from rankwise.sim.benches.session import measure_or_tell  # noqa: PLC0415  # it brings numpy
    from rankwise.sim.reporting.results import time_row  # noqa: PLC0415  # the same

    outcome = measure_or_tell(settings)
    if outcome.failure:
        return SweptCase(point={}, failure=outcome.failure)
    rows: list[Mapping[str, Any]] = [result.as_row() for result in outcome.results]
    rows = rows or [time_row(outcome.time_ps)]
    return SweptCase(point={}, rows=rows, devices=outcome.devices)


def sweep_commands(  # all by name
    commands: Sequence[Sequence[str]],
    points: Sequence[Point],
    *,
    files: Sequence[str],
    results: str | None,
    progress: Progress,
    title: str,
) -> SweepOutcome:
    """Predict with each of these command lines, which are without their `--prediction`.

    Args:
        commands: their words behind `rankwise`; the first is `run`.
        points: the values that each stands for.
        files: what the outcome depends on besides.
        results: the file that keeps what is done.
        progress: is told of each case.
        title: of the table.
    """
    digests = [_digest_of_file(path) for path in files]
    keys = [_digest([_versions(), digests, list(command)]) for command in commands]

    def run(numbers: Sequence[int], keep: Callable[[int, SweptCase], None]) -> None:
        with tempfile.TemporaryDirectory(prefix="rankwise-sweep-") as folder:

            def path_of(number: int) -> str:
                return str(Path(folder, f"{number}.json"))

            run_commands(
                {
                    number: ("run", f"--prediction={path_of(number)}", *commands[number][1:])
                    for number in numbers
                },
                lambda number, code, tail: keep(
                    number, _predicted(dict(points[number]), path_of(number), code, tail)
                ),
                _imports_of(files),
            )

    plan = _SweepPlan(points, keys, results, title, PREDICTION)
    return _sweep(plan, run, progress)


def _imports_of(files: Sequence[str]) -> tuple[str, ...]:
    """What takes long to import and a program needs, as far as its text tells."""
    texts = [Path(each).read_bytes() for each in files if each.endswith(".py")]
    return _MODULES if any(b"torch" in text for text in texts) else ()


def _predicted(point: dict[str, str], path: str, code: int, tail: str) -> SweptCase:
    reason = _reason(tail) if code else ""
    try:
        document = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        document = None
    if document is None or code not in {0, DEVICE_FULL_EXIT_CODE}:
        return SweptCase(point=point, failure=f"exit code {code}: {reason}" if code else reason)
    # That a device is full is an answer, and no failure.
    is_full = code == DEVICE_FULL_EXIT_CODE
    fits = not is_full and document["peak_active_bytes"] <= document["capacity_bytes"]
    times = {
        name: None if is_full else document[name]
        for name in (
            "step_time_s", "computing_s", "exposed_communication_s", "waiting_s", "communication_s",
            "tokens_per_s", "mfu",
        )
    }  # fmt: skip
    row = {
        "machine": document["machine"],
        "ranks": document["ranks"],
        "steps": document["steps"],
        **times,
        "peak_active_bytes": document["peak_active_bytes"],
        "capacity_bytes": document["capacity_bytes"],
        "fits": fits,
        "reason": "" if fits else reason or "the peak is more than a device has",
    }
    return SweptCase(point=point, rows=[row], devices=document["ranks"])


def _reason(tail: str) -> str:
    """The line of stderr that says why a run failed.

    The run is a process of its own, perhaps on another machine: its output is all that is here.
    """
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    for mark in ("root cause: ", "error: "):
        for line in lines:
            if mark in line:
                return line.partition(mark)[2]
    return lines[-1] if lines else "nothing was written to stderr"


class _SweepPlan(NamedTuple):
    """What a sweep runs; `keys` are those of the file of results."""

    points: Sequence[Point]
    keys: Sequence[str]
    results: str | None
    title: str
    kind: str = ""


def _sweep(
    plan: _SweepPlan,
    run: Callable[[Sequence[int], Callable[[int, SweptCase], None]], None],
    progress: Progress,
) -> SweepOutcome:
    points, keys, results, title, kind = plan
    cases: dict[int, SweptCase] = {}
    problem, is_interrupted, reused = "", False, 0
    with ExitStack() as stack:
        file = None if results is None else stack.enter_context(ResultsFile(results))
        if file is not None:
            for number, key in enumerate(keys):
                if key in file.done:
                    cases[number] = msgspec.structs.replace(
                        file.done[key], point=dict(points[number])
                    )
            reused = len(cases)
            progress(reused, 0)

        def keep(number: int, case: SweptCase) -> None:
            cases[number] = case
            if file is not None and not case.failure:  # what failed is tried again
                file.keep(keys[number], case)
            progress(len(cases), len(cases) - reused)

        try:
            run([number for number in range(len(points)) if number not in cases], keep)
        except KeyboardInterrupt:
            is_interrupted = True
        except NotWritten as error:
            problem = error.message
    done = [cases[number] for number in sorted(cases)]
    kind = kind or _kind_of(done)
    if kind == BENCH:  # a program may measure something at some points only
        done = [
            msgspec.structs.replace(case, rows=[row for row in case.rows if "bench" in row])
            for case in done
        ]
    table = SweepTable(list(points[0]), done, kind, title, len(points))
    return SweepOutcome(table, reused, is_interrupted, problem)


def _key_of_settings(settings: "BenchSettings") -> str:
    """All that decides what a simulation gives, as a digest."""
    from rankwise.sim.ccl.configuration import FILE_NAME  # noqa: PLC0415  # it brings numpy
    from rankwise.sim.hardware.topology import load_topology  # noqa: PLC0415  # the same

    files = [settings.ccl or FILE_NAME]
    program = Path(settings.program)
    if program.suffix == ".et":
        files += map(str, sorted(program.parent.glob(f"{program.stem}.*.et")))
    elif settings.is_file:
        files.append(settings.program)
    fields = {key: settings.fields[key] for key in sorted(settings.fields)}
    told = msgspec.to_builtins(msgspec.structs.replace(settings, fields=fields, topology=""))
    given = settings.topology
    machine = (load_topology(given) if isinstance(given, str) else given).spec
    return _digest([_versions(), told, machine, [_digest_of_file(each) for each in files]])


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def _digest_of_file(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _versions() -> list[str]:
    """Of what computes: other ones may give other times."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  # only here

    found = []
    for package in ("rankwise", "numpy", "torch", "triton"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found
