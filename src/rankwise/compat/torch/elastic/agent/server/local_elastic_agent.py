"""The agent whose workers are processes of its own node."""

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from string import Template
from typing import Any

from rankwise.compat.torch.elastic import events
from rankwise.compat.torch.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from rankwise.compat.torch.elastic.agent.server.health_check_server import (
    HealthCheckServer,
    create_healthcheck_server,
)
from rankwise.compat.torch.elastic.metrics import prof
from rankwise.compat.torch.elastic.multiprocessing import LogsSpecs, PContext, start_processes
from rankwise.compat.torch.elastic.utils import macros
from rankwise.compat.torch.elastic.utils.logging import get_logger
from rankwise.compat.torch.elastic.utils.process_state import (
    is_uninterruptible_state,
    read_proc_state,
)

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "LocalElasticAgent",
]

TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
HEALTH_TIMEOUT_S = 60
EARLY_HEALTH_KNOB = "ai_infra/pytorch_distributed:torchelastic_enable_healthcheck_before_rendezvous"
WATCHDOG_INTERVAL_S = 0.1

logger = get_logger(__name__)


def justknobs_check(name: str, default: bool = True) -> bool:  # noqa: ARG001  # torch's interface
    """Whether a feature is switched on: always; deployments of torch replace this function."""
    return True


