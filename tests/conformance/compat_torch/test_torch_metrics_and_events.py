"""Metrics and events: torch's and ours through the same scenarios."""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
from elastic_sides import Load


@pytest.fixture
def metrics(load: Load) -> Iterator[ModuleType]:
    module = load("metrics")
    yield module
    module.configure(module.NullMetricHandler())


@pytest.fixture
def emitted(metrics: ModuleType) -> list[Any]:
    values: list[Any] = []

    class Remember(metrics.MetricHandler):  # type: ignore[name-defined,misc]
        def emit(self, metric_data: Any) -> None:
            values.append(metric_data)

    metrics.configure(Remember())
    return values


def names(emitted: list[Any]) -> list[tuple[str, str]]:
    return [(metric.group_name, metric.name) for metric in emitted]


def test_a_metric_reaches_the_handler_of_its_group(metrics: ModuleType, emitted: list[Any]) -> None:
    metrics.put_metric("steps", 5)
    metrics.put_metric("loss", 0.5, "training")
    metrics.getStream("other").add_value("x", 1)

    assert [tuple(metric)[1:] for metric in emitted] == [
        ("torchelastic", "steps", 5),
        ("training", "loss", 0.5),
        ("other", "x", 1),
    ]
    assert all(metric.timestamp > 1.5e9 for metric in emitted)


