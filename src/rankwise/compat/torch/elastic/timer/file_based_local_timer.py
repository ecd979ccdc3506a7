"""Timers through a FIFO, for workers of any origin on one node.

Differences from torch on purpose: a server whose timer runs out ends the worker only, not itself,
since the agent would take all other workers and the report of the failure along; it opens the FIFO
for reading and writing, so that neither its start nor its end waits for a client.
"""

import errno
import json
import os
import select
import selectors
import signal as signals
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.compat.torch.elastic.timer.api import (
    TimerClient,
    TimerRequest,
    end_process,
    expired,
    is_process_running,
    register,
)
from rankwise.compat.torch.elastic.timer.debug_info_logging import (
    log_debug_info_for_expired_timers,
)
from rankwise.compat.torch.elastic.utils.logging import get_logger

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

logger = get_logger(__name__)

OPEN_ATTEMPTS = 10
OPEN_PAUSE_S = 0.1
_READ_BYTES = 1 << 16


class FileTimerRequest(TimerRequest):
    """A process takes a timer, or gives it back, as one line of JSON.

    Attributes:
        signal: what ends the process when the timer runs out; 0 or less spares it.
    """

    __slots__ = ["signal", "version"]

    def __init__(
        self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0
    ) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = 1
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        """The process."""
        pid: int = self.worker_id
        return pid

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, FileTimerRequest)
            and super().__eq__(other)
            and (self.version, self.signal) == (other.version, other.signal)
        )

    __hash__ = None

    def to_json(self) -> str:
        """The request as one line."""
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": int(self.signal),
            }
        )


