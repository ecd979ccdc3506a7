"""From the options of `rankwise run` to a `Job`: what each value means, and whether it can be.

Nothing is started and nothing is written here; what is looked at is named in `programs`,
`launch.devices` and `launch.affinity`. Every refusal is a `ConfigError` of one line.
"""

import os
import re
import signal
import sys
from collections.abc import Mapping

import msgspec

from rankwise.base.backoff import Backoff
from rankwise.base.errors import ConfigError
from rankwise.base.failure import signal_name
from rankwise.base.units import SECOND, Duration
from rankwise.cli.node_flags import check_rendezvous, master_address, node_counts
from rankwise.cli.program_check import (
    check_preload,
    executable,
    python_interpreter,
    python_module,
    python_script,
    script_from_standard_input,
)
from rankwise.cli.run_names import random_run_name
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.core.rendezvous.configuration import RestartPolicy
from rankwise.drivers.real.cpus import usable_cpu_count
from rankwise.drivers.real.hosting.ending_signals import ENDING_SIGNALS
from rankwise.launch.cluster.plan import plan_alone
from rankwise.launch.limits import (
    check_positive,
    check_restarts,
    check_role,
    check_run_id,
    check_worker_count,
    check_working_directory,
    shown,
)
from rankwise.launch.options import (
    default_of,
    option_named,
    options_needing,
    options_refused,
    options_that_are_positive,
)
from rankwise.launch.run.job import (
    Executable,
    Function,
    Job,
    LogPlan,
    Module,
    Program,
    Script,
    StartMethod,
)
from rankwise.launch.run.log_layout import (
    check_prefix,
    has_log_files,
    log_plan_problems,
    parse_streams,
)
from rankwise.launch.run.thread_limit import thread_environment

BEYOND_RESTARTS = (
    "no_retry", "retry_startup_errors", "max_no_progress", "max_node_failures", "node_check",
    "health_port", "spares", "on_preemption", "rdzv_once", "rdzv_own_etcd",
)  # fmt: skip
"""Options of rankwise's own: a job with one of them has a plan for its nodes, also if it has one
node."""
HEALTH_TOKEN_VARIABLE = "RANKWISE_HEALTH_TOKEN"  # noqa: S105  # the variable's name
_COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_KINDS = "a number, auto, cpu, gpu or xpu"
_UNFIT_SIGNALS = {
    "SIGKILL": "cannot be handled by any process",
    "SIGSTOP": "cannot be handled by any process",
    "SIGCHLD": "comes whenever a process of rankwise's own ends, so it cannot ask the run to end",
    **dict.fromkeys(
        ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS", "SIGABRT"),
        "reports a fault in the process that gets it, which then ends",
    ),
}
"""Signals that can end no run gracefully, and why."""
_UNFIT_TO_PASS_ON = {
    **_UNFIT_SIGNALS,
    "SIGCHLD": "comes whenever a process of rankwise's own ends, so it is not passed on",
    **dict.fromkeys(
        ("SIGPIPE", "SIGXFSZ"),
        "is ignored by rankwise itself, as by every Python program, so it cannot pass it on",
    ),
}
_REAL_TIME = re.compile(r"(SIGRTMIN|SIGRTMAX)([+-]\d+)")


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The values of all options, under the names and with the types that torchrun gives them.

    Attributes:
        origins: for each option that was given, how: `--log-dir` or `PET_LOG_DIR`.
    """

    training_script: str
    training_script_args: tuple[str, ...]
    # Written by `python tools/run_arguments.py` from launch/options.py.
    module: bool
    no_python: bool
    run_path: bool
    start_method: str
    preload: list[str] | None
    nproc_per_node: str
    role: str
    numa_binding: str | None
    virtual_local_rank: bool
    on: str | None
    ray_resources: str
    max_restarts: int
    restart_backoff: Duration | None
    no_retry: list[str]
    retry_startup_errors: bool
    max_no_progress: int | None
    max_node_failures: int | None
    on_failure: str | None
    hang_timeout: Duration | None
    no_ledger: bool
    start_timeout: Duration | None
    timeout: Duration | None
    shutdown_timeout: Duration | None
    signals_to_handle: str
    forward_signals: str
    on_preemption: str
    keep_children: bool
    log_dir: str | None
    redirects: str
    tee: str
    log_size: int | None
    local_ranks_filter: str
    duplicate_stdout_filters: list[str]
    duplicate_stderr_filters: list[str]
    log_prefix: str | None
    log_format: str
    no_prefix: bool
    logs_specs: str | None
    quiet: bool
    verbose: bool
    report: str | None
    trace: str | None
    health_port: int | None
    health_host: str | None
    nnodes: str
    node_rank: int
    standalone: bool
    master_addr: str
    master_port: int | None
    rdzv_id: str
    rdzv_own_etcd: bool
    rdzv_once: bool
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_conf: str
    local_addr: str | None
    spares: int
    node_topology: str
    node_check: tuple[str, ...]
    virtual_clock: bool
    timing_only: bool
    every_rank: bool
    values: str
    synthetic_data: bool
    tokens_per_step: int | None
    record_values: str | None
    prediction: str | None
    sweep: tuple[str, ...]
    results: str | None
    format: str
    schedule: str
    seed: int
    explore: int | None
    replay: str | None
    device: str
    import_per_rank: tuple[str, ...]
    faults: tuple[str, ...]
    monitor_interval: float
    event_log_handler: str
    # The end of what is written.
    origins: Mapping[str, str] = {}

    def label(self, name: str) -> str:
        """How the user gave an option, for messages."""
        return self.origins.get(name, "--" + name.replace("_", "-"))

    def refuse_with(self, world: str) -> None:
        """Refuse what has no meaning there; raises `ConfigError` with the table's reason."""
        for option in options_refused(world):
            if option.name in self.origins:
                raise ConfigError(
                    f"{self.label(option.name)} has no meaning with {world}: "
                    f"{option.refused[world]}"
                )

    def refuse_without(self, needed: str) -> None:
        """Refuse what has no meaning without another option; raises `ConfigError`."""
        for option in options_needing(needed):
            if option.name in self.origins:
                raise ConfigError(f"{self.label(option.name)} has no meaning without {needed}")


