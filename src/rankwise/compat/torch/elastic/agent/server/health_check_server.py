"""Answers over HTTP whether an agent is alive.

torch's own does nothing outside of its makers' builds; this one listens: `GET /health` answers 200
with the seconds since the agent's last sign of life, or 503 when they are more than `timeout`.
"""

import json
import threading
import time
from collections.abc import Callable

from rankwise.compat.torch.elastic.utils.logging import get_logger
from rankwise.launch.http_server import QuietHandler, QuietServer

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

log = get_logger(__name__)


class HealthCheckServer:
    """Listens on `port` of all addresses, in a thread of its own.

    Args:
        alive_callback: the time of the agent's last sign of life, in seconds since 1970.
        port: where to listen; 0 takes a free one, which `port` then names.
        timeout: seconds after which an agent without a sign of life counts as dead.
    """

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        self.alive_callback = alive_callback
        self.port = port
        self.timeout = timeout
        self._server: QuietServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to answer; a port that cannot be had is logged, since the job matters more."""
        if self._server is not None:
            return
        try:
            server = QuietServer(("", self.port), _handler_for(self))
        except OSError as error:
            log.warning("no health check server on port %s: %s", self.port, error)
            return
        self._server = server
        self.port = server.server_port
        self._thread = threading.Thread(
            target=server.serve_forever, name="rankwise-health", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop answering. Harmless the second time."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.shutdown()
        self._thread.join()
        server.server_close()

    def silence_s(self) -> float:
        """Seconds since the last sign of life."""
        return max(0.0, time.time() - self.alive_callback())


def create_healthcheck_server(
    alive_callback: Callable[[], int], port: int, timeout: int
) -> HealthCheckServer:
    """Make a server; `start` makes it answer."""
    return HealthCheckServer(alive_callback, port, timeout)


def _handler_for(health: HealthCheckServer) -> type[QuietHandler]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802  # the library's name
            if self.path not in ("/", "/health"):
                self.send_error(404, "expected /health")
                return
            silence_s = health.silence_s()
            is_alive = silence_s <= health.timeout
            told = json.dumps({"alive": is_alive, "silence_s": round(silence_s, 1)})
            self.answer(200 if is_alive else 503, "application/json", told)

    return Handler