class LocalElasticAgent(SimpleElasticAgent):
    """Starts the workers with `start_processes`.

    Args:
        spec: what the workers are.
        logs_specs: where their output goes.
        start_method: how function workers get their processes.
        exit_barrier_timeout: seconds that this node, when done, waits for the others.
        log_line_prefix_template: before each tee'd line, with `${role_name}`, `${local_rank}` and
            `${rank}`.
        shutdown_timeout: seconds that workers have to end before they are killed.
        health_check_server: one that listens already.
        uninterruptible_state_timeout: seconds that a worker may wait in the kernel where no signal
            reaches it before the node counts as unhealthy; 0 never asks. By default
            TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = 30,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        self._start_method = start_method
        self._pcontext: PContext | None = None
        self._rdzv_handler = spec.rdzv_handler
        self._log_line_prefix_template = log_line_prefix_template
        self._worker_watchdog: Any = None  # torch's `FileTimerServer`
        self._logs_specs = logs_specs
        self._health_check_server = health_check_server
        self._uninterruptible_state_timeout = _resolve_uninterruptible_state_timeout(
            uninterruptible_state_timeout
        )
        self._uninterruptible_state_first_seen: dict[int, float] = {}

    def _pause(self, seconds: float) -> None:
        """Wait until the workers have ended, or for `seconds`."""
        if self._pcontext is None:
            super()._pause(seconds)
        else:
            self._pcontext.wait(seconds)

    @prof
    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002
        self._shutdown(timeout=self._shutdown_timeout)

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        assert worker_group.store is not None, "the nodes have met"
        assert spec.entrypoint is not None, "checked when made"
        prefixes: dict[int, str] = {}
        args: dict[int, tuple[Any, ...]] = {}
        envs: dict[int, dict[str, str]] = {}
        for worker in worker_group.workers:
            local_rank = worker.local_rank
            envs[local_rank] = self._environment(worker_group, local_rank)
            args[local_rank] = tuple(macros.substitute(list(spec.args), str(local_rank)))
            if self._log_line_prefix_template:
                prefixes[local_rank] = Template(self._log_line_prefix_template).safe_substitute(
                    role_name=spec.role, rank=worker.global_rank, local_rank=local_rank
                )
        self._setup_local_watchdog(envs)
        self._setup_healthcheck()
        self._pcontext = start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=args,
            envs=envs,
            logs_specs=self._logs_specs,
            log_line_prefixes=prefixes or None,
            start_method=self._start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
        )
        return self._pcontext.pids()

    @prof
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None, "the workers have been started"
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        ours = {worker.id for worker in worker_group.workers}
        if ours != set(self._pcontext.pids().values()):
            logger.error("[%s] the workers are not the ones started", worker_group.spec.role)
            return RunResult(state=WorkerState.UNKNOWN)
        result = self._pcontext.wait(0)
        if result is None:
            timeout_s = self._uninterruptible_state_timeout
            if timeout_s > 0 and (
                stuck := self._check_uninterruptible_state_timeout(worker_group, timeout_s)
            ):
                return stuck
            return RunResult(state=WorkerState.HEALTHY)
        if result.is_failed():
            failures = {ranks[local]: failure for local, failure in result.failures.items()}
            return RunResult(state=WorkerState.FAILED, failures=failures)
        values = {ranks[local]: value for local, value in result.return_values.items()}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._worker_watchdog is not None:
            self._worker_watchdog.stop()
            self._worker_watchdog = None
        if self._health_check_server is not None:
            self._health_check_server.stop()
            self._health_check_server = None
        if self._pcontext is not None:
            context, self._pcontext = self._pcontext, None
            context.close(death_sig, timeout)

    def _environment(self, group: WorkerGroup, local_rank: int) -> dict[str, str]:
        """The variables that tell a worker its place."""
        spec = group.spec
        worker = group.workers[local_rank]
        environment = {
            "RANK": str(worker.global_rank),
            "GROUP_RANK": str(group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "WORLD_SIZE": str(worker.world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        self._set_local_rank_env(environment, local_rank, spec)
        if "OMP_NUM_THREADS" in os.environ:
            environment["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
        return environment

    def _set_local_rank_env(
        self, worker_env: dict[str, str], local_rank: int, spec: WorkerSpec
    ) -> None:
        visible = os.getenv("CUDA_VISIBLE_DEVICES")
        if not spec.virtual_local_rank:
            worker_env["LOCAL_RANK"] = str(local_rank)
            if visible is not None:
                worker_env["CUDA_VISIBLE_DEVICES"] = visible
            return
        devices = None if visible is None else visible.split(",")
        if devices is not None and local_rank >= len(devices):
            raise ValueError(
                f"local_rank {local_rank} exceeds available GPUs in CUDA_VISIBLE_DEVICES={visible}"
            )
        worker_env["LOCAL_RANK"] = "0"
        worker_env["CUDA_VISIBLE_DEVICES"] = (
            str(local_rank) if devices is None else devices[local_rank].strip()
        )

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Serve the workers' timers if the environment asks for it, and tell them where."""
        path = os.getenv(TORCHELASTIC_TIMER_FILE)
        if os.getenv(TORCHELASTIC_ENABLE_FILE_TIMER) == "1":
            path = path or os.path.join(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}")
            self._worker_watchdog = _worker_timer_server()(
                file_path=path,
                run_id=envs[0]["TORCHELASTIC_RUN_ID"] if envs else "",
                max_interval=WATCHDOG_INTERVAL_S,
                daemon=True,
                log_event=self._log_watchdog_event,
            )
            self._worker_watchdog.start()
        if path is not None:
            for environment in envs.values():
                environment[TORCHELASTIC_TIMER_FILE] = path

    @staticmethod
    def _get_current_time_secs() -> int:
        return int(time.time())

    def _setup_healthcheck(self) -> None:
        """Answer questions about our health if the environment names a port."""
        text = os.getenv(TORCHELASTIC_HEALTH_CHECK_PORT)
        if text is None:
            return
        alive_callback: Callable[[], int] = self._get_alive_time
        if justknobs_check(EARLY_HEALTH_KNOB, default=False):
            if self._health_check_server is not None:
                return
        elif self._worker_watchdog is None:
            alive_callback = LocalElasticAgent._get_current_time_secs
        else:
            alive_callback = self._worker_watchdog.get_last_progress_time
        try:
            port = int(text)
        except ValueError:
            logger.warning(
                "%s is %r, expected a port; no health check server is started",
                TORCHELASTIC_HEALTH_CHECK_PORT,
                text,
            )
            return
        self._health_check_server = create_healthcheck_server(
            alive_callback=alive_callback, port=port, timeout=HEALTH_TIMEOUT_S
        )
        self._health_check_server.start()

    def _get_alive_time(self) -> int:
        """The last sign of life, in seconds since 1970.

        It is the watchdog's while there is one; none is expected while other nodes are waited for.
        """
        if self._in_exit_barrier or self._worker_watchdog is None:
            return int(time.time())
        progressed_at: int = self._worker_watchdog.get_last_progress_time()
        return progressed_at

    def _log_watchdog_event(self, name: str, request: Any) -> None:
        details = {"watchdog_event": name}
        if request is not None:
            details |= {
                "worker_pid": str(request.worker_pid),
                "scope_id": request.scope_id,
                "expiration_time": str(request.expiration_time),
                "signal": str(request.signal),
            }
        event = self._event(name, events.EventSource.AGENT, "RUNNING", details)
        events.record(event, self._worker_group.spec.event_log_handler)

    def _check_uninterruptible_state_timeout(
        self, worker_group: WorkerGroup, timeout: float
    ) -> RunResult | None:
        """Whether a worker waits in the kernel for too long: no restart would help this node."""
        if self._pcontext is None:
            return None
        pids = set(self._pcontext.pids().values())
        seen = self._uninterruptible_state_first_seen
        for pid in set(seen) - pids:
            del seen[pid]
        result = None
        for pid in sorted(pids):
            waited_s = self._update_uninterruptible_dwell(pid)
            if waited_s is not None and waited_s >= timeout:
                logger.error(
                    "[%s] process %s has not been interruptible for %.0f s",
                    worker_group.spec.role,
                    pid,
                    waited_s,
                )
                # It holds on to a device, or to a file, that another worker would wait for too.
                self._remaining_restarts = 0
                result = RunResult(state=WorkerState.UNHEALTHY)
        return result

    def _update_uninterruptible_dwell(self, pid: int) -> float | None:
        """Seconds that a process has been uninterruptible; None if it is not, or not known."""
        state = read_proc_state(pid)
        if state is None:
            return None
        if not is_uninterruptible_state(state):
            self._uninterruptible_state_first_seen.pop(pid, None)
            return None
        now = time.monotonic()
        return now - self._uninterruptible_state_first_seen.setdefault(pid, now)


