"""`start_processes`: the front door."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankwise.compat.torch.elastic.multiprocessing.api import (
    MultiprocessContext,
    PContext,
    SubprocessContext,
    _validate_full_rank,
)
from rankwise.compat.torch.elastic.multiprocessing.logs_specs import LogsSpecs

__all__ = ["start_processes"]


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: Mapping[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: Any = None,
    duplicate_stdout_filters: Sequence[str] | None = None,
    duplicate_stderr_filters: Sequence[str] | None = None,
) -> PContext:
    """Start a function, or a program, on `len(args)` local ranks, and return what waits for them.

    Args:
        name: what the workers are called, for prefixes and reports.
        entrypoint: a function, or a program's path.
        args: each local rank's arguments.
        envs: each local rank's variables, added to this process's; TORCHELASTIC_ERROR_FILE is
            written into them.
        logs_specs: where output goes.
        log_line_prefixes: each local rank's prefix for tee'd lines, instead of `[<name><rank>]:`.
        start_method: how functions get their processes: `spawn`, or `forkserver` or `fork`, which
            both import once and fork.
        numa_options: torch's `NumaOptions`: which CPUs each worker is bound to.
        duplicate_stdout_filters: lines of stdout on the console that contain one of these are
            copied to `filtered_stdout.log`.
        duplicate_stderr_filters: the same for stderr.

    Raises:
        RuntimeError: `args` and `envs` are not for the local ranks 0 to n-1.
        OSError: the program cannot be started.
        ConfigError: the function cannot be sent to workers, or an option not be used.
    """
    size = len(args)
    _validate_full_rank(args, size, "args")
    _validate_full_rank(envs, size, "envs")
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(
            name=name,
            entrypoint=entrypoint,
            args=args,
            envs=envs,
            logs_specs=logs_specs,
            log_line_prefixes=log_line_prefixes,
            numa_options=numa_options,
            duplicate_stdout_filters=duplicate_stdout_filters,
            duplicate_stderr_filters=duplicate_stderr_filters,
        )
    else:
        context = MultiprocessContext(
            name=name,
            entrypoint=entrypoint,
            args=args,
            envs=envs,
            start_method=start_method,
            logs_specs=logs_specs,
            log_line_prefixes=log_line_prefixes,
            numa_options=numa_options,
            duplicate_stdout_filters=duplicate_stdout_filters,
            duplicate_stderr_filters=duplicate_stderr_filters,
        )
    try:
        context.start()
    except BaseException:
        context.close()
        raise
    return context
