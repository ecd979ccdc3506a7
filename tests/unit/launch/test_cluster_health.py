"""What an agent answers over HTTP about its health."""

import json
import re
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.gpus import GpuUse
from rankwise.drivers.real.process_work import Usage
from rankwise.launch.cluster.health import HealthServer
from rankwise.launch.cluster.metrics import METRICS, AgentSnapshot, AgentStatus, metrics_text
from rankwise.launch.cluster.probe import Probe
from rankwise.launch.control.addresses import shown_id
from rankwise.launch.looking.rank_status import CallStatus, RankStatus

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


SNAPSHOT = AgentSnapshot(status=STATUS)
PROBE = Probe(at_once, lambda: SNAPSHOT)


def test_an_agent_that_turns_is_alive() -> None:
    with HealthServer(0, PROBE) as server:
        code, text = get(server, "/health")

    assert code == 200
    fields = json.loads(text)
    assert fields["alive"] is True
    assert (fields["phase"], fields["round"], fields["nodes"]) == ("running", 2, 3)


def test_an_agent_that_is_stuck_is_not() -> None:
    stuck = Probe(lambda _callback: None, lambda: SNAPSHOT, patience_s=0.05)

    with HealthServer(0, stuck) as server:
        code, text = get(server, "/health")

    assert code == 503
    assert json.loads(text)["alive"] is False


def test_who_asks_an_agent_that_ends_meanwhile_is_told_how_it_was_at_its_end() -> None:
    asked = threading.Event()
    probe = Probe(lambda _callback: asked.set(), lambda: SNAPSHOT, patience_s=600)
    heard: list[AgentSnapshot | None] = []
    asker = threading.Thread(target=lambda: heard.append(probe.snapshot(measures=False)))

    asker.start()
    asked.wait()
    probe.conclude()
    asker.join()

    assert heard == [SNAPSHOT]


def test_metrics_are_prometheus_text() -> None:
    with HealthServer(0, PROBE) as server:
        code, text = get(server, "/metrics")
        missing, _ = get(server, "/secrets")

    assert code == 200
    assert text == metrics_text(SNAPSHOT)
    assert 'rankwise_restarts_total{run_id="night\\"ly",node="n1"} 1\n' in text
    assert "# TYPE rankwise_restarts_total counter\n" in text
    assert 'rankwise_round{run_id="night\\"ly",node="n1"} 2\n' in text
    assert missing == 404


def test_a_metric_of_ranks_has_a_line_for_each() -> None:
    status = msgspec.structs.replace(STATUS, waited_for_seconds={4: 0.25, 5: 12.0})

    text = metrics_text(AgentSnapshot(status=status))

    labels = 'run_id="night\\"ly",node="n1"'
    assert "# TYPE rankwise_waited_for_seconds gauge\n" in text
    assert f'rankwise_waited_for_seconds{{{labels},rank="4"}} 0.250\n' in text
    assert f'rankwise_waited_for_seconds{{{labels},rank="5"}} 12.000\n' in text


def test_two_may_ask_at_once() -> None:
    with HealthServer(0, PROBE) as server:
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
        HealthServer(0, PROBE) as server,
        pytest.raises(ConfigError, match=r"--health-port .* cannot be listened on"),
    ):
        HealthServer(server.port, PROBE)


def test_who_asks_without_the_token_is_told_nothing() -> None:
    with HealthServer(0, PROBE, token="secret") as server:
        code, text = get(server, "/health")
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics")
        request.add_header("Authorization", "Bearer secret")
        with urllib.request.urlopen(request, timeout=30) as answer:
            known = answer.status

    assert (code, known) == (401, 200)
    assert "night" not in text


def test_it_listens_where_it_was_told_and_not_elsewhere() -> None:
    with HealthServer(0, PROBE, host="127.0.0.2") as server:
        with pytest.raises(ConnectionRefusedError), socket.socket() as elsewhere:
            elsewhere.connect(("127.0.0.1", server.port))
        with socket.socket() as there:
            there.connect(("127.0.0.2", server.port))


def test_no_name_server_is_asked_for_the_name_of_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", asked.append)

    with HealthServer(0, PROBE) as server:
        code, _ = get(server, "/health")

    assert code == 200
    assert not asked, "an agent would stand still for as long as the name server does not answer"


def test_garbage_prints_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with HealthServer(0, PROBE) as server:
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


def ranks_of_a_node() -> AgentSnapshot:
    call = CallStatus(text="all_reduce #9 of (4,)", group="", place="train.py:8", in_s=2.5)
    alive = RankStatus(
        rank=8, local_rank=0, pid=71, state="running", steps=40, step_s=12.5, calls=9, call=call,
        came_last=0.25, awaited_s=0.0,
    )  # fmt: skip
    dead = RankStatus(rank=9, local_rank=1, pid=None, state="failed")
    status = msgspec.structs.replace(STATUS, failures={"raised": 2}, xids={3: 1})
    gpus = GpuUse(
        gpus=(3,), memory_bytes=5 << 30, utilisation=0.5, temperature_c=60, throttled_ns=10**9,
        ecc_errors=0,
    )  # fmt: skip
    return AgentSnapshot(
        status=status, ranks=(alive, dead), usage={71: Usage(1.5, 3 << 20)}, gpus={71: gpus}
    )


def test_ranks_are_measured_and_what_a_dead_one_uses_is_left_out() -> None:
    lines = metrics_text(ranks_of_a_node()).splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    def of(name: str, label: str) -> str | None:
        return samples.get(f'rankwise_{name}{{run_id="night\\"ly",node="n1",{label}}}')

    assert (of("steps_total", 'rank="8"'), of("steps_total", 'rank="9"')) == ("40", "0")
    assert of("step_seconds_total", 'rank="8"') == "12.500"
    assert of("collectives_total", 'rank="8"') == "9"
    assert of("came_last_ratio", 'rank="8"') == "0.250"
    assert of("waiting_seconds", 'rank="8"') == "2.500"
    assert of("memory_bytes", 'rank="8"') == str(3 << 20)
    assert of("cpu_seconds_total", 'rank="8"') == "1.500"
    assert of("memory_bytes", 'rank="9"') is None
    assert of("gpu_memory_bytes", 'rank="8"') == str(5 << 30)
    assert of("gpu_busy_ratio", 'rank="9"') is None
    assert of("gpu_xids_total", 'gpu="3"') == "1"
    assert of("failures_total", 'kind="raised"') == "2"
    assert of("failures_total", 'kind="hung"') == "0"  # a rate needs a first value


def test_each_metric_is_declared_once_and_named_as_prometheus_wants_it() -> None:
    text = metrics_text(ranks_of_a_node())

    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert names == [metric.full_name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert re.fullmatch(r"rankwise_[a-z_]+[a-z]", metric.full_name)
        assert metric.full_name.endswith("_total") == (metric.kind == "counter")
        assert metric.what.endswith(".")


def test_the_dashboard_names_metrics_that_are_served() -> None:
    dashboard = json.loads(Path("examples/grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in dashboard["templating"]["list"]]
    samples = {
        line.partition("{")[0]
        for line in metrics_text(ranks_of_a_node()).splitlines()
        if not line.startswith("#")
    }
    named = {name for each in expressions for name in re.findall(r"rankwise_\w+", each)}

    assert named
    assert named - samples - {"rankwise_waited_for_seconds"} == set()
    # And none is forgotten, but for those that say where a node stands.
    every = {metric.full_name for metric in METRICS}
    assert every - named == {"rankwise_node_rank", "rankwise_leads"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