def job_from(options: RunOptions, environ: Mapping[str, str]) -> Job:
    """Describe the run that the options ask for.

    Raises:
        ConfigError: a value cannot be used.
    """
    check_working_directory()
    counts = node_counts(options.nnodes, options.node_rank, label=options.label("nnodes"))
    check_rendezvous(options.rdzv_backend, options.rdzv_conf)
    _check_event_handler(options)
    _check_positive(options)
    size = _size(options, environ)
    _check_devices(options, size, environ)
    master = master_address(
        backend=options.rdzv_backend,
        endpoint=options.rdzv_endpoint,
        master_addr=options.master_addr,
        master_port=options.master_port,
        is_standalone=options.standalone,
    )
    program = _program(options, environ)
    cluster = None
    environment = thread_environment(size, environ)
    if options.no_ledger:
        environment["RANKWISE_LEDGER"] = "0"
    policy = _policy(options)
    run_id = _run_id(options)
    if counts.most > 1:
        from rankwise.cli.several_nodes import cluster_plan  # noqa: PLC0415  # only for several
        from rankwise.launch.cluster.addresses import interface_environment  # noqa: PLC0415  # the same

        cluster = cluster_plan(options, counts, policy)
        environment |= interface_environment(cluster.address, environ)
        run_id = options.rdzv_id  # the same on every node, so no random one
    elif not options.origins.keys().isdisjoint(BEYOND_RESTARTS):
        from rankwise.cli.several_nodes import plan_of_one_node  # noqa: PLC0415  # rarely given

        cluster = plan_of_one_node(options, policy, master.host)
    if _names_collector(environ):
        cluster = msgspec.structs.replace(
            cluster or plan_alone(policy, master.host), telemetry=True
        )
    if cluster is not None:
        cluster = msgspec.structs.replace(
            cluster,
            health_host=options.health_host or cluster.address,
            health_token=environ.get(HEALTH_TOKEN_VARIABLE, ""),
        )
    return Job(
        program=program,
        gang=_gang(options, size),
        policy=policy,
        cluster=cluster,
        run_id=run_id,
        role=_role(options),
        start_method=_start_method(options, program),
        preload=_preload(options, program, environ),
        python=python_interpreter(environ),
        environment=environment,
        master_addr=master.host,
        master_port=master.port,
        logs=_logs(options, size),
        on_failure=_failure_command(options),
        timeout=options.timeout,
        keep_children=options.keep_children,
        signals=_signals(options),
        heeds_all_signals=True,
        passed_signals=_passed_signals(options),
        virtual_local_rank=options.virtual_local_rank,
        cpus_by_rank=_cpus_by_rank(options, size),
        console=not options.quiet,
        verbose=options.verbose,
        log_format=options.log_format,
    )


