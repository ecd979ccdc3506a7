"""One agent, run to its end: what `torch.distributed.launcher.api` offers.

Names that programs and tests replace (`LocalElasticAgent`, `events.record`,
`rdzv_registry.get_rendezvous_handler`) are looked up in this module when they are needed.
"""

import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any

import rankwise.compat.torch.elastic.rendezvous.registry as rdzv_registry
from rankwise.compat.torch.elastic import events, metrics
from rankwise.compat.torch.elastic.agent.server.api import RunResult, WorkerSpec
from rankwise.compat.torch.elastic.agent.server.health_check_server import (
    HealthCheckServer,
    create_healthcheck_server,
)
from rankwise.compat.torch.elastic.agent.server.local_elastic_agent import (
    EARLY_HEALTH_KNOB,
    HEALTH_TIMEOUT_S,
    TORCHELASTIC_HEALTH_CHECK_PORT,
    LocalElasticAgent,
    _AliveCallbackProxy,
    justknobs_check,
)
from rankwise.compat.torch.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsSpecs,
    SignalException,
)
from rankwise.compat.torch.elastic.multiprocessing.errors import ChildFailedError
from rankwise.compat.torch.elastic.rendezvous import RendezvousParameters
from rankwise.compat.torch.elastic.rendezvous.utils import parse_rendezvous_endpoint
from rankwise.compat.torch.elastic.utils.logging import get_logger
from rankwise.drivers.real.proc import check_proc
from rankwise.launch.launch_fields import LAUNCH_FIELDS, LaunchField
from rankwise.launch.options import option_named

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
RENDEZVOUS_TIMEOUT_S = 900

logger = get_logger(__name__)


def _complete(self: "LaunchConfig") -> None:
    """Fill in what no argument has said, as `__post_init__` of the config."""
    if self.rdzv_timeout != -1:
        self.rdzv_configs["timeout"] = self.rdzv_timeout
    else:
        self.rdzv_configs.setdefault("timeout", RENDEZVOUS_TIMEOUT_S)
    if self.logs_specs is None:
        self.logs_specs = DefaultLogsSpecs()
    if self.shutdown_timeout is None:
        self.shutdown_timeout = _shutdown_timeout()
    elif self.shutdown_timeout < 0:
        raise ValueError(f"shutdown_timeout must be non-negative, got {self.shutdown_timeout}")


def _made(each: LaunchField) -> tuple[str, Any, Any]:
    """A field of the table as `make_dataclass` takes it."""
    annotation = eval(each.type, {"Any": Any, "LogsSpecs": LogsSpecs})  # noqa: S307  # our table's
    if each.is_required:
        return each.name, annotation, field()
    if each.is_dictionary:
        return each.name, annotation, field(default_factory=dict)
    return each.name, annotation, field(default=each.default)


def _shutdown_timeout() -> int:
    row = option_named("shutdown_timeout")
    assert row.python is not None, "the table has its default for functions"
    (variable,) = row.variables
    return int(os.environ.get(variable, row.python.default))


_DOCSTRING = f"""What a launch is: one row of the table of options for each field.

    Attributes:
{"".join(f"        {each.name}: {each.help}{chr(10)}" for each in LAUNCH_FIELDS)}
    Raises:
        ValueError: `shutdown_timeout` is negative.
    """

if TYPE_CHECKING:

    @dataclass
    class LaunchConfig:
        """What a launch is; type checkers read its fields here."""

        # Written by `python tools/run_arguments.py` from launch/options.py.
        min_nodes: int
        max_nodes: int
        nproc_per_node: int
        logs_specs: LogsSpecs | None = None
        run_id: str = ""
        role: str = "default_role"
        rdzv_endpoint: str = ""
        rdzv_backend: str = "etcd"
        rdzv_configs: dict[str, Any] = field(default_factory=dict)
        rdzv_timeout: int = -1
        max_restarts: int = 3
        monitor_interval: float = 0.1
        start_method: str = "spawn"
        log_line_prefix_template: str | None = None
        metrics_cfg: dict[str, str] = field(default_factory=dict)
        local_addr: str | None = None
        event_log_handler: str = "null"
        numa_options: Any = None
        signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        duplicate_stdout_filters: list[str] | None = None
        duplicate_stderr_filters: list[str] | None = None
        virtual_local_rank: bool = False
        shutdown_timeout: int | None = None
        # The end of what is written.
else:
    LaunchConfig = make_dataclass(
        "LaunchConfig",
        map(_made, LAUNCH_FIELDS),
        # Python 3.11 sets no module: without it the class could not be pickled.
        namespace={"__post_init__": _complete, "__doc__": _DOCSTRING, "__module__": __name__},
    )


