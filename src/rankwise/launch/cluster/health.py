"""Answers over HTTP how an agent is: `GET /health` for probes, `GET /metrics` for Prometheus.

The answer is made in the reactor's thread, for which the server's thread waits: an agent that is
stuck does not answer as if it were well. `/health` is 200 with JSON while the agent turns, and 503
when it has not answered within `PATIENCE_S`. Metrics are text as Prometheus reads it (0.0.4).
"""

import json
import socket
import threading
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Self

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.launch.cluster.metrics import TEXT_TYPE, metrics_text
from rankwise.launch.cluster.probe import PATIENCE_S, Probe


class QuietServer(ThreadingHTTPServer):
    """Answers in threads, and keeps to itself."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Bind, and ask no name server for the host's name: one that is down takes 10 s."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that send garbage, or leave in the middle."""


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


def _handler_for(health: HealthServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the library's name
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
                self._answer(503, "application/json", text)
            elif path == "/metrics":
                self._answer(200, TEXT_TYPE, metrics_text(snapshot))
            else:
                fields = {"alive": True, **msgspec.structs.asdict(snapshot.status)}
                self._answer(200, "application/json", json.dumps(fields))

        def _answer(self, code: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing: probes come every few seconds."""

    return Handler