def _worker_timer_server() -> type[Any]:
    """Torch's server of timers, changed in two points so that the agent survives it.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    from rankwise.compat.torch.elastic.timer import FileTimerServer  # noqa: PLC0415  # loads torch

    class WorkerTimerServer(FileTimerServer):  # type: ignore[misc]  # no types here
        def stop(self) -> None:
            # Its thread waits for a first client. Without one it would stay.
            with suppress(FileNotFoundError):
                os.close(os.open(self._file_path, os.O_RDWR | os.O_NONBLOCK))
            super().stop()

        def _reap_worker(self, worker_pid: int, signal: int) -> bool:
            # torch's server ends its own process next: the agent has a failure to report.
            return worker_pid == os.getpid() or super()._reap_worker(worker_pid, signal)

    return WorkerTimerServer


class _AliveCallbackProxy:
    """Stands for an agent's sign of life until there is an agent."""

    def __init__(self) -> None:
        self._delegate: Callable[[], int] | None = None

    def set_delegate(self, delegate: Callable[[], int]) -> None:
        """Ask `delegate` from now on."""
        self._delegate = delegate

    def __call__(self) -> int:
        return int(time.time()) if self._delegate is None else self._delegate()


def _resolve_uninterruptible_state_timeout(explicit: float | None) -> float:
    """Seconds; 0 if the variable is unset or no number."""
    if explicit is not None:
        return max(0.0, float(explicit))
    text = os.getenv(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, "0")
    try:
        return max(0.0, float(text))
    except ValueError:
        logger.warning(
            "%s is %r, expected seconds; it is off",
            TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT,
            text,
        )
        return 0.0
