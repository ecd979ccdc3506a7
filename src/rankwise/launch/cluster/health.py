"""Answers over HTTP how an agent is: `GET /health` for probes, `GET /metrics` for Prometheus.

The answer is made in the reactor's thread, for which the server's thread waits: an agent that is
stuck does not answer as if it were well. `/health` is 200 with JSON while the agent turns, and 503
when it has not answered within `PATIENCE_S`. Metrics are text as Prometheus reads it (0.0.4).
"""

import json
import socket
import threading
from collections.abc import Callable, Mapping
from hashlib import sha256
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import msgspec

from rankwise.base.errors import ConfigError

PATIENCE_S = 5.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent is.

    Attributes:
        run_id: which run, or a name for it where the id is secret.
        node: the node's id in the run.
        phase: where in its life the agent is.
        round: the number of the present round; -1 before the first.
        node_rank: this node's rank in the round; -1 between rounds.
        nodes: how many nodes the round has; 0 between rounds.
        workers: how many of its workers live.
        restarts: how many restarts the job has spent.
        leads: whether this node leads.
        step: the farthest step of its ranks; -1 where they are not counted.
        waited_for_seconds: by rank, how long the others waited for it alone in collectives.
    """

    run_id: str
    node: str
    phase: str
    round: int = -1
    node_rank: int = -1
    nodes: int = 0
    workers: int = 0
    restarts: int = 0
    leads: bool = False
    step: int = -1
    waited_for_seconds: Mapping[int, float] = {}


_METRICS = {
    "round": ("gauge", "Number of the present round, -1 before the first."),
    "node_rank": ("gauge", "Rank of this node in the round, -1 while it is in none."),
    "nodes": ("gauge", "Nodes in the round."),
    "workers": ("gauge", "Workers of this node that live."),
    "restarts": ("counter", "Restarts that the job has spent."),
    "leads": ("gauge", "1 if this node leads the run."),
    "step": (
        "gauge",
        "Farthest step that a rank of this node has started, -1 if none counts steps.",
    ),
    "waited_for_seconds": (
        "gauge",
        "For each rank: how long the others of this node waited in collectives for it alone.",
    ),
}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that send garbage, or leave in the middle."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class HealthServer:
    """Listens on `port` of `host`, in threads of its own.

    Args:
        port: 0 takes a free one, which `port` then names.
        ask: has a callback called in the agent's thread.
        look: describes the agent; called in the agent's thread.
        host: the address to listen on.
        token: what who asks must bring (`Authorization: Bearer`); empty for nothing.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(
        self,
        port: int,
        ask: Callable[[Callable[[], None]], None],
        look: Callable[[], AgentStatus],
        *,
        host: str = "127.0.0.1",
        token: str = "",
    ) -> None:
        self._ask = ask
        self._look = look
        self.authorization = f"Bearer {token}".encode() if token else b""
        try:
            server = _Server6 if ":" in host else _Server
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

    def status(self) -> AgentStatus | None:
        """How the agent says that it is; None if it does not answer."""
        answers: list[AgentStatus] = []
        answered = threading.Event()

        def answer() -> None:
            answers.append(self._look())
            answered.set()

        self._ask(answer)
        return answers[0] if answered.wait(PATIENCE_S) else None


def metrics() -> list[tuple[str, str, str]]:
    """Name, kind and meaning of each metric."""
    return [
        (f"rankwise_{field}_total" if kind == "counter" else f"rankwise_{field}", kind, what)
        for field, (kind, what) in _METRICS.items()
    ]


def metrics_text(status: AgentStatus) -> str:
    """The status in Prometheus's text format."""
    labels = f'run_id="{_escaped(status.run_id)}",node="{_escaped(status.node)}"'
    lines = []
    for field, (name, kind, what) in zip(_METRICS, metrics(), strict=True):
        lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
        value = getattr(status, field)
        if isinstance(value, Mapping):
            lines += [
                f'{name}{{{labels},rank="{rank}"}} {each:.3f}' for rank, each in value.items()
            ]
        else:
            lines.append(f"{name}{{{labels}}} {int(value)}")
    return "\n".join(lines) + "\n"


def shown_id(run_id: str, *, is_secret: bool) -> str:
    """A run's id, or where that is a secret, a name that tells runs apart."""
    return f"run-{sha256(run_id.encode()).hexdigest()[:8]}" if is_secret else run_id


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


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
            status = health.status()
            if status is None:
                text = json.dumps({"alive": False, "detail": f"no answer within {PATIENCE_S:g} s"})
                self._answer(503, "application/json", text)
            elif path == "/metrics":
                self._answer(200, METRICS_TYPE, metrics_text(status))
            else:
                fields = {"alive": True, **msgspec.structs.asdict(status)}
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
