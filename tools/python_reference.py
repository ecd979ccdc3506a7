"""Writes pages of the reference from the package itself: names, the health port, the journal.

    python tools/python_reference.py > docs/python-reference.md
    python tools/python_reference.py health > docs/health.md
    python tools/python_reference.py journal > docs/journal.md
    python tools/python_reference.py vocabulary > docs/development/journal.md

A test compares the pages with what this writes.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, get_args

import rankwise
from rankwise.base.units import format_bytes, format_duration
from rankwise.core.agent.vocabulary import Effect, Stimulus
from rankwise.launch.cluster.metrics import METRICS, AgentStatus
from rankwise.launch.cluster.probe import PATIENCE_S
from rankwise.launch.recording import BYTES_MAX, INTERVAL, SAMPLE_INTERVAL
from rankwise.observe.records import Record

MODULES = {
    "rankwise": "launching functions, the place of a rank, failures",
    "rankwise.collectives": "for numpy programs, over shared memory or simulated",
    "rankwise.workers": "trees of chip workers",
    "rankwise.sim": "the simulated accelerator",
    "rankwise.sim.triton": "kernels",
    "rankwise.testing.conformance": "for authors of stores and process hosts",
}
INTRODUCTION = """\
# Public names

<!-- Written by `python tools/python_reference.py`; change the package, not this page. -->

Version {version}:

- **Stable**: the names below; the names of torch in [torch's names](compat-torch.md); the language
  of [kernels](sim/kernels.md); the commands, options, variables and exit codes of the
  [command line](cli.md); the formats of [error files](files.md), and of results as CSV and JSON.
- **Not stable**: other modules and attributes, the wording of messages, the layout of log
  directories, journals (the version that wrote one reads it), the contents of stores (all nodes of
  a run need the same version), and times.
- While the first number of the version is 0, a release may change what is stable. The
  [changelog](../CHANGELOG.md) says what to do.
- Linux, and CPython 3.11, 3.12 or 3.13.
"""
HEALTH = """\
# Health port and metrics

<!-- Written by `python tools/python_reference.py health`; change the package, not this page. -->

`rankwise run --health-port 8080 …` answers on each node, while its agent runs:

| request | answer |
| --- | --- |
| `GET /health` | JSON: `alive` and the fields below; 503 if the agent is stuck for {patience:g} s |
| `GET /metrics` | the metrics below, for Prometheus, with the labels `run_id` and `node` |
| anything else | 404 |

With `RANKWISE_HEALTH_TOKEN`, requests need `Authorization: Bearer …`; otherwise the answer is 401.

Port 0 takes a free port, and a line on stderr names it. `--health-host` chooses the address: by
default the loopback on one node, and on several nodes the address for other nodes.

```text
$ curl -s http://localhost:8080/health
{{"alive": true, "run_id": "training", "node": "ae4e40c8", "phase": "running", "round": 0, …}}
```

## Metrics

Metrics of ranks have the label `rank`, and failures have `kind`. CPU and memory are looked up at
each request. [grafana.json](../examples/grafana.json) is a dashboard for Grafana (*Dashboards*,
*New*, *Import*).

{metrics}
## OpenTelemetry

With `pip install 'rankwise[otel]'`, the agent of each node sends the metrics to the collector of
`OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`, every 60 s and at the end of
the run, without a port. Counters have no `_total` there; `rankwise.run_id` and
`service.instance.id` are attributes of the resource.

OpenTelemetry's other variables apply, such as `OTEL_METRIC_EXPORT_INTERVAL` (milliseconds),
`OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_SERVICE_NAME`. The protocol is always protobuf over HTTP
(usually port 4318). `OTEL_METRICS_EXPORTER=none` and `OTEL_SDK_DISABLED=true` turn it off. A
collector that does not answer costs a line, and at most 3 s at the end of a run.

## Fields of /health

{fields}"""
JOURNAL = """\
# Journal

<!-- Written by `python tools/python_reference.py journal`; change the package, not this page. -->

With `--log-dir`, each node writes `journal.jsonl` beside its [logs](files.md): the facts that its
agent got, the orders that it gave, and what its ranks did. [`rankwise report`](howto/report.md)
makes a page of it, and `rankwise replay` shows the states of the agent again:

```python
# file: train.py
raise ValueError("bad shape")
```

```console
$ rankwise run --quiet --log-dir logs train.py
$ rankwise replay logs
agent                                                time  phase       round         leads  fact
agent          2…Z     0.000000 s  preparing   0 gathering   leads  AgentStarted
agent …  running     0 running     leads  RoundPrepared
agent …  finished    0 closed      leads  FailuresDescribed
root cause: rank 0 failed: ValueError: bad shape
```

The version of rankwise that wrote a journal reads it; others may not.

## Lines

One JSON object per line, for a fact (`stimulus`), an order (`effect`) or a record of the ranks
(`record`):

| field | meaning |
| --- | --- |
| `at` | nanoseconds of the node's monotonic clock |
| `wall` | the same instant of the calendar, UTC; it may jump, and nothing depends on it |
| `machine` | `agent`, in a simulation followed by the node's id; of records `recorder` |
| `number` | of a fact: which it is, counted from 1 |
| `cause` | of an order: the number of the fact that led to it |
| `stimulus`, `effect`, `record` | what it is about: `type`, one of those below, and its fields |

Durations are nanoseconds. Chip workers write journals in the same format, with machines and types
of their own. [Facts and orders](development/journal.md) has all types of the agent.

## Records

Ranks enter their calls into memory that the agent reads every {interval}, and once more when a rank
has ended. CPU time and memory are sampled often at first, then every {samples}. If a rank makes
more than some 250 calls between two looks, the latest are recorded; none is missing between `since`
and `until`.

Records of one node take {limit} at most: after a quarter of that, every second look is recorded,
then every fourth, and so on. `rankwise replay` does not need records.

{records}"""
VOCABULARY = """\
# Facts and orders in a journal

<!-- Written by `python tools/python_reference.py vocabulary`; change the package instead. -->

For developers: the types of a [journal](../journal.md) that the machine of an agent has.

## Facts

{facts}
## Orders

{orders}"""


def health() -> str:
    """The page of the health port."""
    fields = (f"`{name}`" for name in AgentStatus.__struct_fields__)
    return HEALTH.format(
        patience=PATIENCE_S,
        metrics=_table(
            "name",
            ((f"`{metric.full_name}`", f"{metric.kind}: {metric.what}") for metric in METRICS),
        ),
        fields=_table("field", zip(fields, _attributes(AgentStatus), strict=True)),
    )


def journal() -> str:
    """The page of the journal."""
    return JOURNAL.format(
        records=_vocabulary(Record),
        interval=format_duration(INTERVAL),
        samples=format_duration(SAMPLE_INTERVAL),
        limit=format_bytes(BYTES_MAX),
    )


def vocabulary() -> str:
    """The page of an agent's facts and orders."""
    return VOCABULARY.format(facts=_vocabulary(Stimulus), orders=_vocabulary(Effect))


def reference() -> str:
    """The page of public names."""
    sections = [_section(name, what) for name, what in MODULES.items()]
    return "\n".join([INTRODUCTION.format(version=rankwise.__version__), *sections])


def _section(name: str, what: str) -> str:
    return f"## {name}\n\n{what}\n\n{_table('name', _rows(import_module(name)))}"


def _vocabulary(union: Any) -> str:
    """The words of a machine, with their fields."""
    words = sorted(get_args(union), key=lambda word: str(word.__name__))
    return _table("type", ((_with_fields(word), _summary(word)) for word in words))


def _with_fields(word: Any) -> str:
    fields = ", ".join(f"`{name}`" for name in word.__struct_fields__)
    return f"`{word.__name__}`" + f": {fields}" * bool(fields)


def _attributes(struct: Any) -> list[str]:
    """What a docstring says of each attribute, a line each."""
    listed = (inspect.getdoc(struct) or "").partition("Attributes:\n")[2]
    return re.findall(r"^    \w+: (.+)$", listed, re.MULTILINE)


def _table(head: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {head} | what it is |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {cell} | {text} |" for cell, text in rows)]) + "\n"


def _rows(module: Any) -> Iterator[tuple[str, str]]:
    for name in sorted(module.__all__, key=str.lower):
        value = getattr(module, name)
        yield f"`{name}{_parameters(value)}`", _summary(value)


def _parameters(value: Any) -> str:
    """The names of a function's parameters, those with a default in brackets."""
    if not inspect.isfunction(value):
        return ""
    words = []
    for each in inspect.signature(value).parameters.values():
        if each.name.startswith("_"):
            continue
        stars = "*" * (each.kind is each.VAR_POSITIONAL) + "**" * (each.kind is each.VAR_KEYWORD)
        has_default = each.default is not each.empty
        words.append(f"[{each.name}]" if has_default else f"{stars}{each.name}")
    return f"({', '.join(words)})"


def _summary(value: Any) -> str:
    own = f"`{value!r}`" if isinstance(value, int | str) else value.__doc__
    line = re.split(r"\n\s*\n", (own or "").strip())[0]
    return " ".join(line.split()).replace("|", "\\|")


if __name__ == "__main__":
    pages = {
        "names": reference,
        "health": health,
        "journal": journal,
        "vocabulary": vocabulary,
    }
    print(pages[sys.argv[1] if sys.argv[1:] else "names"](), end="")