def _program(options: RunOptions, environ: Mapping[str, str]) -> Program:
    name, args = options.training_script, options.training_script_args
    if options.run_path:
        from rankwise.launch.inside.function_payload import pack_function  # noqa: PLC0415  # rarely needed
        from rankwise.launch.inside.run_path import run_script_path  # noqa: PLC0415  # the same

        script = python_script(name, args)
        payload = pack_function(
            run_script_path, (script.path, *args), pass_rank=False, arguments_by_rank=False
        )
        return Function(name, payload)
    if options.no_python and options.module:
        raise ConfigError("--no-python and --module exclude each other: a module needs Python")
    if options.no_python:
        return executable(name, args, environ)
    if options.module:
        return python_module(name, args, environ)
    return script_from_standard_input(args) if name == "-" else python_script(name, args)


def _check_devices(options: RunOptions, size: int, environ: Mapping[str, str]) -> None:
    """With virtual local ranks, every worker is given one of the visible devices."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not options.virtual_local_rank or visible is None:
        return
    count = len(visible.split(",")) if visible else 0
    if count < size:
        raise ConfigError(
            f"{options.label('virtual_local_rank')} gives each of {size} workers a device, and "
            f"CUDA_VISIBLE_DEVICES names {count} ({visible!r})",
            hint="start fewer workers or make more devices visible",
        )


def _size(options: RunOptions, environ: Mapping[str, str]) -> int:
    label, asked = options.label("nproc_per_node"), options.nproc_per_node
    try:
        size = int(asked)
    except ValueError:
        return _size_by_kind(asked, label, environ)
    check_worker_count(size, label)
    return size


def _size_by_kind(kind: str, label: str, environ: Mapping[str, str]) -> int:
    from rankwise.launch.run.devices import (  # noqa: PLC0415  # a plain number is the common case
        TorchMissing,
        device_count_by_torch,
        visible_gpu_count,
    )

    if not kind.isidentifier():
        raise ConfigError(f"{label} is {shown(kind)}, expected {_KINDS}")
    if kind == "cpu":
        return usable_cpu_count()
    if kind == "auto":
        return visible_gpu_count(environ) or usable_cpu_count()
    if kind == "gpu":
        count = visible_gpu_count(environ)
    else:
        try:
            count = device_count_by_torch(kind, environ.get("PYTHON_EXEC") or sys.executable)
        except TorchMissing:
            # Whether the word is a mistake or a device, torch alone could tell.
            raise ConfigError(
                f"{label} is {shown(kind)}, expected {_KINDS}; other devices need torch, which is"
                " not installed"
            ) from None
        except ConfigError as error:
            raise ConfigError(
                f"{label} is {shown(kind)}, expected {_KINDS}, or a device that torch knows",
                hint=str(error),
            ) from None
    if count == 0:
        raise ConfigError(
            f"{label} is {kind!r}, and this machine has no such device that is visible",
            hint="give a number, or auto to fall back to one worker per CPU",
        )
    return count


def _gang(options: RunOptions, size: int) -> GangSpec:
    gang = GangSpec(size=size, hang_timeout=options.hang_timeout)
    if options.start_timeout is not None:
        gang = msgspec.structs.replace(gang, spawn_timeout=options.start_timeout)
    if options.shutdown_timeout is not None:
        gang = msgspec.structs.replace(gang, grace=options.shutdown_timeout)
    return gang


def _check_positive(options: RunOptions) -> None:
    for row in options_that_are_positive():
        value = getattr(options, row.name)
        if value is not None:
            check_positive(value, options.label(row.name), given=0)


def _failure_command(options: RunOptions) -> str | None:
    command = options.on_failure
    if command is not None and not command.strip():
        raise ConfigError(
            f"{options.label('on_failure')} is {command!r}, expected a shell command",
            hint="leave it out for none",
        )
    return command


def _policy(options: RunOptions) -> RestartPolicy:
    check_restarts(options.max_restarts, options.label("max_restarts"))
    if options.restart_backoff is None:
        return RestartPolicy(restarts_max=options.max_restarts)
    longest = Duration(max(60 * SECOND, options.restart_backoff))
    backoff = Backoff(initial=options.restart_backoff, longest=longest)
    return RestartPolicy(restarts_max=options.max_restarts, backoff=backoff)


def _run_id(options: RunOptions) -> str:
    run_id = options.rdzv_id
    if run_id == "none":
        return random_run_name()
    check_run_id(run_id, options.label("rdzv_id"))
    return run_id


def _role(options: RunOptions) -> str:
    check_role(options.role, options.label("role"))
    return options.role


def _start_method(options: RunOptions, program: Program) -> StartMethod:
    match options.start_method:
        case "subprocess" | "spawn" if isinstance(program, Function):
            return StartMethod.SPAWN
        case "fork" | "forkserver" if not isinstance(program, Executable):
            return StartMethod.FORKSERVER
        case "spawn" if not isinstance(program, Executable):
            return StartMethod.SPAWN
        case "auto" if isinstance(program, Script | Module):
            return StartMethod.AUTO
        case "auto" if isinstance(program, Function):
            return StartMethod.SPAWN
    return StartMethod.SUBPROCESS


def _preload(
    options: RunOptions, program: Program, environ: Mapping[str, str]
) -> tuple[str, ...] | None:
    if options.preload is None:
        return None
    label = options.label("preload")
    if options.start_method not in ("fork", "forkserver"):
        raise ConfigError(f"{label} has no effect without --start-method forkserver")
    modules = tuple(name.strip() for name in options.preload if name.strip())
    for name in modules:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"{label}: {name!r} is not a module's name")
        if not environ.get("PYTHON_EXEC"):
            try:
                check_preload(name, program, environ)
            except ConfigError as error:
                raise ConfigError(f"{label}: {error}") from None
    return modules


def _logs(options: RunOptions, size: int) -> LogPlan:
    _check_logs_specs(options)
    # What torch's variable may name besides is left as it is, as torchrun does.
    if options.label("log_prefix") not in option_named("log_prefix").variables:
        check_prefix(options.log_prefix, options.label("log_prefix"))
    if options.log_dir == "":
        raise ConfigError(
            f"{options.label('log_dir')} is '', expected a directory", hint="leave it out for none"
        )
    plan = LogPlan(
        directory=options.log_dir,
        redirects=parse_streams(options.redirects, option=options.label("redirects")),
        tee=parse_streams(options.tee, option=options.label("tee")),
        console_ranks=_console_ranks(options),
        stdout_filters=tuple(filter(None, options.duplicate_stdout_filters)),
        stderr_filters=tuple(filter(None, options.duplicate_stderr_filters)),
        prefix_template="" if options.no_prefix else options.log_prefix,
        file_bytes_max=options.log_size,
        log_specs=None if options.logs_specs == "default" else options.logs_specs,
    )
    if problems := log_plan_problems(plan, size=size, label=options.label):
        raise problems[0]
    _check_log_size(options, plan, size)
    return plan


def _check_log_size(options: RunOptions, plan: LogPlan, size: int) -> None:
    # A log directory /dev/null says that there are to be no files, whatever else is given.
    if plan.file_bytes_max is None or plan.log_specs or plan.directory == os.devnull:
        return
    if not has_log_files(plan, size):
        raise ConfigError(
            f"{options.label('log_size')} has no effect without log files",
            hint="write some by --redirects 3 or --tee 3",
        )


def _console_ranks(options: RunOptions) -> frozenset[int] | None:
    text = options.local_ranks_filter
    if not text:
        return None
    try:
        ranks = frozenset(map(int, text.split(",")))
    except ValueError:
        ranks = frozenset({-1})
    if min(ranks) < 0:
        raise ConfigError(
            f"{options.label('local_ranks_filter')} is {text!r}, expected a comma-separated list "
            "of integers, such as 0,1,2"
        )
    return ranks


def _check_logs_specs(options: RunOptions) -> None:
    if options.logs_specs in (None, "default"):
        return
    from importlib.metadata import entry_points  # noqa: PLC0415  # only with a plug-in

    if not entry_points(group="torchrun.logs_specs", name=options.logs_specs):
        raise ConfigError(
            f"{options.label('logs_specs')}: Could not find entrypoint under "
            f"'torchrun.logs_specs[{options.logs_specs}]' key",
            hint="is the package that brings it installed?",
        )


def _check_event_handler(options: RunOptions) -> None:
    if options.event_log_handler == "null":
        return
    from rankwise.compat.torch.elastic.events.handlers import get_logging_handler  # noqa: PLC0415  # rarely needed

    try:
        get_logging_handler(options.event_log_handler)
    except KeyError:
        raise ConfigError(
            f"{options.label('event_log_handler')} is {options.event_log_handler!r}, which is not "
            "registered with rankwise.compat.torch.elastic.events",
            hint="null and console always are",
        ) from None


def _signals(options: RunOptions) -> tuple[int, ...]:
    label = options.label("signals_to_handle")
    numbers = _signal_numbers(label, options.signals_to_handle, _UNFIT_SIGNALS)
    if not numbers:
        raise ConfigError(
            f"{label} names no signal, so nothing could end the run gracefully",
            hint=f"leave it out for {default_of('signals_to_handle')}",
        )
    return numbers


def _passed_signals(options: RunOptions) -> tuple[int, ...]:
    """The signals that ranks are sent; by default also those that the user wants to stop the run.

    Raises:
        ConfigError: one of them cannot be passed on.
    """
    label, given = options.label("forward_signals"), options.forward_signals
    words = [word.strip() for word in given.split(",")]
    if words == ["none"]:
        return ()
    if "none" in map(str.lower, words):
        raise ConfigError(f"{label} is {given!r}: none stands alone, and in small letters")
    numbers = _signal_numbers(label, given, _UNFIT_TO_PASS_ON)
    if not numbers:
        raise ConfigError(f"{label} names no signal", hint=f"to pass none on: {label}=none")
    for number in numbers:
        if number not in ENDING_SIGNALS:
            raise ConfigError(
                f"{label}: {signal_name(number)} ends no process, so its usual effect stays",
                hint="name signals such as SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU",
            )
    if given == default_of("forward_signals"):
        return numbers  # nobody has asked for it
    stopping = options.label("signals_to_handle")
    for number in _signals(options):
        if number in numbers:
            raise ConfigError(
                f"{label}: {signal_name(number)} stops the run ({stopping}), and is not passed on",
                hint=f"ranks are sent it then, too; else leave it out of {stopping}",
            )
    return numbers


def _signal_numbers(label: str, names: str, unfit: Mapping[str, str]) -> tuple[int, ...]:
    numbers = []
    for name in filter(None, map(str.strip, names.split(","))):
        number = _signal_number(name)
        if number is None:
            from rankwise.base.suggestions import nearest  # noqa: PLC0415  # only for mistakes

            meant = nearest(name.upper(), signal.Signals.__members__)
            hint = f"did you mean {meant}?" if meant else None
            told = f"{label}: {name!r} is not a signal's name, expected a name such as SIGTERM"
            raise ConfigError(told, hint=hint)
        why_not = unfit.get(signal_name(number))
        if why_not is not None:
            raise ConfigError(f"{label}: {name} {why_not}")
        numbers.append(number)
    return tuple(dict.fromkeys(numbers))


def _signal_number(name: str) -> int | None:
    """The number of `SIGTERM`, `SIGRTMIN+3`; None of what is no signal's name."""
    if name in signal.Signals.__members__:
        return int(signal.Signals[name])
    real_time = _REAL_TIME.fullmatch(name)
    if real_time is None:
        return None
    number = int(signal.Signals[real_time[1]]) + int(real_time[2])
    return number if signal.SIGRTMIN <= number <= signal.SIGRTMAX else None


def _cpus_by_rank(options: RunOptions, size: int) -> dict[int, frozenset[int]] | None:
    if options.numa_binding is None:
        return None
    from rankwise.launch.run.affinity import Binding, cpus_by_rank  # noqa: PLC0415  # rarely needed

    try:
        binding = Binding(options.numa_binding)
    except ValueError:
        raise ConfigError(f"numa binding {options.numa_binding!r} is not known") from None
    return cpus_by_rank(binding, size)


def _names_collector(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's own variables ask for metrics to be sent to a collector."""
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    goes_there = environ.get("OTEL_METRICS_EXPORTER", "").strip().lower() in ("", "otlp")
    return goes_there and not is_off and any(map(environ.get, _COLLECTOR_VARIABLES))
