"""`rankwise.run`: a function on many ranks, its results by rank or its failures.

The ranks are processes of this machine, supervised like those of `rankwise run`: they live and
die together, their output lines stay whole, and whatever happens to this process, nothing is left
behind.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, TypeVarTuple, Unpack, cast, overload

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import nearest
from rankwise.launch.arguments import log_plan, worker_count
from rankwise.launch.fork_server import ForkServer
from rankwise.launch.inside.function_results import values_by_rank
from rankwise.launch.limits import shown
from rankwise.launch.run.function_job import function_job, parse_start_method
from rankwise.launch.run.job import Job, StartMethod, StartMethodName
from rankwise.launch.run.supervision import Supervision
from rankwise.launch.telling.outcomes import raise_unless_succeeded

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
# Written by `python tools/run_arguments.py` from launch/options.py.
ScheduleName: TypeAlias = Literal["queue", "random"]
DeviceName: TypeAlias = Literal["cpu", "cuda"]


class SimulationArguments(TypedDict, total=False):
    """The keywords of `run` that are for simulated ranks only; see there."""

    virtual_clock: bool
    timing_only: bool
    every_rank: bool
    values: str
    synthetic_data: bool
    tokens_per_step: int | None
    prediction: str | os.PathLike[str] | None
    schedule: ScheduleName
    seed: int
    explore: int | None
    replay: str | os.PathLike[str] | None
    device: DeviceName
    faults: str | Sequence[str]


class RunArguments(SimulationArguments, total=False):
    """The keywords of `run` that are the same for every function; see there."""

    start_method: StartMethodName
    preload: Sequence[str] | None
    role: str
    on: str | None
    max_restarts: int
    hang_timeout: float | None
    start_timeout: float
    timeout: float | None
    grace: float
    keep_children: bool
    log_dir: str | os.PathLike[str] | None
    redirects: str
    tee: str
    prefix: str | None
    run_id: str | None
    server: ForkServer | None
    env: Mapping[str, str] | None


# The end of what is written.

_OF_SIMULATIONS = tuple(SimulationArguments.__annotations__)


@overload
def run(
    fn: Callable[[], R],
    args: tuple[()] = ...,
    nprocs: int = ...,
    *,
    kwargs: None = ...,
    **options: Unpack[RunArguments],
) -> list[R]: ...


@overload
def run(
    fn: Callable[[Unpack[Ts]], R],
    args: tuple[*Ts],
    nprocs: int = ...,
    *,
    kwargs: None = ...,
    **options: Unpack[RunArguments],
) -> list[R]: ...


@overload
def run(  # what no type can tell: a list of arguments, or arguments by name
    fn: Callable[..., R],
    args: list[Any],
    nprocs: int = ...,
    *,
    kwargs: Mapping[str, Any] | None = ...,
    **options: Unpack[RunArguments],
) -> list[R]: ...


@overload
def run(
    fn: Callable[..., R],
    args: Sequence[Any] = ...,
    nprocs: int = ...,
    *,
    kwargs: Mapping[str, Any],
    **options: Unpack[RunArguments],
) -> list[R]: ...


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 4,
    *,
    kwargs: Mapping[str, Any] | None = None,
    start_method: StartMethodName = "forkserver",
    preload: Sequence[str] | None = None,
    role: str = "rank",
    on: str | None = None,
    max_restarts: int = 0,
    hang_timeout: float | None = None,
    start_timeout: float = 600.0,
    timeout: float | None = None,
    grace: float = 30.0,
    keep_children: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
    redirects: str = "0",
    tee: str = "0",
    prefix: str | None = None,
    run_id: str | None = None,
    virtual_clock: bool = False,
    timing_only: bool = False,
    every_rank: bool = False,
    values: str = "",
    synthetic_data: bool = False,
    tokens_per_step: int | None = None,
    prediction: str | os.PathLike[str] | None = None,
    schedule: ScheduleName = "queue",
    seed: int = 0,
    explore: int | None = None,
    replay: str | os.PathLike[str] | None = None,
    device: DeviceName = "cpu",
    faults: str | Sequence[str] = (),
    server: ForkServer | None = None,
    env: Mapping[str, str] | None = None,
    **_others: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` once on each of `nprocs` ranks and return the results, by rank.

    A rank finds its number with `rankwise.rank()`, or in RANK, WORLD_SIZE and torchrun's other
    variables, so `torch.distributed.init_process_group()` works as it is.

    Args:
        fn: any function, lambdas and functions of a notebook included; not an async function or a
            generator, whose call would only make an object that never runs.
        args: its positional arguments, the same for every rank.
        kwargs: its arguments by name, the same for every rank.
        nprocs: number of ranks, at most 4096.
        start_method: `forkserver` imports once and forks; `spawn` starts a fresh interpreter for
            every rank.
        preload: modules that the fork server imports; by default those that `fn` certainly needs.
        role: the ranks' role, for the prefix and ROLE_NAME.
        on: `"sim"` runs simulated ranks instead, threads of this process in virtual time; then
            `start_method`, `preload`, `server`, `start_timeout` and `keep_children` mean nothing.
            `hang_timeout` is how long one rank may run in real time without letting others run;
            ranks that wait for each other for ever are found at once. `"sim:MACHINE"`, a preset or
            a topology file, also predicts how long they take there.
        max_restarts: how often all ranks may be started again after a failure.
        hang_timeout: seconds without progress of any rank (see docs/howto/hang.md) after which the
            run counts as hung: stacks are collected and it fails.
        start_timeout: seconds that starting all ranks may take, with what the fork server imports.
        timeout: seconds that the whole run may take, restarts included, before ranks are told to
            stop; on simulated ranks in real time.
        grace: seconds that ranks have to end when they are told to, before they are killed.
        keep_children: whether processes that ranks have left running live on when all ranks have
            returned; they are killed otherwise.
        log_dir: directory for log files.
        redirects: streams that go to files instead of the console, as in `rankwise run`: `"3"` is
            both streams of every rank, `"0:1,3:2"` is stdout of rank 0 and stderr of rank 3.
        tee: streams that go to both, in the same notation.
        prefix: what stands before each line on the console, a `string.Template` with
            `${role_name}`, `${local_rank}`, `${rank}`, `${date}`, `${time}`; `""` for nothing.
        run_id: the run's name in `rankwise ps`, without a slash; by default a random one.
        virtual_clock: let the functions of `time` tell simulated ranks virtual time alone.
        timing_only: compute nothing on `sim:MACHINE`: tensors have no data, each rank has a
            modelled CUDA device, and its time and memory are predicted (docs/howto/predict.md).
            Ranks that do the same are run once: the result of one that did not run is None.
        every_rank: run all of them then.
        values: what a program gets then that asks for a number: `"constant=NUMBER"`, `"seeded"`, or
            a file.
        synthetic_data: let data loaders of PyTorch repeat their first batch then.
        tokens_per_step: of all ranks together, for the tokens/s of a prediction; None counts them.
        prediction: file for the predicted figures, as JSON.
        schedule: `random` draws from `seed` which simulated rank runs next, and which message is
            received first; `queue` takes them in the order in which they are ready.
        seed: of everything random on simulated ranks, at least 0.
        explore: run `fn` with so many different schedules, or with all if there are fewer, until
            each has been tried. Results are those of the last run. A schedule that fails in a new
            way is written to a file in the working directory.
        replay: such a file: run with the schedule in it.
        device: `cuda` models a CUDA device for each simulated rank, for programs of PyTorch.
        faults: of simulated ranks, such as `"kill:rank=3@collective=9"`, or the name of a YAML
            file; one or several (docs/howto/faults.md).
        server: a warm fork server to use instead of a new one; it has made its own preloads.
        env: variables to add; not those that tell a rank its place, such as RANK or MASTER_PORT,
            which rankwise sets itself.
        _others: any further name is refused.

    Returns:
        A list with what `fn` returned on rank 0, 1, 2 …; None for a rank that did not return
        but ended its process as a success, with `sys.exit()` for instance.

    Raises:
        TypeError: there is no such argument.
        WorkersFailed: ranks failed. `failures` has all of them, the root cause first;
            `exceptions` the real exception objects by rank; the root cause's is the `__cause__`.
        RunTimeout: it took longer than `timeout`; the message tells where the ranks stood then. It
            is a TimeoutError.
        ConfigError: an argument cannot be used.
        KeyboardInterrupt: Ctrl-C, after all ranks have ended. Other signals take the effect that
            they would have had without rankwise.
    """
    __tracebackhide__ = True  # from pytest, as in `raise_unless_succeeded`
    given = locals()  # before there are other names than the arguments'
    simulation = cast("SimulationArguments", {name: given[name] for name in _OF_SIMULATIONS})
    if _others:
        raise _no_such_argument(*next(iter(_others.items())))
    kind, _, machine = on.partition(":") if isinstance(on, str) else (on, "", "")
    if kind not in (None, "sim"):
        raise ConfigError(
            f"on is {shown(on)}, expected 'sim', 'sim:MACHINE', or nothing for processes"
        )
    if on is None:
        _refuse_for_processes(simulation)
    if server is not None:
        _check_server(server, start_method, preload)
        preload = server.preload or None
    job = function_job(
        fn,
        args,
        nprocs,
        kwargs=kwargs,
        start_method=start_method,
        logs=log_plan(
            log_dir=log_dir,
            redirects=redirects,
            tee=tee,
            prefix=prefix,
            nprocs=worker_count(nprocs),
        ),
        max_restarts=max_restarts,
        grace=grace,
        hang_timeout=hang_timeout,
        start_timeout=start_timeout,
        timeout=timeout,
        keep_children=keep_children,
        environment=env,
        preload=preload,
        run_id=run_id,
        role=role,
    )
    if on is not None:
        from rankwise.simranks.run.functions import run_simulated  # noqa: PLC0415  # only there

        return _by_rank(job, run_simulated(job, machine or None, simulation))
    supervision = Supervision(job, hosting=None if server is None else server.hosting)
    raise_unless_succeeded(supervision.run(), supervision)
    return _by_rank(job, supervision)


