"""The agent's life: meet, count ranks, start workers, watch them, start them again, finish.

`SimpleElasticAgent` leaves to its subclasses how workers are started, watched and stopped; that
inheritance is torch's interface, which programs and tests build upon. rankwise's own agent is
`rankwise.core.agent`; this one serves those who compose their own.

`_pause` returns after `monitor_interval`, or as soon as there is something to look at. The
rendezvous can only be asked, since any package may bring its own.
"""

import json
import os
import socket
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGTERM, Signals
from typing import Any

from rankwise.compat.torch.elastic.agent.server.worker_group import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    _RoleInstanceInfo,
)
from rankwise.compat.torch.elastic.events import Event, EventSource, record
from rankwise.compat.torch.elastic.metrics import prof, put_metric
from rankwise.compat.torch.elastic.multiprocessing import ProcessFailure, SignalException
from rankwise.compat.torch.elastic.rendezvous import RendezvousGracefulExitError
from rankwise.compat.torch.elastic.utils import store as store_util
from rankwise.compat.torch.elastic.utils.logging import get_logger
from rankwise.drivers.real.stores.names import full_name_of

__all__ = [
    "DEFAULT_ROLE",
    "ElasticAgent",
    "ProcessFailure",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "_RoleInstanceInfo",
]

DEFAULT_ROLE = "default"
_TERMINAL_STATE_SYNC_ID = "torchelastic/agent/terminal_state"
_ROLE_INFO_PREFIX = "torchelastic/role_info/"
_ASSIGNED_RANKS_PREFIX = "torchelastic/assigned_ranks/"

logger = get_logger(__name__)


class ElasticAgent(ABC):
    """Looks after the workers of one node."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Start the workers and look after them until they have succeeded, or failed for good."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The workers of a role, as they are now."""


