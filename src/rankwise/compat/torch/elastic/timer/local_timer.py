"""Timers through a queue of `multiprocessing`, for workers that were made with it."""

import logging
import os
import signal
import time
from queue import Empty
from typing import Any

from rankwise.compat.torch.elastic.timer.api import (
    RequestQueue,
    TimerClient,
    TimerRequest,
    TimerServer,
    end_process,
    expired,
    register,
)

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

logger = logging.getLogger(__name__)


class LocalTimerClient(TimerClient):
    """Takes timers for this process, known by its pid, through `mp_queue`."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Take a timer."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        """Give it back."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """The server's end of the queue."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue

    def size(self) -> int:
        """How many requests are there, as the queue believes."""
        size: int = self._mp_queue.qsize()
        return size

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Take up to `size` requests within `timeout` seconds."""
        requests: list[TimerRequest] = []
        deadline = time.monotonic() + timeout
        while len(requests) < size:
            patience = deadline - time.monotonic()
            if patience <= 0:
                break
            try:
                requests.append(self._mp_queue.get(block=True, timeout=patience))
            except Empty:
                break
        return requests


class LocalTimerServer(TimerServer):
    """Ends with SIGKILL the processes whose timers have run out."""

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        self._timers: dict[tuple[Any, str], TimerRequest] = {}

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Take timers in, and out again."""
        register(self._timers, timer_requests)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of these processes."""
        self._timers = {key: t for key, t in self._timers.items() if key[0] not in worker_ids}

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """The timers that have run out before `deadline`, by pid."""
        return expired(self._timers, deadline)

    def _reap_worker(self, worker_id: Any) -> bool:
        return end_process(worker_id, signal.SIGKILL)
