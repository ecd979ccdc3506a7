"""Answers over HTTP how an agent is: `GET /health` for probes, `GET /metrics` for Prometheus.

The answer is made in the reactor's thread, for which the server's thread waits: an agent that is
stuck does not answer as if it were well. `/health` is 200 with JSON while the agent turns, and 503
when it has not answered within `PATIENCE_S`. Metrics are text as Prometheus reads it (0.0.4).
"""

import json
import socket
import threading
from hmac import compare_digest
from typing import Self

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.loopback import LOOPBACK, loopback_address
from rankwise.launch.cluster.metrics import TEXT_TYPE, metrics_text
from rankwise.launch.cluster.probe import PATIENCE_S, Probe
from rankwise.launch.http_server import QuietHandler, QuietServer


class _Server6(QuietServer):
    address_family = socket.AF_INET6


class HealthServer:
    """Listens on `port` of `host`, in threads of its own.

    Args:
        port: 0 takes a free one, which `port` then names.
        probe: asks the agent how it is.
        host: the address to listen on.
        token: what who asks must bring (`Authorization: Bearer`); empty for nothing.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(
        self,
        port: int,
        probe: Probe,
        *,
        host: str = "127.0.0.1",
        token: str = "",
    ) -> None:
        self.probe = probe
        self.authorization = f"Bearer {token}".encode() if token else b""
        try:
            if host == LOOPBACK:
                host = loopback_address()
            server = _Server6 if ":" in host else QuietServer
            self._server = server((host, port), _handler_for(self))
        except OSError as error:
            raise ConfigError(
                f"--health-port {port} of {host} cannot be listened on: {error.strerror}",
                hint="choose another port (0 takes a free one) or another --health-host",
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="rankwise-health", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler_for(health: HealthServer) -> type[QuietHandler]:
    class HealthHandler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802  # the library's name
            given = self.headers.get("Authorization", "").encode()
            if health.authorization and not compare_digest(given, health.authorization):
                self.send_error(401, "expected the token of RANKWISE_HEALTH_TOKEN")
                return
            path = self.path.partition("?")[0]
            if path not in ("/health", "/metrics"):
                self.send_error(404, "expected /health or /metrics")
                return
            snapshot = health.probe.snapshot(measures=path == "/metrics")
            if snapshot is None:
                text = json.dumps({"alive": False, "detail": f"no answer within {PATIENCE_S:g} s"})
                self.answer(503, "application/json", text)
            elif path == "/metrics":
                self.answer(200, TEXT_TYPE, metrics_text(snapshot))
            else:
                fields = {"alive": True, **msgspec.structs.asdict(snapshot.status)}
                self.answer(200, "application/json", json.dumps(fields))

    return HealthHandler