class FileTimerClient(TimerClient):
    """Takes timers for this process through the FIFO at `file_path`.

    Args:
        file_path: made by a `FileTimerServer`; workers find it in TORCHELASTIC_TIMER_FILE.
        signal: what ends this process when a timer runs out.
    """

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        super().__init__()
        self._file_path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Take a timer.

        Raises:
            BrokenPipeError: there is no server.
            ConfigError: the scope's name is too long for one write.
        """
        self._send_request(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        """Give a timer back; raises as `acquire` does."""
        self._send_request(FileTimerRequest(os.getpid(), scope_id, -1, 0))

    def _send_request(self, request: FileTimerRequest) -> None:
        line = (request.to_json() + "\n").encode()
        if len(line) > select.PIPE_BUF:
            # Longer writes are not atomic, and would tear the lines of other workers.
            raise RequestTooLong(
                f"a timer request has {len(line)} bytes, at most {select.PIPE_BUF} can be sent: "
                f"{request.scope_id[:80]}…",
                hint="give the scope a shorter name",
            )
        fd = self._open()
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def _open(self) -> int:
        """Open the FIFO without waiting for ever for a server that may not have started yet."""
        for attempts_left in range(OPEN_ATTEMPTS - 1, -1, -1):
            try:
                return os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if attempts_left == 0 or error.errno not in (errno.ENXIO, errno.ENOENT):
                    raise BrokenPipeError(
                        "the timer request could not be sent: no FileTimerServer reads "
                        f"{self._file_path}"
                    ) from error
            threading.Event().wait(OPEN_PAUSE_S)  # nothing tells when a FIFO gets its reader
        raise AssertionError("the last attempt returns or raises")


class RequestTooLong(ConfigError, RuntimeError):
    """A request would not fit into one atomic write."""


class FileTimerServer:
    """Keeps the timers of the workers of one node.

    Args:
        file_path: where the FIFO is made; a file that is there is replaced.
        run_id: for the log.
        max_interval: seconds after which expired timers are looked for at the latest.
        daemon: whether the program's end waits for the thread.
        log_event: is told `watchdog started`, `timer expired`, `kill worker process` with the
            request, `watchdog stopped`.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        self._file_path = file_path
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event or (lambda _name, _request: None)
        self._timers: dict[tuple[int, str], FileTimerRequest] = {}
        self._request_count = 0
        self._stop_signaled = False
        self._run_once = False
        self._watchdog_thread: threading.Thread | None = None
        self._last_progress_time = int(time.time())
        self._rest = b""
        with suppress(FileNotFoundError):
            os.remove(file_path)
        os.mkfifo(file_path, 0o600)
        self._fifo_fd = os.open(file_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._waking_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def start(self) -> None:
        """Begin to watch."""
        self._watchdog_thread = threading.Thread(
            target=self._watchdog_loop, daemon=self._daemon, name="rankwise-file-timers"
        )
        self._watchdog_thread.start()
        self._log_event("watchdog started", None)

    def stop(self) -> None:
        """Stop watching, and remove the FIFO. Harmless the second time."""
        self._stop_signaled = True
        self._end_thread()
        self._log_event("watchdog stopped", None)

    def run_once(self) -> None:
        """Take in what has been sent, look for expired timers once more, and stop."""
        self._run_once = True
        self._end_thread()

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether there is a process `pid` that we could signal."""
        return is_process_running(pid)

    def get_last_progress_time(self) -> int:
        """When expired timers were last looked for, in seconds since 1970."""
        return self._last_progress_time

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Take timers in, and out again."""
        self._request_count += len(timer_requests)
        register(self._timers, timer_requests)

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Forget the timers of these processes, and of those that have ended."""
        self._timers = {
            key: timer
            for key, timer in self._timers.items()
            if key[0] not in worker_pids and self.is_process_running(key[0])
        }

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """The timers that have run out before `deadline`, by pid."""
        return expired(self._timers, deadline)

    def _end_thread(self) -> None:
        if self._fifo_fd < 0:
            return
        os.eventfd_write(self._waking_fd, 1)
        if self._watchdog_thread is not None:
            self._watchdog_thread.join()
            self._watchdog_thread = None
        for fd in (self._fifo_fd, self._waking_fd):
            os.close(fd)
        self._fifo_fd = self._waking_fd = -1
        with suppress(FileNotFoundError):
            os.remove(self._file_path)

    def _watchdog_loop(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._fifo_fd, selectors.EVENT_READ)
            selector.register(self._waking_fd, selectors.EVENT_READ)
            while not self._stop_signaled:
                is_last = self._run_once
                try:
                    self._run_watchdog(selector)
                except Exception:
                    logger.exception("the watchdog of timers has met an error, and continues")
                self._last_progress_time = int(time.time())
                if is_last:
                    return

    def _run_watchdog(self, selector: selectors.BaseSelector) -> None:
        self.register_timers(self._get_requests(selector, self._max_interval))
        all_expired = self.get_expired_timers(time.time())
        log_debug_info_for_expired_timers(
            self._run_id,
            {pid: [timer.to_json() for timer in timers] for pid, timers in all_expired.items()},
        )
        for pid, timers in all_expired.items():
            self._on_expired(pid, sorted(timers, key=lambda timer: timer.expiration_time))
        self.clear_timers(set(all_expired))

    def _on_expired(self, pid: int, timers: list[FileTimerRequest]) -> None:
        """End a worker with the signal of the first of its timers that has one."""
        for timer in timers:
            self._log_event("timer expired", timer)
        deadly = next((timer for timer in timers if timer.signal > 0), None)
        scopes = [timer.scope_id for timer in timers]
        if deadly is None:
            logger.info("timers %s of process %s ran out; they name no signal", scopes, pid)
        elif self._reap_worker(pid, deadly.signal):
            logger.info("process %s was ended: its timers %s have run out", pid, scopes)
            self._log_event("kill worker process", deadly)

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        return end_process(worker_pid, signal)

    def _get_requests(
        self, selector: selectors.BaseSelector, max_interval: float
    ) -> list[FileTimerRequest]:
        """Take in requests for `max_interval` seconds, or until somebody wants us to stop."""
        requests: list[FileTimerRequest] = []
        deadline = time.monotonic() + max_interval
        while (patience := deadline - time.monotonic()) > 0:
            ready = {key.fd for key, _ in selector.select(0 if self._run_once else patience)}
            if self._fifo_fd in ready:
                requests += self._read_requests()
            elif self._run_once or self._stop_signaled:
                break
        return requests

    def _read_requests(self) -> list[FileTimerRequest]:
        try:
            chunk = os.read(self._fifo_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [request for line in lines if (request := _parse(line)) is not None]


def _parse(line: bytes) -> FileTimerRequest | None:
    try:
        fields: dict[str, Any] = json.loads(line)
        return FileTimerRequest(
            int(fields["pid"]),
            str(fields["scope_id"]),
            float(fields["expiration_time"]),
            int(fields["signal"]),
        )
    except (ValueError, KeyError, TypeError):
        logger.warning("not a timer request, ignored: %r", line[:200])
        return None
