"""Writes pages of the reference from the package itself: names, the health port, the journal.

    python tools/python_reference.py > docs/python-reference.md
    python tools/python_reference.py health > docs/health.md
    python tools/python_reference.py journal > docs/journal.md
    python tools/python_reference.py vocabulary > docs/development/journal.md
    python tools/python_reference.py plug-ins > docs/development/plug-ins.md

A test compares the pages with what this writes.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import Any, get_args

import rankwise
from rankwise.base.units import format_bytes, format_duration
from rankwise.core.agent.vocabulary import Effect, Stimulus
from rankwise.launch.cluster.metrics import METRICS, AgentStatus
from rankwise.launch.cluster.probe import PATIENCE_S
from rankwise.launch.looking.rank_records import BYTES_MAX, INTERVAL, SAMPLE_INTERVAL
from rankwise.observe.records import Record

DOCS = Path(__file__).parents[1] / "docs"
MADE_BY_OTHERS = {
    "ChipCallable", "CommHandle", "CoreCallable", "JITFunction", "Member", "Orchestrator",
    "RecordedGraph", "SpawnContext",
}  # fmt: skip
"""Classes whose objects users get from another function, such as `build`, `join` or `meet`."""
PAGES = {
    "rankwise": ("python.md", "recover.md", "howto/pool.md"),
    "rankwise.collectives": ("python.md",),
    "rankwise.workers": ("workers-reference.md", "windows-reference.md"),
    "rankwise.sim": ("sim/programs.md", "sim/hardware.md"),
    "rankwise.sim.triton": ("sim/kernels.md",),
}
"""Pages that describe names of a module; a name there has its signature here, and no more."""
MODULES = {
    "rankwise": "Launching functions, the place of a rank, failures.",
    "rankwise.collectives": "For numpy programs, over shared memory, TCP or simulated.",
    "rankwise.workers": "Trees of chip workers.",
    "rankwise.sim": "The simulated accelerator.",
    "rankwise.sim.triton": "Kernels.",
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
- While the first number of the version is 0, a release may change stable names. The
  [changelog](../CHANGELOG.md) has the necessary changes.
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

Names and units are stable. Metrics of ranks have the label `rank`, and failures have `kind`. CPU
and memory are looked up at each request. [grafana.json](../examples/grafana.json) is a dashboard
for Grafana (*Dashboards*, *New*, *Import*).

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

An agent may hold the exit of a rank back for a moment, since another rank or a stop of the whole
run may explain it. `replay` says for how long, and why:

```python
# file: killed.py
import os
import signal

os.kill(os.getpid(), signal.SIGTERM)
```

```console
$ rankwise run --quiet --log-dir killed killed.py
$ rankwise replay killed
agent                                                time  phase       round         leads  fact
agent          2…Z     0.000000 s  preparing   0 gathering   leads  AgentStarted
agent …  running     0 running     leads  RoundPrepared
agent            held back the exit of rank 0 for … ms: the signal that ended rank 0 may …
agent …  finished    0 closed      leads  FailuresDescribed
root cause: rank 0 was killed by SIGTERM …
```

The version of rankwise that wrote a journal reads it; others may not.

One JSON object per line has a fact, an order or a record of the ranks. [The
format](development/journal.md) is on a page for developers.

- Ranks enter their calls into memory that the agent reads every {interval}, and once more when a
  rank has ended. If a rank makes more than some 250 calls in that time, the latest are recorded.
- CPU time and memory are sampled often at first, then every {samples}.
- Records of one node take {limit} at most. After a quarter of that, the agent records every second
  sample, then every fourth, and so on.
"""
VOCABULARY = """\
# Facts and orders in a journal

<!-- Written by `python tools/python_reference.py vocabulary`; change the package instead. -->

For developers: the format of a [journal](../journal.md), and its types.

One JSON object per line:

| field | meaning |
| --- | --- |
| `at` | nanoseconds of the node's monotonic clock |
| `wall` | the same instant of the calendar, UTC; it may jump, and nothing depends on it |
| `machine` | `agent`, in a simulation with the node's id; of records `recorder` |
| `number` | of a fact: its number, counted from 1 |
| `cause` | of an order: the number of the fact that led to it |
| `stimulus`, `effect`, `record` | a fact, an order or a record: `type`, see below, and its fields |

Durations are nanoseconds. Chip workers write journals in the same format, with machines and types
of their own. `rankwise replay` does not need records.

## Facts

{facts}
## Orders

{orders}
## Records

None is missing between `since` and `until`.

{records}"""
PLUG_INS = """\
# Plug-ins

<!-- Written by `python tools/python_reference.py plug-ins`; change the package instead. -->

For developers of packages that add a store, a platform of chips, a machine, a cost model or a
process host.

## A store

A function with the arguments of `rankwise.drivers.real.stores.opening.open_store`, as an entry
point of the group `rankwise.stores`, under the name for `--rdzv-backend`:

```toml
[project.entry-points."rankwise.stores"]
mine = "mypackage.store:open_mine"
```

It returns a `rankwise.ports.store.Store`. A test checks all that stores must do:

```python
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.stores.in_process import MemoryStore
from rankwise.testing.conformance import STORE_BEHAVIOURS, check_store

shared = MemoryStore(SystemClock())
check_store(shared.connect)  # each call opens one more client of the same store
assert "a_watch_misses_nothing_under_load" in STORE_BEHAVIOURS  # by name, for one test each
```

## A platform of chips

An entry point of the group `rankwise.platforms` is a callable that makes a `Platform`, whose
`open(device_id)` gives a `Device` (both are Protocols: `help(rankwise.workers.Device)`). Text after
a colon in the platform's name is its only argument. `load_platform(name)` makes one,
`platform_names()` lists them. Test it with
`rankwise.testing.conformance.platforms.check_platform(factory, add)`, where `add` is a callable of
the platform that adds two vectors.

## Machines and cost models

Topologies and cost models are entry points, loaded when a name is neither a preset nor a file:

```toml
[project.entry-points."rankwise.topologies"]
lab = "our_lab:lab"              # --topology lab

[project.entry-points."rankwise.cost_models"]
measured = "our_lab:Measured"    # pe: {{cost_model: measured}}, or --set pe.cost_model=measured
```

- A **topology** is a mapping in the form of the file, a `Path`, or a function that gives either.
- A **cost model** is a function or class that takes a `MachineSpec`, and returns an object with
  `gemm(m, n, k, dtype)` and `math(elements, operation, dtype)`. Both return whole picoseconds,
  always the same for the same arguments. Bounds use the topology's figures. An optional
  `operation(name, flops, size, dtype)` gives the time of each aten operation of a [predicted
  run](../howto/predict.md); None means the roofline.

```python
# file: our_lab.py
from rankwise.sim.hardware.cost_models import TableCosts


class Measured:
    \"\"\"The figures of the topology, but a product takes at least a microsecond.\"\"\"

    def __init__(self, spec):
        self._table = TableCosts(spec)

    def gemm(self, m, n, k, dtype):
        return max(1_000_000, self._table.gemm(m, n, k, dtype))

    def math(self, elements, operation, dtype):
        return self._table.math(elements, operation, dtype)
```

### Price an operation

rankwise knows the flops of matrix products, convolutions and attention. An operation of the matrix
kind without a formula counts as its bytes, which is too cheap, and the output names it:

```python
# file: whiten.py
import torch

covariance = torch.randn(4096, 4096, device="cuda")
for _ in range(2):
    factor, _ = torch.linalg.cholesky_ex(covariance)
    factor.sum()
```

```console
$ rankwise run --on sim:h100-sxm --nproc-per-node 1 --timing-only whiten.py
  time         …   171.8 us
  too cheap    …   2 operations  aten.linalg_cholesky_ex: flops unknown,
```

A cost model prices it, by a measurement or by a formula:

```python
# file: our_prices.py
from rankwise.sim.hardware.cost_models import TableCosts


class Factorisations(TableCosts):
    \"\"\"As the machine, and n^3 / 3 flops at 15 TFLOPS for a Cholesky factorisation.\"\"\"

    def operation(self, name, flops, size, dtype):
        if name != "aten.linalg_cholesky_ex":
            return None  # as if there were no cost model
        matrix = size / 2 / 4  # it reads and writes n * n numbers of 4 bytes
        seconds = matrix**1.5 / 3 / 15e12
        return round(seconds * 1e12)
```

The file of a machine names it. What `pip install` makes of the entry point is written by hand here:

```console
$ mkdir our_prices.egg-info && cd our_prices.egg-info
$ printf '[rankwise.cost_models]\\nours = our_prices:Factorisations\\n' > entry_points.txt
$ cd .. && (rankwise machines h100-sxm --yaml; echo 'cost_model: ours') > priced.yaml
$ export PYTHONPATH=.
$ OPTIONS="--nproc-per-node 1 --timing-only --prediction p.json"
$ rankwise run --on sim:priced.yaml $OPTIONS whiten.py
$ python -c 'import json; print("too cheap:", json.load(open("p.json"))["too_cheap"])'
  time         …   3.133 ms
too cheap: []
```

## rankwise.testing.conformance

{names}"""


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
        interval=format_duration(INTERVAL),
        samples=format_duration(SAMPLE_INTERVAL),
        limit=format_bytes(BYTES_MAX),
    )