class elastic_launch:  # noqa: N801  # torch's name
    """Launches a function or a program on this node, together with the other nodes.

    `elastic_launch(config, entrypoint)(*args)` returns what the function returned, by global rank,
    for the ranks of this node.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: HealthCheckServer | None = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Launch; see `launch_agent` for what is returned and raised."""
        return launch_agent(
            self._config,
            self._entrypoint,
            list(args),
            health_check_server=self._health_check_server,
        )


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: HealthCheckServer | None = None,
) -> dict[int, Any]:
    """Run one agent to its end. TORCHELASTIC_SIGNALS_TO_HANDLE is set, and stays so.

    Returns:
        What the workers of this node returned, by global rank.

    Raises:
        ChildFailedError: workers failed, the last time as well.
        ConfigError: /proc is not mounted.
        SignalException: a signal came. The rendezvous stays open for the other nodes.
        Exception: whatever else the agent raised, as it is.
    """
    check_proc()
    if not config.run_id:
        config.run_id = str(uuid.uuid4().int)
        logger.warning("config has no run_id, generated a random run_id: %s", config.run_id)
    name = _get_entrypoint_name(entrypoint, args)
    logger.info("launching %s with %s", name, config)
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    master_addr, master_port = _get_addr_and_port(parameters)
    health_check_server = health_check_server or _early_health_check_server()
    os.environ[SIGNALS_VARIABLE] = config.signals_to_handle  # it stays, as programs expect
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=rdzv_registry.get_rendezvous_handler(parameters),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
    return _run_agent(config, spec, name, health_check_server)


def _run_agent(
    config: LaunchConfig,
    spec: WorkerSpec,
    name: str,
    health_check_server: HealthCheckServer | None,
) -> dict[int, Any]:
    assert config.logs_specs is not None, "made when the config was"
    assert config.shutdown_timeout is not None, "set when the config was made"
    agent = LocalElasticAgent(
        spec=spec,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout,
        health_check_server=health_check_server,
    )
    if health_check_server is not None and isinstance(
        health_check_server.alive_callback, _AliveCallbackProxy
    ):
        health_check_server.alive_callback.set_delegate(agent._get_alive_time)  # noqa: SLF001
    try:
        metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
        result = agent.run()
        # The agent has done what it was to do, whatever became of the workers.
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        values = _values_of(result, name)
    except ChildFailedError:
        _close(spec)
        raise
    except SignalException:
        # The rendezvous stays open: the others go on, or wait for this node to be restarted.
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    except BaseException as error:
        if isinstance(error, Exception):
            events.record(agent.get_event_failed(), config.event_log_handler)
        _close(spec)
        raise
    spec.rdzv_handler.shutdown()
    return values


def _values_of(result: RunResult | None, name: str) -> dict[int, Any]:
    if result is None:  # this node was a spare that was not needed
        return {}
    if result.is_failed():
        raise ChildFailedError(name=name, failures=result.failures)
    return result.return_values


def _close(spec: WorkerSpec) -> None:
    """End the rendezvous for all nodes; an error of that must not hide why the launch has failed.

    The other nodes cannot go on without us, and should not have to find that out.
    """
    try:
        spec.rdzv_handler.set_closed()
        spec.rdzv_handler.shutdown()
    except Exception:
        logger.exception("the rendezvous could not be shut down")


def _early_health_check_server() -> HealthCheckServer | None:
    """Answer questions about our health before the nodes have met, which may take long."""
    port = os.environ.get(TORCHELASTIC_HEALTH_CHECK_PORT)
    if port is None or not justknobs_check(EARLY_HEALTH_KNOB, default=False):
        return None
    try:
        server = create_healthcheck_server(
            alive_callback=_AliveCallbackProxy(), port=int(port), timeout=HEALTH_TIMEOUT_S
        )
        server.start()
    except Exception:  # the job matters more
        logger.warning("no health check server on port %s", port, exc_info=True)
        return None
    return server


def _get_entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: list[Any]) -> str:
    """What runs, in a word: a function's name, or the script that the interpreter is given."""
    if callable(entrypoint):
        return entrypoint.__name__
    if entrypoint == sys.executable:
        return next((arg for arg in args if not arg.startswith("-")), "")
    return entrypoint or ""


def _get_addr_and_port(rdzv_parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """Where rank 0 listens, if the rendezvous is static; else not known yet.

    Raises:
        ValueError: the endpoint of a static rendezvous, or its port, is missing.
    """
    if rdzv_parameters.backend != "static":
        return None, None
    endpoint = rdzv_parameters.endpoint.strip()
    if not endpoint:
        raise ValueError(
            "Endpoint is missing in endpoint. Try to add --master-addr and --master-port"
        )
    host, port = parse_rendezvous_endpoint(endpoint, default_port=-1)
    if port == -1:
        raise ValueError(f"port is missing in endpoint: {endpoint}. Try to specify --master-port")
    return host, port
