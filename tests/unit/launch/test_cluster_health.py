"""What an agent answers over HTTP about its health."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from rankwise.base.errors import ConfigError
from rankwise.launch.cluster import health
from rankwise.launch.cluster.health import AgentStatus, HealthServer, metrics_text

STATUS = AgentStatus(run_id='night"ly', node="n1", phase="running", round=2, nodes=3, restarts=1)


def get(server: HealthServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def at_once(callback: Callable[[], None]) -> None:
    callback()


def test_an_agent_that_turns_is_alive() -> None:
    with HealthServer(0, at_once, lambda: STATUS) as server:
        code, text = get(server, "/health")

    assert code == 200
    fields = json.loads(text)
    assert fields["alive"] is True
    assert (fields["phase"], fields["round"], fields["nodes"]) == ("running", 2, 3)


def test_an_agent_that_is_stuck_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PATIENCE_S", 0.05)

    with HealthServer(0, lambda _callback: None, lambda: STATUS) as server:
        code, text = get(server, "/health")

    assert code == 503
    assert json.loads(text)["alive"] is False


def test_metrics_are_prometheus_text() -> None:
    with HealthServer(0, at_once, lambda: STATUS) as server:
        code, text = get(server, "/metrics")
        missing, _ = get(server, "/secrets")

    assert code == 200
    assert text == metrics_text(STATUS)
    assert 'rankwise_restarts_total{run_id="night\\"ly",node="n1"} 1\n' in text
    assert "# TYPE rankwise_restarts_total counter\n" in text
    assert 'rankwise_round{run_id="night\\"ly",node="n1"} 2\n' in text
    assert missing == 404


def test_two_may_ask_at_once() -> None:
    with HealthServer(0, at_once, lambda: STATUS) as server:
        codes: list[int] = []
        askers = [
            threading.Thread(target=lambda: codes.append(get(server, "/health")[0]))
            for _ in range(8)
        ]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(30)

    assert codes == [200] * 8


def test_a_port_that_is_taken_is_refused() -> None:
    with (
        HealthServer(0, at_once, lambda: STATUS) as server,
        pytest.raises(ConfigError, match=r"--health-port .* cannot be listened on"),
    ):
        HealthServer(server.port, at_once, lambda: STATUS)