def vocabulary() -> str:
    """The page of an agent's facts and orders."""
    return VOCABULARY.format(
        facts=_vocabulary(Stimulus), orders=_vocabulary(Effect), records=_vocabulary(Record)
    )


def plug_ins() -> str:
    """The page for authors of plug-ins."""
    return PLUG_INS.format(
        names=_table("name", _rows(import_module("rankwise.testing.conformance")))
    )


def reference() -> str:
    """The page of public names."""
    sections = [_section(name, what) for name, what in MODULES.items()]
    return "\n".join([INTRODUCTION.format(version=rankwise.__version__), *sections])


def _section(name: str, what: str) -> str:
    pages = PAGES.get(name, ())
    described = " ".join((DOCS / page).read_text() for page in pages)
    rows = list(_rows(import_module(name)))
    brief = [cell for cell, _ in rows if re.search(rf"\b{_plain_name(cell)}\b", described)]
    parts = [f"## {name}\n", f"{what}\n"]
    if brief:
        links = ", ".join(f"[{_title(page)}]({page})" for page in pages)
        signatures = "\n".join(map(_signature, brief))
        parts += [f"Described in {links}:\n", f"```text\n{signatures}\n```\n"]
    parts += [_table("name", (row for row in rows if row[0] not in brief))]
    return "\n".join(parts)


