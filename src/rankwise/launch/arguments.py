"""Looks at what callers of the Python functions have given, before anything is made of it.

Annotations are not checked at run time, and a wrong value would come to light far from the call: in
a worker, in the guardian, as a stack of ours. Each function here takes one argument and returns it
in the shape that a job wants, or raises a `ConfigError` that names the parameter, the value, and
what was expected.
"""

import os
from collections.abc import Iterable, Mapping
from functools import partial
from numbers import Real
from operator import index
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.base.units import Duration
from rankwise.launch.limits import (
    check_positive,
    check_restarts,
    check_role,
    check_run_id,
    check_worker_count,
    duration_of,
    shown,
)
from rankwise.launch.run.environment import VARIABLES_OF_RANKS
from rankwise.launch.run.job import LogPlan, StreamChoice
from rankwise.launch.run.log_layout import check_prefix, log_plan_problems, parse_streams


def call_arguments(args: Any) -> tuple[Any, ...]:
    """`args`: the positional arguments of the function."""
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
        raise ConfigError(
            f"args is {shown(args)}, expected a tuple of the function's arguments",
            hint="for a single argument: args=(value,)",
        )
    return tuple(args)


def with_keywords(function: Any, kwargs: Any) -> Any:
    """`kwargs`: the function's arguments by name, or None; the function with them."""
    if kwargs is None:
        return function
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ConfigError(
            f"kwargs is {shown(kwargs)}, expected a mapping from the function's argument names"
        )
    return partial(function, **kwargs)


def worker_count(nprocs: Any) -> int:
    """`nprocs`: how many workers."""
    count = _whole_number(nprocs, "nprocs", "the number of workers")
    check_worker_count(count, "nprocs")
    return count


def restarts_max(max_restarts: Any) -> int:
    """`max_restarts`: how many times all workers may be started again."""
    count = _whole_number(max_restarts, "max_restarts", "the number of restarts")
    check_restarts(count, "max_restarts")
    return count


def grace_period(seconds: Any) -> Duration:
    """`grace`: how long workers may take to end."""
    return duration_of(_seconds(seconds, "grace"), "grace")


def time_limit(seconds: Any, label: str) -> Duration | None:
    """`timeout` and `hang_timeout`: None, or more than 0."""
    return None if seconds is None else positive(seconds, label)


def positive(seconds: Any, label: str) -> Duration:
    """`start_timeout`: how long something may take at most."""
    duration = duration_of(_seconds(seconds, label), label)
    check_positive(duration, label, given=seconds)
    return duration


def run_name(run_id: Any) -> str:
    """`run_id`: a name, or None for one that is made up."""
    if run_id is None:
        return f"run-{os.urandom(4).hex()}"
    name = _text(run_id, "run_id")
    check_run_id(name, "run_id")
    return name


def role_name(role: Any) -> str:
    """`role`: what the workers are called."""
    name = _text(role, "role")
    check_role(name, "role")
    return name


def added_environment(env: Any) -> dict[str, str]:
    """`env`: variables to add, none of which tells a worker its place."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise ConfigError(f"env is {shown(env)}, expected a mapping from names to values")
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError(f"env has a variable {shown(name)}, expected a name without '='")
        if name in VARIABLES_OF_RANKS:
            raise ConfigError(
                f"env has {name}, which rankwise itself sets for every worker", hint="leave it out"
            )
        if not isinstance(value, str) or "\0" in value:
            raise ConfigError(f"env[{name!r}] is {shown(value)}, expected a string without NUL")
    return dict(env)


def modules_to_import(preload: Any) -> tuple[str, ...]:
    """`preload`: names of modules."""
    if isinstance(preload, str):
        raise ConfigError(
            f"preload is {shown(preload)}, expected a list of modules' names",
            hint=f"for a single module: preload=[{preload!r}]",
        )
    if isinstance(preload, Mapping | bytes) or not isinstance(preload, Iterable):
        raise ConfigError(f"preload is {shown(preload)}, expected a list of modules' names")
    names = tuple(preload)
    for name in names:
        is_name = isinstance(name, str) and all(part.isidentifier() for part in name.split("."))
        if not is_name:
            raise ConfigError(f"preload has {shown(name)}, expected a module's name")
    return names


def log_plan(*, log_dir: Any, redirects: Any, tee: Any, prefix: Any, nprocs: int) -> LogPlan:
    """`log_dir`, `redirects`, `tee` and `prefix`: where the output of `nprocs` workers goes."""
    if isinstance(prefix, str):
        check_prefix(prefix, "prefix")
    plan = LogPlan(
        directory=_directory(log_dir),
        redirects=_streams(redirects, "redirects"),
        tee=_streams(tee, "tee"),
        prefix_template=None if prefix is None else _text(prefix, "prefix"),
    )
    if problems := log_plan_problems(plan, size=nprocs, label=_as_parameter):
        raise problems[0]
    return plan


def _directory(log_dir: Any) -> str | None:
    if log_dir is None:
        return None
    path = os.fspath(log_dir) if isinstance(log_dir, os.PathLike) else log_dir
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(f"log_dir is {shown(log_dir)}, expected a directory's path")
    return path


def _streams(text: Any, label: str) -> StreamChoice:
    if not isinstance(text, str):
        raise ConfigError(
            f"{label} is {shown(text)}, expected a string",
            hint='"0" none, "1" stdout, "2" stderr, "3" both; for single ranks "0:1,12:3"',
        )
    return parse_streams(text, option=label)


def _whole_number(value: Any, label: str, meaning: str) -> int:
    try:
        if not isinstance(value, bool):  # True is an int, too, and is no number of anything
            return index(value)
    except TypeError:
        pass  # floats and texts: told below
    raise ConfigError(f"{label} is {shown(value)}, expected {meaning}, a whole number")


def _seconds(value: Any, label: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{label} is {shown(value)}, expected seconds, as a number")
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _as_parameter(name: str) -> str:
    return name


def _text(value: Any, label: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{label} is {shown(value)}, expected a string")
    return value