class SimpleElasticAgent(ElasticAgent):
    """An agent for workers of one role.

    Args:
        spec: what the workers are.
        exit_barrier_timeout: seconds that this node, when done, waits for the others.
        shutdown_timeout: seconds that workers have to end before they are killed.
    """

    def __init__(
        self, spec: WorkerSpec, exit_barrier_timeout: float = 300, shutdown_timeout: int = 30
    ) -> None:
        self._worker_group = WorkerGroup(spec)
        self._remaining_restarts = spec.max_restarts
        self._store: Any = None
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._total_execution_time = 0
        self._in_exit_barrier = False

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:  # noqa: ARG002
        """The workers, as they are now."""
        return self._worker_group

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start them; return their ids by local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop those that there are."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look how they are."""

    @abstractmethod
    def _shutdown(self, death_sig: Signals = SIGTERM, timeout: int = 30) -> None:
        """Stop the workers and let go of everything."""

    def _pause(self, seconds: float) -> None:
        """Wait until the workers are worth looking at, or for `seconds`."""
        threading.Event().wait(seconds)

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Start the workers and look after them.

        Returns:
            What became of them; None if this node was a spare that was not needed.

        Raises:
            SignalException: a signal came; the workers have been stopped with it.
        """
        began_at = time.monotonic()
        is_shut_down = False
        try:
            result = self._invoke_run(role)
            self._total_execution_time = int(time.monotonic() - began_at)
            self._record_metrics(result)
            self._record_worker_events(result)
            return result  # noqa: TRY300  # an else would stand below the spare's way out
        except RendezvousGracefulExitError as error:
            logger.info("left the rendezvous: %s", error)
            return None  # type: ignore[return-value]  # as torch does
        except SignalException as error:
            logger.warning("stopping all workers with %s", error.sigval)
            self._shutdown(error.sigval, timeout=self._shutdown_timeout)
            is_shut_down = True
            raise
        finally:
            if not is_shut_down:
                self._shutdown(timeout=self._shutdown_timeout)
            self._total_execution_time = int(time.monotonic() - began_at)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002
        spec = self._worker_group.spec
        logger.info("[%s] starting workers of %s", spec.role, spec.get_entrypoint_name())
        self._initialize_workers(self._worker_group)
        while True:
            assert self._worker_group.state != WorkerState.INIT, "the workers have been started"
            self._pause(spec.monitor_interval)
            result = self._monitor_workers(self._worker_group)
            state = self._worker_group.state = result.state
            put_metric(f"workers.{spec.role}.remaining_restarts", self._remaining_restarts)
            put_metric(f"workers.{spec.role}.{state.name.lower()}", 1)
            match state:
                case WorkerState.SUCCEEDED:
                    self._exit_barrier()
                    return result
                case WorkerState.FAILED | WorkerState.UNHEALTHY:
                    if self._remaining_restarts == 0:
                        self._stop_workers(self._worker_group)
                        self._worker_group.state = WorkerState.FAILED
                        return result
                    self._remaining_restarts -= 1
                    logger.info(
                        "[%s] workers are %s; starting all again, %s restarts left",
                        spec.role,
                        state.name,
                        self._remaining_restarts,
                    )
                    self._restart_workers(self._worker_group)
                case WorkerState.HEALTHY:
                    self._restart_for_newcomers(spec)
                case _:
                    raise Exception(  # noqa: TRY002  # torch's, which tests catch as such
                        f"[{spec.role}] Worker group in {state.name} state"
                    )

    def _restart_for_newcomers(self, spec: WorkerSpec) -> None:
        waiting = spec.rdzv_handler.num_nodes_waiting()
        if waiting > 0:
            logger.info("[%s] %s nodes want to join; starting all again", spec.role, waiting)
            self._restart_workers(self._worker_group)

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Meet, then start a fresh set of workers."""
        self._rendezvous(worker_group)
        for local_rank, worker_id in self._start_workers(worker_group).items():
            worker = worker_group.workers[local_rank]
            worker.id = worker_id
            record(
                self._construct_event("START", EventSource.WORKER, worker),
                worker_group.spec.event_log_handler,
            )
        worker_group.state = WorkerState.HEALTHY

    @prof
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, meet again, start them again."""
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    @prof
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other nodes, and give each worker its ranks."""
        spec = worker_group.spec
        with self.record_duration("RENDEZVOUS"):
            meeting = spec.rdzv_handler.next_rendezvous()
        listens = meeting.bootstrap_store_info
        self._store = meeting.store
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            worker_group.workers = self._assign_worker_ranks(
                meeting.store, meeting.rank, meeting.world_size, spec
            )
        worker_group.store = meeting.store
        worker_group.group_rank = meeting.rank
        worker_group.group_world_size = meeting.world_size
        if listens is not None:
            worker_group.master_addr = spec.master_addr or listens.master_addr
            worker_group.master_port = spec.master_port or listens.master_port
        else:
            worker_group.master_addr, worker_group.master_port = spec.master_addr, spec.master_port
        logger.info(
            "[%s] node %s of %s, ranks %s, master %s:%s, %s restarts left",
            spec.role,
            meeting.rank,
            meeting.world_size,
            [worker.global_rank for worker in worker_group.workers],
            worker_group.master_addr,
            worker_group.master_port,
            self._remaining_restarts,
        )

    @prof
    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Count the ranks of this node's workers.

        Nodes may have different numbers of workers and different roles: each tells the first one
        of its own through the store, and reads what that one has counted. Where all are alike,
        TORCH_ELASTIC_WORKER_IDENTICAL=1 spares them the store.
        """
        size = spec.local_world_size
        if os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL", "0") == "1":
            world_size = role_world_size = group_world_size * size
            first_rank = first_role_rank = group_rank * size
        else:
            own = _RoleInstanceInfo(spec.role, group_rank, size)
            store.set(f"{_ROLE_INFO_PREFIX}{group_rank}", own.serialize())
            if group_rank == 0:
                _count_ranks(store, group_world_size)
            first_rank, world_size, first_role_rank, role_world_size = json.loads(
                store.get(f"{_ASSIGNED_RANKS_PREFIX}{group_rank}")
            )
        return [
            Worker(
                local_rank=local_rank,
                global_rank=first_rank + local_rank,
                role_rank=first_role_rank + local_rank,
                world_size=world_size,
                role_world_size=role_world_size,
            )
            for local_rank in range(size)
        ]

    def _exit_barrier(self) -> None:
        """Wait for the other nodes to be done as well; the store may live in one of them."""
        began_at = time.monotonic()
        self._in_exit_barrier = True
        try:
            store_util.barrier(
                store=self._store,
                world_size=self._worker_group.group_world_size,  # type: ignore[arg-type]
                key_prefix=_TERMINAL_STATE_SYNC_ID,
                barrier_timeout=self._exit_barrier_timeout,
            )
        except SignalException:
            raise
        except Exception:  # done is done, whatever the others do
            waited_s = time.monotonic() - began_at
            logger.warning("the other nodes did not finish within %.0f s", waited_s, exc_info=True)
        finally:
            self._in_exit_barrier = False

    def get_event_failed(self) -> Event:
        """What to record of a launch that ends with the exception being handled."""
        return self._construct_event(
            state="FAILED", source=EventSource.AGENT, raw_error=traceback.format_exc()
        )

    def get_event_succeeded(self) -> Event:
        """What to record of a launch that has come to its end."""
        return self._construct_event(state="SUCCEEDED", source=EventSource.AGENT)

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record how long the block took, as an event of this node."""
        began_at = time.perf_counter()
        try:
            yield
        finally:
            duration_ms = (time.perf_counter() - began_at) * 1000
            record(
                self._construct_event(
                    state=state, source=EventSource.AGENT, duration_ms=duration_ms
                ),
                self._worker_group.spec.event_log_handler,
            )

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            event = self._construct_event(
                state=_state_of(worker, result),
                source=EventSource.WORKER,
                worker=worker,
                raw_error=json.dumps(failure.error_file_data) if failure else None,
                exit_code=failure.exitcode if failure else None,
                worker_pid=failure.pid if failure else None,
            )
            record(event, self._worker_group.spec.event_log_handler)

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        details: dict[str, Any] = {
            "group_world_size": self._worker_group.group_world_size,
            "entry_point": self._worker_group.spec.get_entrypoint_name(),
        }
        if worker is not None:
            # Each in a list of one, as readers of these records expect it.
            details |= {
                "local_rank": [worker.local_rank],
                "role_rank": [worker.role_rank],
                "role_world_size": [worker.role_world_size],
                "exit_code": [exit_code],
                "worker_pid": [worker_pid],
            }
        name = f"torchelastic.worker.status.{state}"
        event = self._event(name, source, state, details)
        event.metadata |= {"raw_error": raw_error, "duration_ms": duration_ms}
        if worker is not None:
            event.metadata |= {"global_rank": worker.global_rank, "worker_id": str(worker.id)}
        return event

    def _event(self, name: str, source: EventSource, state: str, details: dict[str, Any]) -> Event:
        """What there is to say of this node in any event."""
        group = self._worker_group
        spec = group.spec
        return Event(
            name,
            source=source,
            metadata={
                "run_id": spec.rdzv_handler.get_run_id(),
                "global_rank": None,
                "group_rank": group.group_rank,
                "worker_id": None,
                "role": spec.role,
                "hostname": _get_fq_hostname(),
                "state": state,
                "total_run_time": self._total_execution_time,
                "rdzv_backend": spec.rdzv_handler.get_backend(),
                "raw_error": None,
                "metadata": json.dumps(details),
                "agent_restarts": spec.max_restarts - self._remaining_restarts,
            },
        )

    def _record_metrics(self, group_results: RunResult) -> None:
        spec = self._worker_group.spec
        is_failed = group_results.is_failed()
        had_restarts = self._remaining_restarts != spec.max_restarts
        self._record_flakiness_metric(is_failed)
        put_metric(f"workers.{spec.role}.run_total", 1)
        for name, is_true in (
            ("run_success_with_retries", not is_failed and had_restarts),
            ("run_success_no_retries", not is_failed and not had_restarts),
            ("run_failed_with_retries", is_failed and had_restarts),
            ("run_failed_no_retries", is_failed and not had_restarts),
        ):
            self._record_metric_with_condition(name, is_true)

    def _record_metric_with_condition(self, metric_name: str, condition: bool) -> None:
        put_metric(f"workers.{self._worker_group.spec.role}.{metric_name}", int(condition))

    def _record_flakiness_metric(self, is_failed: bool = False) -> None:
        """How much of the restarts was used, in percent; all of it after a failure."""
        spec = self._worker_group.spec
        unused = (self._remaining_restarts + 1) / (spec.max_restarts + 1)
        flakiness = 100.0 if is_failed else 100.0 - 100.0 * unused
        put_metric(f"workers.{spec.role}.flakiness", int(flakiness))