def test_a_group_may_have_a_handler_of_its_own(
    metrics: ModuleType, emitted: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    metrics.configure(metrics.ConsoleMetricHandler(), "console-group")

    metrics.put_metric("steps", 5, "console-group")

    assert emitted == []
    moment, _, rest = capsys.readouterr().out.partition("]")
    assert rest == "[console-group]: steps=5\n"
    assert float(moment.removeprefix("[")) > 1.5e9
    metrics.configure(metrics.NullMetricHandler(), "console-group")


def test_nothing_is_emitted_by_default(
    metrics: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics.put_metric("steps", 5)

    assert capsys.readouterr().out == ""


def test_prof_names_metrics_after_method_and_module(
    metrics: ModuleType, emitted: list[Any]
) -> None:
    class Agent:
        @metrics.prof
        def run(self) -> int:
            """Run."""
            return 3

        @metrics.prof(group="agent")
        def fail(self) -> None:
            raise ValueError("failed")

    def bare() -> None:
        pass

    bare.__qualname__ = "bare"
    bare.__module__ = "package.module"

    assert Agent().run() == 3
    with pytest.raises(ValueError, match="failed"):
        Agent().fail()
    metrics.prof(bare)()

    prefix = "test_prof_names_metrics_after_method_and_module.<locals>.Agent"
    assert names(emitted) == [
        ("torchelastic", f"{prefix}.run.success"),
        ("torchelastic", f"{prefix}.run.duration.ms"),
        ("agent", f"{prefix}.fail.failure"),
        ("agent", f"{prefix}.fail.duration.ms"),
        ("torchelastic", "module.bare.success"),
        ("torchelastic", "module.bare.duration.ms"),
    ]
    assert (Agent.run.__name__, Agent.run.__doc__) == ("run", "Run.")
    assert [metric.value for metric in emitted if not metric.name.endswith("ms")] == [1, 1, 1]


def test_the_old_spellings_still_work_and_say_that_they_are_old(
    metrics: ModuleType, emitted: list[Any]
) -> None:
    with pytest.warns(FutureWarning):
        metrics.publish_metric("group", "steps", 5)
    with pytest.warns(FutureWarning):
        decorate = metrics.profile("group")

    @decorate
    def step() -> None:
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says it again with each call
        step()

    assert names(emitted) == [
        ("group", "steps"),
        ("group", "step.success"),
        ("group", "step.duration.ms"),
    ]


def test_settings_are_kept_and_initialization_does_nothing(metrics: ModuleType) -> None:
    assert metrics.MetricsConfig().params == {}
    assert metrics.MetricsConfig({"a": "b"}).params == {"a": "b"}
    assert metrics.initialize_metrics(metrics.MetricsConfig()) is None
    assert metrics.get_elapsed_time_ms(0) > 1_500_000_000_000
    with pytest.raises(TypeError):
        metrics.MetricHandler()


@pytest.fixture
def events(load: Load) -> ModuleType:
    return load("events")


@pytest.fixture
def heard(load: Load, events: ModuleType) -> Iterator[list[str]]:
    """What is recorded to the destination `test` and about rendezvous, as text."""
    lines: list[str] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handlers = load("events.handlers")._log_handlers
    silent = handlers["dynamic_rendezvous"]
    handlers["test"] = handlers["dynamic_rendezvous"] = Listen()
    forget_loggers(load)
    yield lines
    handlers["dynamic_rendezvous"] = silent
    del handlers["test"]
    forget_loggers(load)


def forget_loggers(load: Load) -> None:
    """Loggers keep their handlers; both sides use the same names."""
    for name in ("test", "dynamic_rendezvous"):
        logging.getLogger(f"torchelastic-events-{name}").handlers.clear()
    for module in ("events", "events.recording"):
        with suppress(AttributeError, ModuleNotFoundError):  # the other side keeps them elsewhere
            load(module)._events_loggers.clear()


def test_an_event_is_its_json(events: ModuleType) -> None:
    event = events.Event(
        "torchelastic.worker.status.FAILED",
        events.EventSource.AGENT,
        metadata={"a": 1, "b": None, "c": True, "d": 1.5, "e": "ü"},
    )

    assert event.serialize() == str(event)
    assert event.serialize() == (
        '{"name": "torchelastic.worker.status.FAILED", "source": "AGENT", "timestamp": 0, '
        '"metadata": {"a": 1, "b": null, "c": true, "d": 1.5, "e": "\\u00fc"}}'
    )
    assert events.Event.deserialize(event.serialize()) == event
    assert events.Event.deserialize(event) is event
    assert event.source == "AGENT"
    assert str(events.EventSource.WORKER) == "EventSource.WORKER"


def test_a_rendezvous_event_is_its_json(events: ModuleType) -> None:
    event = events.RdzvEvent("n", "run", "message", "host", 3, events.NodeState.RUNNING, rank=2)

    assert json.loads(str(event)) == {
        "name": "n",
        "run_id": "run",
        "message": "message",
        "hostname": "host",
        "pid": 3,
        "node_state": "RUNNING",
        "master_endpoint": "",
        "rank": 2,
        "local_id": None,
        "error_trace": "",
    }
    assert events.RdzvEvent.deserialize(str(event)) == event


@pytest.mark.parametrize("text", ['{"name": "n", "source": "NOBODY"}', "{"])
def test_what_is_no_event_is_refused(events: ModuleType, text: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        events.Event.deserialize(text)


def test_an_event_reaches_its_destination(events: ModuleType, heard: list[str]) -> None:
    event = events.Event("n", events.EventSource.WORKER)

    events.record(event, "test")
    events.record(event)

    assert heard == [event.serialize()]
    with pytest.raises(KeyError):
        events.record(event, "nowhere")


def test_event_loggers_have_torchs_names_and_do_not_propagate(events: ModuleType) -> None:
    logger = events._get_or_create_logger("console")

    assert logger.name == "torchelastic-events-console"
    assert (logger.level, logger.propagate) == (logging.INFO, False)
    assert isinstance(events.get_logging_handler("console"), logging.StreamHandler)
    assert isinstance(events.get_logging_handler(), logging.NullHandler)


def test_a_rendezvous_event_names_its_caller_and_what_is_being_handled(
    events: ModuleType, heard: list[str]
) -> None:
    try:
        int("lost the store")
    except ValueError:
        events.construct_and_record_rdzv_event("run", "failed", events.NodeState.FAILED)
    events.construct_and_record_rdzv_event(
        "run", "m", events.NodeState.RUNNING, name="mine", hostname="h", pid=4, local_id=1
    )

    failed, running = (json.loads(line) for line in heard)
    assert failed["name"] == (
        "test_torch_metrics_and_events.py:"
        "test_a_rendezvous_event_names_its_caller_and_what_is_being_handled"
    )
    assert failed["error_trace"].endswith("'lost the store'\n")
    assert (failed["hostname"] != "", failed["pid"] > 0) == (True, True)
    assert running["name"] == "test_torch_metrics_and_events.py:mine"
    assert (running["hostname"], running["pid"], running["local_id"]) == ("h", 4, 1)
    assert running["error_trace"] == ""


def test_nobody_listens_to_rendezvous_events_by_default(
    events: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def handler(destination: str = "null") -> logging.Handler:
        asked.append(destination)
        return logging.NullHandler()

    monkeypatch.setattr(events, "get_logging_handler", handler)
    monkeypatch.delattr("socket.getfqdn")  # whoever makes an event needs the host's name

    events.construct_and_record_rdzv_event("run", "m", events.NodeState.RUNNING)

    assert asked == ["dynamic_rendezvous"]


def test_names_of_the_events_package_may_be_replaced(side: str, load: Load) -> None:
    events = load("events")

    def told_with(handler: logging.Handler) -> int:
        with (
            patch(f"{side}.elastic.events.get_logging_handler", return_value=handler),
            patch(f"{side}.elastic.events.record_rdzv_event") as record,
        ):
            events.construct_and_record_rdzv_event(
                run_id="run", message="here", node_state=events.NodeState.RUNNING
            )
        return record.call_count

    assert told_with(logging.StreamHandler()) == 1
    assert told_with(logging.NullHandler()) == 0
