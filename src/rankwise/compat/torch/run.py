"""`torchrun` as a module: its parser, and from its arguments to a launch.

`rankwise run` is the command to use; it takes the same flags, starts faster and reports better.
This module is for programs that call `torch.distributed.run.main(args)` or build upon its parser.
"""

if __name__ == "__main__":
    # First of all: the imports below take their time, and a signal may come at any.
    from rankwise.drivers.real.early_signals import catch_early

    catch_early()

import argparse
import atexit
import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from rankwise.compat.torch.argparse_util import check_env, env
from rankwise.compat.torch.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, Std
from rankwise.compat.torch.elastic.multiprocessing.errors import record
from rankwise.compat.torch.elastic.rendezvous.utils import _parse_rendezvous_config
from rankwise.compat.torch.elastic.utils import macros
from rankwise.compat.torch.launcher.api import LaunchConfig, elastic_launch
from rankwise.compat.torch.launcher.signals import heed_all_signals
from rankwise.drivers.real.cpus import usable_cpu_count
from rankwise.drivers.real.early_signals import be_interruptible, leave_alone
from rankwise.launch.inside.run_path import run_script_path
from rankwise.launch.launch_fields import LAUNCH_FIELDS
from rankwise.launch.options import (
    FLAG,
    INTEGER,
    MASTER_PORT,
    NUMBER,
    OPTIONS,
    SAME,
    SECONDS,
    WORDS,
    Kind,
    Option,
    Torchrun,
    option_named,
)
from rankwise.launch.run.standard_streams import flush_standard_streams
from rankwise.launch.run.thread_limit import VARIABLE, thread_environment, thread_notice

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

logger = logging.getLogger(__name__)


def get_args_parser() -> argparse.ArgumentParser:
    """Make torchrun's parser. Defaults come from `PET_…` variables where these are set.

    Raises:
        ValueError: the variable of a flag such as PET_STANDALONE is not a whole number.
    """
    parser = argparse.ArgumentParser(description="Torch Distributed Elastic Training Launcher")
    for option in OPTIONS:
        if option.torchrun is not None:
            _add(parser, option, option.torchrun)
    parser.add_argument("training_script", help="the script, module or program to launch")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _add(parser: argparse.ArgumentParser, option: Option, torchrun: Torchrun) -> None:
    names = [*filter(None, [option.short]), *_spellings(option.flag)]
    # argparse formats the text with %.
    text = (torchrun.help or option.help).replace("%", "%%")
    if option.kind is FLAG:
        parser.add_argument(*names, dest=option.name, action=check_env, help=text)
        return
    default = option.default if torchrun.default is SAME else torchrun.default
    parser.add_argument(
        *names,
        dest=option.name,
        action=env if torchrun.has_variable else "store",
        default=[] if default == () else default,
        type=_CONVERTERS.get(option.kind, str),
        choices=list(torchrun.choices or option.choices) or None,
        help=text,
    )


def _spellings(flag: str) -> list[str]:
    return list(dict.fromkeys([flag, "--" + flag.removeprefix("--").replace("-", "_")]))


def _comma_list(text: str) -> list[str]:
    """Split at commas; two of them are one that belongs to the text."""
    parts = text.replace(",,", "\0").split(",")
    return [part.replace("\0", ",") for part in parts if part]


_CONVERTERS: dict[Kind, Callable[[str], Any]] = {
    INTEGER: int,
    NUMBER: float,
    SECONDS: int,
    WORDS: _comma_list,
}


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; None means this process's."""
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Read `N` or `MIN:MAX`.

    Raises:
        RuntimeError: it is something else.
    """
    parts = nnodes.split(":")
    if len(parts) > 2:
        raise RuntimeError(f'nnodes={nnodes} is not in "MIN:MAX" format')
    return int(parts[0]), int(parts[-1])


def determine_local_world_size(nproc_per_node: str) -> int:
    """How many workers: a number, or what this machine has of `cpu`, `gpu`, `xpu` or `auto`.

    torch is asked for devices where it has been imported, so that what a program has told it
    counts; otherwise the machine is.

    Raises:
        ValueError: it is something else, or there is no such device.
    """
    try:
        return int(nproc_per_node)
    except ValueError:
        pass
    from rankwise.launch.run.devices import visible_gpu_count  # noqa: PLC0415  # numbers are common

    torch = sys.modules.get("torch")
    cpus = usable_cpu_count()
    match nproc_per_node:
        case "cpu":
            return cpus
        case "gpu":
            if torch is not None:
                count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            else:
                count = visible_gpu_count(os.environ)
            return _at_least_one(count, "Cuda is not available.")
        case "xpu":
            return _at_least_one(_torch_device_count("xpu"), "Xpu is not available.")
        case "auto" if torch is not None:
            return (
                int(torch.accelerator.device_count()) if torch.accelerator.is_available() else cpus
            )
        case "auto":
            return visible_gpu_count(os.environ) or cpus
        case _:
            count = _torch_device_count(nproc_per_node) if nproc_per_node.isidentifier() else 0
            return _at_least_one(count, f"Unsupported nproc_per_node value: {nproc_per_node}")


def _torch_device_count(kind: str) -> int:
    torch = sys.modules.get("torch")
    if torch is None:
        from rankwise.base.errors import ConfigError  # noqa: PLC0415  # rarely asked
        from rankwise.launch.run.devices import device_count_by_torch  # noqa: PLC0415  # the same

        try:
            return device_count_by_torch(kind, sys.executable)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    backend = getattr(torch, kind, None)
    if backend is None or not hasattr(backend, "device_count"):
        return 0
    return int(backend.device_count()) if backend.is_available() else 0


def _at_least_one(count: int, otherwise: str) -> int:
    if count < 1:
        raise ValueError(otherwise)
    return count


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """Where the nodes meet: the master's address if the rendezvous is static and none is given."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{args.master_port}"
    return str(args.rdzv_endpoint)