def _signature(cell: str) -> str:
    return fill(
        cell.strip("`"),
        88,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _title(page: str) -> str:
    return (DOCS / page).read_text().partition("\n")[0].removeprefix("# ")


def _plain_name(cell: str) -> str:
    (name,) = re.findall(r"^`(\w+)", cell)
    return str(name)


def _vocabulary(union: Any) -> str:
    """The words of a machine, with their fields."""
    words = sorted(get_args(union), key=_word_of)
    return _table("type", ((_with_fields(word), _summary(word)) for word in words))


def _word_of(word: Any) -> str:
    """What a journal calls it: old journals keep their words when a class has another name."""
    return str(word.__struct_config__.tag)


def _with_fields(word: Any) -> str:
    fields = ", ".join(f"`{name}`" for name in word.__struct_fields__)
    return f"`{_word_of(word)}`" + f": {fields}" * bool(fields)


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
    """The names of a callable's parameters, those with a default in brackets."""
    is_made_by_users = (
        inspect.isclass(value)
        and inspect.isfunction(vars(value).get("__init__"))
        and value.__name__ not in MADE_BY_OTHERS
    )
    if not inspect.isfunction(value) and (
        not is_made_by_users
        or issubclass(value, BaseException)
        or getattr(value, "_is_protocol", False)
    ):
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
    if isinstance(value, dict):
        return f"{len(value)} checks by name."
    own = f"`{value!r}`" if isinstance(value, int | str) else value.__doc__
    line = re.split(r"\n\s*\n", (own or "").strip())[0]
    return " ".join(line.split()).replace("|", "\\|")


if __name__ == "__main__":
    pages = {
        "names": reference,
        "health": health,
        "journal": journal,
        "vocabulary": vocabulary,
        "plug-ins": plug_ins,
    }
    print(pages[sys.argv[1] if sys.argv[1:] else "names"](), end="")
