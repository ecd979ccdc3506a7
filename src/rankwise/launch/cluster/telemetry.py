"""Hands an agent's metrics to an OpenTelemetry collector, where one is named in the environment.

`OTEL_EXPORTER_OTLP_ENDPOINT` (or that of metrics alone) asks for it, as of any program, and so the
other standard variables apply: the interval, headers, certificates, the service's name. The extra
`otel` brings the packages; a run without them does nothing, since the variable may be meant for the
program alone. It is sent as protobuf over HTTP.

Importing takes longer than the start of a run, so a thread does it, and reads the metrics from then
on in intervals through the `Probe`. At the end of the run the last values are sent, also of a run
that is shorter than the importing: 10 s are waited for that, and 3 s for the collector.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Self

from rankwise.launch.cluster.metrics import METRICS, AgentSnapshot, Metric
from rankwise.launch.cluster.probe import Probe
from rankwise.launch.telling.notices import Say

IMPORT_S = 10.0
"""How long the end of a run waits for the packages, which a busy machine imports in seconds."""
LAST_WORDS_S = 3.0
"""How long the end of a run waits until the last values are sent."""
FRESH_S = 0.2
"""Metrics that are read within this time are made of one answer of the agent."""

_PEER = re.compile(r"Pool\(host='([^']+)', port=(\d+)\)")
_REASON = re.compile(r"(?<=\] )[A-Z][a-z ]+(?=[\"')])|(?:Read|Connect) timed out|CERTIFICATE_\w+")
"""The system's own words at the end of a chain of exceptions: `[Errno 111] Connection refused`."""
_NEXT_TRY = re.compile(r",? ?(?:encountered while exporting .*|retrying in .*)$")


class Telemetry:
    """Sends metrics from a thread of its own while it is entered.

    Args:
        probe: asks the agent.
        ask: has a callback called in the agent's thread.
        say: tells the user that they cannot be sent, once.
    """

    def __init__(self, probe: Probe, ask: Callable[[Callable[[], None]], None], say: Say) -> None:
        self._probe = probe
        self._complaints = _Complaints(ask, say)
        self._latest: tuple[float, AgentSnapshot | None] = (float("-inf"), None)
        self._provider: Any = None
        self._thread = threading.Thread(target=self._begin, name="rankwise-otel", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """In the agent's thread: send what is known now, and end."""
        self._probe.conclude()
        self._latest = (float("-inf"), None)
        self._thread.join(IMPORT_S)
        if self._provider is not None:
            self._provider.shutdown(timeout_millis=LAST_WORDS_S * 1000)
        self._complaints.tell()

    def _begin(self) -> None:
        try:
            self._set_up()
        except Exception as error:  # noqa: BLE001  # the library refuses what the environment says
            self._complaints.note(f"{type(error).__name__}: {error}")

    def _set_up(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
            from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415  # see above
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
        except ImportError:
            return  # the extra is not installed
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._complaints)
        logger.propagate = False
        snapshot = self._fresh()
        if snapshot is None:
            return  # the agent is stuck, or over
        own = {
            "service.name": "rankwise",
            "service.instance.id": snapshot.status.node,
            "rankwise.run_id": snapshot.status.run_id,
        }
        provider = MeterProvider(
            [PeriodicExportingMetricReader(OTLPMetricExporter())],
            # The environment's values are the user's will.
            resource=Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        meter = provider.get_meter("rankwise")
        for metric in METRICS:
            make = (
                meter.create_observable_counter
                if metric.is_counter
                else meter.create_observable_gauge
            )
            make(
                f"rankwise_{metric.name}",
                [self._reader(metric)],
                unit=_unit(metric),
                description=metric.what,
            )
        self._provider = provider

    def _reader(self, metric: Metric) -> Callable[[Any], Iterable[Any]]:
        from opentelemetry.metrics import Observation  # noqa: PLC0415  # see above

        def read(_options: Any) -> Iterable[Any]:
            snapshot = self._fresh()
            if snapshot is None:
                return
            for key, value in metric.values(snapshot).items():
                yield Observation(value, {metric.label: key} if metric.label else {})

        return read

    def _fresh(self) -> AgentSnapshot | None:
        at, snapshot = self._latest
        if time.monotonic() - at > FRESH_S:
            snapshot = self._probe.snapshot(measures=True)
            self._latest = time.monotonic(), snapshot
        return snapshot


class _Complaints(logging.Handler):
    """Tells the first warning of the library in one line, instead of a traceback on stderr each."""

    def __init__(self, ask: Callable[[Callable[[], None]], None], say: Say) -> None:
        super().__init__(logging.WARNING)
        self._ask = ask
        self._say = say
        self._problem = ""
        self._is_shown = False

    def emit(self, record: logging.LogRecord) -> None:
        self.note(record.getMessage())

    def note(self, text: str) -> None:
        """In any thread: let the first one be told."""
        if not self._problem:
            self._problem = _in_plain_words(" ".join(text.split()))
            self._ask(self.tell)

    def tell(self) -> None:
        """In the agent's thread: say it, if there is something to say that was not said."""
        if self._problem and not self._is_shown:
            self._is_shown = True
            told = f"metrics cannot be sent to the OpenTelemetry collector: {self._problem}"
            self._say(told, "no-telemetry")


def _in_plain_words(text: str) -> str:
    """A complaint without the library's next try: `10.0.0.7:4318: no route to host`."""
    where, why = _PEER.search(text), _REASON.search(text)
    if where is None or why is None:
        return _NEXT_TRY.sub("", text)
    return f"{where[1]}:{where[2]}: {why[0].lower()}"


def _unit(metric: Metric) -> str:
    for ending, unit in (("_seconds", "s"), ("_bytes", "By"), ("_ratio", "1")):
        if metric.name.endswith(ending):
            return unit
    return "1"
