"""Metrics that are sent to an OpenTelemetry collector: a real exporter, and who takes it in."""

import gzip
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from running import PATIENCE_S, WITHIN_S, Finished, run, start, write_program

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from rankwise.launch.cluster.metrics import METRICS

pytestmark = pytest.mark.system

STEPS = """
import signal, rankwise
from rankwise import collectives
for _ in range(4):
    with rankwise.section("step"):
        collectives.barrier()
print("began", flush=True)
signal.pause()
"""
FAILS = "raise ValueError('bad shape')"


class Collector:
    """What has been sent: for each metric its latest values, by their attributes."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self.units: dict[str, str] = {}
        self.resource: dict[str, str] = {}
        self._changed = threading.Condition()

    def take(self, body: bytes) -> None:
        request = ExportMetricsServiceRequest()
        request.ParseFromString(body)
        with self._changed:
            for of_resource in request.resource_metrics:
                self.resource = _attributes(of_resource.resource.attributes)
                for scope in of_resource.scope_metrics:
                    for metric in scope.metrics:
                        self._take_metric(metric)
            self._changed.notify_all()

    def wait_for(self, name: str, **attributes: str) -> float:
        key = tuple(sorted(attributes.items()))
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values.get(name, {}), PATIENCE_S), (
                self.values
            )
            return self.values[name][key]

    def _take_metric(self, metric: Any) -> None:
        self.units[metric.name] = metric.unit
        data = getattr(metric, metric.WhichOneof("data"))
        values = self.values.setdefault(metric.name, {})
        for point in data.data_points:
            key = tuple(sorted(_attributes(point.attributes).items()))
            values[key] = getattr(point, point.WhichOneof("value"))


def _attributes(pairs: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in pairs}


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def environment(endpoint: str, interval_ms: int = 60_000) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_METRIC_EXPORT_INTERVAL": str(interval_ms),
        "OTEL_SERVICE_NAME": "night shift",
    }


def test_metrics_are_sent_while_a_run_lasts(tmp_path: Path) -> None:
    script = write_program(tmp_path, STEPS)
    with (
        collecting() as (collector, endpoint),
        start(
            "run",
            "--nproc-per-node=2",
            "--rdzv-id=nightly",
            script,
            environment=environment(endpoint, 200),
        ) as running,
    ):
        running.wait_for("began", count=2)
        calls = 0.0
        deadline = time.monotonic() + PATIENCE_S
        while calls < 4:
            calls = collector.wait_for("rankwise_collectives", rank="1")
            assert time.monotonic() < deadline, collector.values
        memory = collector.wait_for("rankwise_memory_bytes", rank="1")
        running.signal(15)
        done = running.finish(WITHIN_S)

    assert done.code == 143
    assert memory > 1 << 20
    assert collector.values["rankwise_steps"][(("rank", "0"),)] == 4
    assert collector.values["rankwise_workers"][()] >= 0
    # Who comes last is judged every half second.
    judged = {"rankwise_waited_for_seconds", "rankwise_came_last_ratio"}
    named = {f"rankwise_{metric.name}" for metric in METRICS}
    judged |= {name for name in named if name.startswith("rankwise_gpu_")}  # there may be none
    assert named - judged <= set(collector.values) <= named
    assert collector.units["rankwise_step_seconds"] == "s"
    assert collector.resource["service.name"] == "night shift"
    assert collector.resource["rankwise.run_id"] == "nightly"


def test_the_last_values_are_sent_at_the_end_of_a_short_run(tmp_path: Path) -> None:
    script = write_program(tmp_path, FAILS)
    with collecting() as (collector, endpoint):
        done = run("run", "--nproc-per-node=1", script, environment=environment(endpoint))

    assert done.code == 1
    assert collector.values["rankwise_failures"][(("kind", "raised"),)] == 1


def without_collector(tmp_path: Path, **variables: str) -> Finished:
    with collecting() as (_, endpoint):
        pass  # nobody listens there any more
    script = write_program(tmp_path, "print('well')")
    return run("run", script, environment={**environment(endpoint), **variables})


def test_a_collector_that_is_not_there_costs_a_line_and_not_the_run(tmp_path: Path) -> None:
    began = time.monotonic()
    done = without_collector(tmp_path)

    assert (done.code, done.lines) == (0, ["[default0]:well"])
    told = [line for line in done.stderr.splitlines() if "OpenTelemetry" in line]
    assert len(told) == 1, done.stderr
    said = r"metrics cannot be sent to the OpenTelemetry collector: [^ ]+:\d+: connection refused"
    assert re.search(f"{said}$", told[0])
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < WITHIN_S


@pytest.mark.parametrize(
    "variables",
    [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_METRICS_EXPORTER": "none"}],
    ids=["disabled", "none"],
)
def test_opentelemetrys_own_switches_turn_it_off(tmp_path: Path, variables: dict[str, str]) -> None:
    done = without_collector(tmp_path, **variables)

    assert done.code == 0
    assert "OpenTelemetry" not in done.stderr


def test_what_the_library_refuses_is_told_in_a_line_and_costs_no_run(tmp_path: Path) -> None:
    done = without_collector(tmp_path, OTEL_METRIC_EXPORT_INTERVAL="0")

    assert (done.code, done.lines) == (0, ["[default0]:well"])
    told = [line for line in done.stderr.splitlines() if "OpenTelemetry" in line]
    assert len(told) == 1, done.stderr
    assert "interval value 0.0 is invalid" in told[0]
    assert "Traceback" not in done.stderr
