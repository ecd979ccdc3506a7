"""Builds the job of a Python function, for `rankwise.run`, `rankwise.spawn` and torch's names."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.core.rendezvous.configuration import RestartPolicy
from rankwise.drivers.real.call_pickle import name_of
from rankwise.launch.arguments import (
    added_environment,
    call_arguments,
    grace_period,
    modules_to_import,
    positive,
    restarts_max,
    role_name,
    run_name,
    time_limit,
    with_keywords,
    worker_count,
)
from rankwise.launch.inside.function_payload import pack_function
from rankwise.launch.limits import check_working_directory, shown
from rankwise.launch.run.job import Function, Job, LogPlan, StartMethod
from rankwise.launch.run.thread_limit import thread_environment


def function_job(
    function: Callable[..., Any],
    args: Any,
    nprocs: int,
    *,
    kwargs: Any = None,
    start_method: str,
    logs: LogPlan,
    max_restarts: int = 0,
    grace: float = 30.0,
    hang_timeout: float | None = None,
    start_timeout: float = 600.0,
    timeout: float | None = None,
    keep_children: bool = False,
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] | None = None,
    run_id: str | None = None,
    role: str = "rank",
    pass_rank: bool = False,
    console: bool = True,
) -> Job:
    """Describe a run of `function` on `nprocs` ranks.

    Raises:
        ConfigError: an argument cannot be used, or the function cannot be pickled.
    """
    check_working_directory()
    if not callable(function):
        raise ConfigError(f"the function to run is {shown(function)}, expected something callable")
    size = worker_count(nprocs)
    gang = GangSpec(
        size=size,
        grace=grace_period(grace),
        hang_timeout=time_limit(hang_timeout, "hang_timeout"),
        spawn_timeout=positive(start_timeout, "start_timeout"),
    )
    return Job(
        program=Function(
            name_of(function),
            pack_function(
                with_keywords(function, kwargs), call_arguments(args), pass_rank=pass_rank
            ),
        ),
        gang=gang,
        policy=RestartPolicy(restarts_max=restarts_max(max_restarts)),
        run_id=run_name(run_id),
        role=role_name(role),
        start_method=parse_start_method(start_method),
        preload=None if preload is None else modules_to_import(preload),
        environment={**thread_environment(size, os.environ), **added_environment(environment)},
        logs=logs,
        timeout=time_limit(timeout, "timeout"),
        keep_children=keep_children,
        console=console,
    )


def parse_start_method(name: str) -> StartMethod:
    """The start method of that name; `fork` means the fork server, which forks safely.

    Raises:
        ConfigError: there is no such method, or it cannot run functions.
    """
    if name == "fork":
        return StartMethod.FORKSERVER
    if name not in (StartMethod.SPAWN, StartMethod.FORKSERVER):
        raise ConfigError(
            f"start_method is {shown(name)}, expected 'spawn', 'forkserver' or 'fork'"
        )
    return StartMethod(name)