def _count_ranks(store: Any, group_world_size: int) -> None:
    """Count the ranks of all nodes' workers in the order of the nodes, and tell each its own."""
    nodes = range(group_world_size)
    told = store.multi_get([f"{_ROLE_INFO_PREFIX}{node}" for node in nodes])
    infos = [_RoleInstanceInfo.deserialize(data) for data in told]
    role_sizes: dict[str, int] = defaultdict(int)
    for info in infos:
        role_sizes[info.role] += info.local_world_size
    world_size = sum(role_sizes.values())
    next_rank = 0
    next_role_rank: dict[str, int] = defaultdict(int)
    assigned = []
    for info in infos:
        own = [next_rank, world_size, next_role_rank[info.role], role_sizes[info.role]]
        assigned.append(json.dumps(own))
        next_rank += info.local_world_size
        next_role_rank[info.role] += info.local_world_size
    store.multi_set([f"{_ASSIGNED_RANKS_PREFIX}{node}" for node in nodes], assigned)


def _state_of(worker: Worker, result: RunResult) -> str:
    """How one worker ended, in a group that ended like this."""
    has_failed = worker.global_rank in result.failures
    if result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED} and not has_failed:
        return "TERMINATED"
    if has_failed or worker.global_rank in result.return_values:
        return result.state.value
    raise ValueError(f"Unknown worker: {worker.global_rank}")


def _get_fq_hostname() -> str:
    return full_name_of(socket.gethostname())
