"""What exactly a worker's process is told to run, for each program and start method.

An order is what goes to the guardian or to the fork server (docs/development/architecture.md,
"Frames"). A guardian executes a command line; a fork server already is a Python process and is
told which program to become.
"""

import os
import resource
import sys
from functools import cache
from typing import Any

from rankwise.drivers.real.worker import boot_program
from rankwise.launch.run.job import (
    Executable,
    Function,
    Job,
    Module,
    Script,
    StartMethod,
    is_automatic,
)


def worker_order(job: Job, local_rank: int, environment: dict[str, str]) -> dict[str, Any]:
    """The order for one worker, but for its descriptors."""
    order: dict[str, Any] = {
        "env": environment,
        "cwd": os.getcwd(),  # pathlib costs milliseconds
        "nofile": ORIGINAL_NOFILE,
        "fds": [],
    }
    if job.cpus_by_rank is not None and local_rank in job.cpus_by_rank:
        order["cpus"] = sorted(job.cpus_by_rank[local_rank])
    is_forked = job.start_method is StartMethod.FORKSERVER or is_automatic(job)
    if is_forked and not isinstance(job.program, Executable):
        order["program"] = _program(job, local_rank)
    if "program" not in order or is_automatic(job):
        order["argv"] = _argv(job, local_rank)
    return order


SPARE_FILES = 64
"""For whatever else the program and we open meanwhile."""
ORIGINAL_NOFILE = resource.getrlimit(resource.RLIMIT_NOFILE)
"""The limit of open files that workers get back: the agent may raise its own."""


def ensure_open_files(count: int) -> None:
    """Let this process open `count` files more, if it may: the pipes of 256 workers are a thousand.

    A limit that suffices is left alone, since it belongs to the program that calls us.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and len(os.listdir("/proc/self/fd")) + count + SPARE_FILES > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _argv(job: Job, local_rank: int) -> list[str]:
    python = job.python or os.environ.get("PYTHON_EXEC") or sys.executable
    boot = [python, "-u", _boot_program(python)]
    match job.program:
        case Script(path=path, args=args):
            return [*boot, path, *_substituted(args, local_rank)]
        case Module(name=name, args=args):
            return [*boot, "-m", name, *_substituted(args, local_rank)]
        case Executable(path=path, args_by_rank=own) if local_rank in own:
            return [path, *own[local_rank]]
        case Executable(path=path, args=args):
            return [path, *_substituted(args, local_rank)]
        case Function():
            return [*boot, "-f"]


_boot_program = cache(boot_program)


def _program(job: Job, local_rank: int) -> tuple[Any, ...]:
    match job.program:
        case Script(path=path, args=args):
            return ("script", path, _substituted(args, local_rank))
        case Module(name=name, args=args):
            return ("module", name, _substituted(args, local_rank))
        case Function():
            return ("function",)
        case Executable():
            raise AssertionError("an executable cannot be forked, and is never planned so")


def _substituted(args: tuple[str, ...], local_rank: int) -> list[str]:
    """Arguments with torchrun's macro `${local_rank}` filled in."""
    if not any("$" in arg for arg in args):
        return [*args]
    from string import Template  # noqa: PLC0415  # most scripts are given no macro

    return [
        Template(arg).safe_substitute(local_rank=local_rank) if "$" in arg else arg for arg in args
    ]