def _refuse_for_processes(simulation: Mapping[str, Any]) -> None:
    defaults = run.__kwdefaults__ or {}
    for name, value in simulation.items():
        if value != defaults[name]:
            raise ConfigError(
                f"{name} is {shown(value)}, but only simulated ranks have one: on is None",
                hint="on='sim' simulates them",
            )


def _by_rank(job: Job, finished: Supervision) -> list[Any]:
    values = values_by_rank(finished.results)
    return [values.get(rank) for rank in range(job.gang.size)]


def _no_such_argument(name: str, value: Any) -> TypeError:
    meant = nearest(name, [*RunArguments.__annotations__, "nprocs", "kwargs"])
    hint = (
        f"did you mean {meant}?"
        if meant
        else f"for the function: kwargs={{{name!r}: {shown(value)}}}"
    )
    return TypeError(f"rankwise.run() has no argument {name!r} ({hint})")


def _check_server(server: Any, start_method: str, preload: Any) -> None:
    if not isinstance(server, ForkServer):
        raise ConfigError(f"server is {shown(server)}, expected a rankwise.ForkServer")
    if parse_start_method(start_method) is not StartMethod.FORKSERVER:
        raise ConfigError(f"start_method is {start_method!r}, but a server was given to fork from")
    if preload is not None:
        raise ConfigError(
            f"preload is {shown(preload)}, but server is given, and has imported its modules",
            hint="rankwise.ForkServer(preload=…) takes them",
        )