def get_use_env(args: argparse.Namespace) -> bool:
    """Whether workers find their local rank in the environment, and not in an argument."""
    return bool(getattr(args, "use_env", True))


def config_from_args(
    args: argparse.Namespace,
) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """What the arguments mean: the launch, what it runs, and with which arguments.

    Raises:
        AssertionError: the numbers of nodes or restarts make no sense.
        ValueError: another value cannot be used.
    """
    nodes_min, nodes_max = parse_min_max_nnodes(args.nnodes)
    assert 0 < nodes_min <= nodes_max, f"--nnodes is {args.nnodes}, expected 0 < MIN <= MAX"
    assert args.max_restarts >= 0, f"--max-restarts is {args.max_restarts}, expected 0 or more"
    if args.rdzv_backend != "static" and args.node_rank != 0:
        logger.warning("--node-rank means nothing unless --rdzv-backend is static")
    size = determine_local_world_size(args.nproc_per_node)
    if limit := thread_environment(size, os.environ):
        logger.warning("%s", thread_notice(limit[VARIABLE], size))
        os.environ.update(limit)
    settings: dict[str, Any] = dict(_parse_rendezvous_config(_without_quotes(args.rdzv_conf)))
    if args.rdzv_backend == "static":
        settings["rank"] = args.node_rank
    fields = {each.name: getattr(args, each.option) for each in LAUNCH_FIELDS if each.option}
    config = LaunchConfig(
        **fields | {"rdzv_endpoint": get_rdzv_endpoint(args)},
        min_nodes=nodes_min,
        max_nodes=nodes_max,
        nproc_per_node=size,
        rdzv_configs=settings,
        log_line_prefix_template=os.environ.get(*option_named("log_prefix").variables),
        logs_specs=_logs_specs(args),
        numa_options=_numa_options(args.numa_binding),
    )
    return config, *_command(args)


def _without_quotes(text: str) -> str:
    """Take off the quotes around a whole text: where arguments are a list, no shell has done it."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def _command(args: argparse.Namespace) -> tuple[Callable[..., Any] | str, list[str]]:
    if args.run_path:
        return run_script_path, [args.training_script, *args.training_script_args]
    command: list[str] = []
    program: str = args.training_script
    if not args.no_python:
        program = os.environ.get("PYTHON_EXEC", sys.executable)
        command = ["-u", *(["-m"] if args.module else []), args.training_script]
    elif args.module:
        raise ValueError(
            "Don't use both the '--no-python' flag and the '--module' flag at the same time."
        )
    if not get_use_env(args):
        command.append(f"--local-rank={macros.local_rank}")
    return program, [*command, *args.training_script_args]


def _logs_specs(args: argparse.Namespace) -> LogsSpecs:
    ranks = None
    if args.local_ranks_filter:
        try:
            ranks = {int(rank) for rank in args.local_ranks_filter.split(",")}
        except ValueError:
            raise ValueError(
                "--local_ranks_filter must be a comma-separated list of integers e.g. "
                f"--local_ranks_filter=0,1,2, it is {args.local_ranks_filter!r}"
            ) from None
    return _get_logs_specs_class(args.logs_specs)(
        log_dir=args.log_dir,
        redirects=Std.from_str(args.redirects),
        tee=Std.from_str(args.tee),
        local_ranks_filter=ranks,
    )


def _get_logs_specs_class(logs_specs_name: str | None) -> type[LogsSpecs]:
    """The class that decides about log files, by the name of an entry point.

    Raises:
        ValueError: no installed package offers it.
    """
    if logs_specs_name is None:
        return DefaultLogsSpecs
    group = metadata.entry_points().select(group="torchrun.logs_specs")
    if group.select(name=logs_specs_name):
        loaded: type[LogsSpecs] = group[logs_specs_name].load()
        return loaded
    if logs_specs_name == "default":
        return DefaultLogsSpecs
    raise ValueError(
        f"Could not find entrypoint under 'torchrun.logs_specs[{logs_specs_name}]' key"
    )


def _numa_options(binding: str | None) -> Any:
    if binding is None:
        return None
    from rankwise.compat.torch.numa.binding import (  # noqa: PLC0415  # rarely asked
        AffinityMode,
        NumaOptions,
    )

    return NumaOptions(affinity_mode=AffinityMode(binding))


def run(args: argparse.Namespace) -> None:
    """Launch what the parsed arguments ask for, and wait for its end."""
    threading.current_thread().name = "pt_elastic"
    is_alone = parse_min_max_nnodes(args.nnodes)[1] == 1
    names_no_place = not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (args.rdzv_backend == "static" and is_alone and names_no_place):
        args.rdzv_backend = "embedded"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = MASTER_PORT
    config, command, command_args = config_from_args(args)
    elastic_launch(config=config, entrypoint=command)(*command_args)


@record
def main(args: Sequence[str] | None = None) -> None:
    """Be torchrun."""
    run(parse_args(args))


if __name__ == "__main__":
    atexit.register(flush_standard_streams)
    heed_all_signals()
    be_interruptible()
    leave_alone()
    main()
