"""What all timers have in common: requests, the client's face, and the server's loop."""

import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from rankwise.base.errors import LocalProtocolError

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]

logger = logging.getLogger(__name__)


class TimerRequest:
    """A worker takes a timer, or gives it back.

    Attributes:
        worker_id: who, in whatever way client and server tell workers apart.
        scope_id: which of its timers.
        expiration_time: when it runs out, in seconds since 1970; negative gives it back.
    """

    __slots__ = ["expiration_time", "scope_id", "worker_id"]

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TimerRequest):
            return False
        return (self.worker_id, self.scope_id, self.expiration_time) == (
            other.worker_id,
            other.scope_id,
            other.expiration_time,
        )

    __hash__ = None  # type: ignore[assignment]  # as in torch: its fields may change


RequestT = TypeVar("RequestT", bound=TimerRequest)


class TimerClient(ABC):
    """What a worker takes timers with."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Take a timer; one of the same scope is replaced."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """Give a timer back."""


class RequestQueue(ABC):
    """Where a server finds the requests of its workers."""

    @abstractmethod
    def size(self) -> int:
        """How many requests are there at least."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Take up to `size` requests, waiting for `timeout` seconds at most."""


class TimerServer(ABC):
    """Keeps the timers of the workers of one node, in a thread of its own.

    Args:
        request_queue: where requests come from.
        max_interval: seconds after which expired timers are looked for at the latest.
        daemon: whether the program's end waits for the thread.
    """

    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool = True
    ) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Take timers in, and out again."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Forget all timers of these workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """The timers that have run out before `deadline`, by worker."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker; say whether it has ended."""

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        """End a worker; one that cannot be ended counts as ended, or its timers stayed for ever."""
        try:
            return self._reap_worker(worker_id)
        except Exception:
            logger.exception("worker %s could not be ended", worker_id)
            return True

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:
                logger.exception("the watchdog of timers has met an error, and continues")

    def _run_watchdog(self) -> None:
        # At least one, so that an empty queue is waited for.
        batch_size = max(1, self._request_queue.size())
        self.register_timers(self._request_queue.get(batch_size, self._max_interval))
        reaped = set()
        for worker_id, expired in self.get_expired_timers(time.time()).items():
            scopes = [timer.scope_id for timer in expired]
            logger.info("ending worker %s: its timers %s have run out", worker_id, scopes)
            if self._reap_worker_no_throw(worker_id):
                reaped.add(worker_id)
            else:
                logger.error("worker %s has not ended; trying again", worker_id)
        self.clear_timers(reaped)

    def start(self) -> None:
        """Begin to watch."""
        self._watchdog_thread = threading.Thread(
            target=self._watchdog_loop, daemon=self._daemon, name="rankwise-timers"
        )
        self._watchdog_thread.start()

    def stop(self) -> None:
        """Stop watching; returns within `max_interval`."""
        self._stop_signaled = True
        if self._watchdog_thread is not None:
            self._watchdog_thread.join(self._max_interval + 1)
            self._watchdog_thread = None


def register(timers: dict[tuple[Any, str], RequestT], requests: Iterable[RequestT]) -> None:
    """Take timers in, and out again; they are known by worker and scope."""
    for request in requests:
        key = request.worker_id, request.scope_id
        if request.expiration_time < 0:
            timers.pop(key, None)
        else:
            timers[key] = request


def expired(timers: Mapping[Any, RequestT], deadline: float) -> dict[Any, list[RequestT]]:
    """The timers that have run out before `deadline`, by worker."""
    found: dict[Any, list[RequestT]] = {}
    for timer in timers.values():
        if timer.expiration_time <= deadline:
            found.setdefault(timer.worker_id, []).append(timer)
    return found


def end_process(pid: int, signal: int) -> bool:
    """End a worker; say whether it has ended."""
    try:
        os.kill(pid, signal)
    except ProcessLookupError:
        logger.info("process %s has ended already", pid)
    except OSError:
        logger.exception("process %s could not be ended", pid)
        return False
    return True


_timer_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Say with which client this process takes its timers."""
    global _timer_client  # noqa: PLW0603  # torch's interface: one client per process
    _timer_client = timer_client


@contextmanager
def expires(
    after: float, scope: str | None = None, client: TimerClient | None = None
) -> Iterator[None]:
    """End this worker if the block takes longer than `after` seconds.

    Args:
        after: seconds.
        scope: names the timer; by default the caller's file and line, so that a block that is
            entered again while it is entered starts its own timer anew.
        client: takes the timer instead of the configured one.

    Raises:
        LocalProtocolError: there is no client; it is a RuntimeError.
    """
    client = client or _timer_client
    if client is None:
        raise TimerClientMissing(
            "no timer client was configured", hint="call timer.configure(client) in the worker"
        )
    if scope is None:
        frame = sys._getframe(2)  # noqa: SLF001  # over contextlib's __enter__ to the caller
        scope = f"{frame.f_code.co_filename}#{frame.f_lineno}"
    client.acquire(scope, time.time() + after)
    try:
        yield
    finally:
        client.release(scope)


class TimerClientMissing(LocalProtocolError, RuntimeError):
    """A timer was asked for, and no client was configured."""


def is_process_running(pid: int) -> bool:
    """Whether there is a process `pid` that we could signal."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
