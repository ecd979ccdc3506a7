"""What an agent answers over HTTP about its health."""

import json
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

import msgspec
import pytest

from rankwise.base.errors import ConfigError
from rankwise.launch.cluster import health
from rankwise.launch.cluster.health import AgentStatus, HealthServer, metrics_text, shown_id

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


def test_a_metric_of_ranks_has_a_line_for_each() -> None:
    status = msgspec.structs.replace(STATUS, waited_for_seconds={4: 0.25, 5: 12.0})

    text = metrics_text(status)

    labels = 'run_id="night\\"ly",node="n1"'
    assert "# TYPE rankwise_waited_for_seconds gauge\n" in text
    assert f'rankwise_waited_for_seconds{{{labels},rank="4"}} 0.250\n' in text
    assert f'rankwise_waited_for_seconds{{{labels},rank="5"}} 12.000\n' in text


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


def test_who_asks_without_the_token_is_told_nothing() -> None:
    with HealthServer(0, at_once, lambda: STATUS, token="secret") as server:
        code, text = get(server, "/health")
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics")
        request.add_header("Authorization", "Bearer secret")
        with urllib.request.urlopen(request, timeout=30) as answer:
            known = answer.status

    assert (code, known) == (401, 200)
    assert "night" not in text


def test_it_listens_where_it_was_told_and_not_elsewhere() -> None:
    with HealthServer(0, at_once, lambda: STATUS, host="127.0.0.2") as server:
        with pytest.raises(ConnectionRefusedError), socket.socket() as elsewhere:
            elsewhere.connect(("127.0.0.1", server.port))
        with socket.socket() as there:
            there.connect(("127.0.0.2", server.port))


def test_garbage_prints_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with HealthServer(0, at_once, lambda: STATUS) as server:
        beginning = b"GET /health HTTP/1.1\r\nContent-Le"
        for garbage in (b"\x16\x03\x01\x02\x00\x01", beginning, b"\xff\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(garbage)
                # Reset instead of closed, so that answering fails.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert get(server, "/health")[0] == 200

    assert capfd.readouterr() == ("", "")


def test_a_run_whose_id_is_its_secret_is_shown_under_another_name() -> None:
    assert shown_id("nightly", is_secret=False) == "nightly"
    assert "nightly" not in shown_id("nightly", is_secret=True)
    assert shown_id("nightly", is_secret=True) != shown_id("daily", is_secret=True)
