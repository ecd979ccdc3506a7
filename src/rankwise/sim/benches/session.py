"""One simulated run from its settings: the machine, the collectives, the program, the limits.

Settings are values: a sweep sends them to other processes, and a report can show them. A key of
`fields` is found where it belongs: `system.…`, `sip.…`, `cube.…` and `pe.…` in the topology,
`ccl.…` in the configuration of collectives, the rest among the program's parameters, or else among
the defaults of the collectives.
"""

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import yaml

from rankwise.base.errors import ConfigError, RankwiseError, TimeLimit
from rankwise.sim.benches.chakra_program import ChakraProgram, is_trace
from rankwise.sim.benches.programs import Program, program_from_file, shipped_program
from rankwise.sim.benches.triton_script import TritonScript
from rankwise.sim.ccl.configuration import (
    FILE_NAME,
    CollectiveConfiguration,
    QueueLayout,
    parse_configuration,
    read_configuration,
)
from rankwise.sim.faults.vocabulary import FaultOfChip
from rankwise.sim.files import load_yaml
from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.hardware.faults import checked_faults
from rankwise.sim.hardware.samples import LinkSamples
from rankwise.sim.hardware.topology import Topology, load_topology, parse_topology
from rankwise.sim.kernel import line_of
from rankwise.sim.reporting.results import BenchResult
from rankwise.sim.runtime.context import RuntimeContext
from rankwise.sim.runtime.multiprocessing import SpawnException
from rankwise.sim.runtime.wall_limit import wall_limit

AnyProgram: TypeAlias = Program | TritonScript | ChakraProgram

_TOPOLOGY_SECTIONS = ("system", "sip", "cube", "pe")
_COLLECTIVE_DEFAULTS = (*QueueLayout.__struct_fields__, "algorithm", "world_size", "fidelity")


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate.

    Attributes:
        program: the name of a bench, or the path of a program.
        is_file: whether it is a path.
        arguments: those of a script that says `import triton`; None for programs that know the
            simulator.
        topology: a preset or a file.
        ccl: a file; None reads `ccl.yaml` of the working directory, if there is one.
        fields: values that were set one by one, as text.
        faults: of the machine's chips: what errors call each, and the fault.
        seed: what random tensors are drawn from.
        has_data: whether numbers are computed, or time alone is simulated.
        detects_races: whether two programs that use an element unordered are a failure.
        virtual_limit_ps: the last simulated instant that may be reached.
        real_limit_s: how many seconds the simulation may take.
    """

    program: str
    is_file: bool = False
    arguments: tuple[str, ...] | None = None
    topology: str | Topology = "default"
    ccl: str | None = None
    fields: Mapping[str, str] = {}
    faults: tuple[tuple[str, FaultOfChip], ...] = ()
    seed: int = 0
    has_data: bool = True
    detects_races: bool = False
    virtual_limit_ps: int | None = None
    real_limit_s: float | None = None


Settings = BenchSettings  # its documented name until November 2026


class Finished(NamedTuple):
    """A run that has come to its end."""

    engine: GraphEngine
    results: list[BenchResult]


class BenchOutcome(NamedTuple):
    """What became of a run, as another process can send it back.

    Attributes:
        results: what it measured.
        time_ps: the simulated time at its end.
        failure: what it failed with; empty if it did not.
        devices: how many the machine has.
    """

    results: list[BenchResult]
    time_ps: int
    failure: str
    devices: int = 0


class BenchSession:
    """One run, prepared: everything has been read and checked, nothing has run.

    Args:
        settings: what to run.
        with_messages: keep every message between PEs in `engine.machine.messages`.

    Attributes:
        engine: the machine; others may look at its `now` while the run goes on.
    """

    def __init__(self, settings: BenchSettings, *, with_messages: bool = False) -> None:
        self._settings = settings
        with self._limited():
            self._program = _program(settings)
            topology, ccl, parameters = _sorted_fields(settings.fields, self._program)
            self._options = self._program.parameters.read(parameters)
            self._ccl = _collectives(settings.ccl, ccl)
        machine = topology_with(settings.topology, topology)
        self.engine = GraphEngine(
            machine.with_faults(checked_faults(settings.faults, machine)),
            settings.has_data and self._program.computes,
            time_limit=settings.virtual_limit_ps,
            # In the main thread a signal does it, and knows the line.
            wall_limit_s=None if _is_main_thread() else settings.real_limit_s,
        )
        if with_messages:
            self.engine.machine.messages = []
            self.engine.machine.samples = LinkSamples(self.engine.machine.links)
            self.engine.op_log.on_append = self._sample

    def _sample(self) -> None:
        machine = self.engine.machine
        assert machine.samples is not None, "they are taken if this is called"
        machine.samples.take(machine.simulator.now)

    def run(self) -> Finished:
        """Run the program to its end."""
        context = RuntimeContext(
            self.engine,
            ccl=self._ccl,
            seed=self._settings.seed,
            detect_races=self._settings.detects_races,
        )
        try:
            with self._limited(), context as torch:
                results = self._program.run(torch, self._options)
        except SpawnException as failed:
            for rank, error in failed.errors.items():
                if isinstance(error, TimeLimit):
                    raise TimeLimit(f"rank {rank}: {error.message}", hint=error.hint) from None
            raise
        return Finished(self.engine, results)

    def _limited(self) -> AbstractContextManager[None]:
        """Code of the user may run for so long, also if it never gives the simulator a turn."""
        return wall_limit(self._settings.real_limit_s, remedy="a larger --max-time real:…")


def _program(settings: BenchSettings) -> AnyProgram:
    if settings.arguments is not None:
        return TritonScript(settings.program, settings.arguments)
    if settings.is_file and is_trace(settings.program):
        return ChakraProgram(settings.program)
    find = program_from_file if settings.is_file else shipped_program
    return find(settings.program)


def check_keys(settings: BenchSettings, keys: Iterable[str]) -> None:
    """Refuse keys that a bench has no use for; a user's program is not executed to find out.

    Raises:
        ConfigError: it has no such parameter.
    """
    if not settings.is_file:
        program = shipped_program(settings.program)
        program.parameters.check(_sorted_fields(dict.fromkeys(keys, ""), program)[2])


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def simulate(settings: BenchSettings) -> Finished:
    """Run what the settings say."""
    return BenchSession(settings).run()


def measure_or_tell(settings: BenchSettings) -> BenchOutcome:
    """Run what the settings say, and never raise: for a process that runs one of many."""
    try:
        finished = simulate(settings)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (one of many: the others go on)
        what = (
            str(error)
            if isinstance(error, RankwiseError)
            else f"{type(error).__name__}: {error}".removesuffix(": ")
        )
        line = line_of(error)
        place = f", at {line}" if line and line.file not in what else ""
        return BenchOutcome([], 0, what + place)
    engine = finished.engine
    return BenchOutcome(finished.results, engine.now, "", engine.topology.sip_count)


def _sorted_fields(
    fields: Mapping[str, str], program: AnyProgram
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """The fields of the topology, of the collectives, and of the program."""
    topology, ccl, parameters = {}, {}, {}
    for key, text in fields.items():
        section, _, rest = key.partition(".")
        if section in _TOPOLOGY_SECTIONS and rest:
            topology[key] = text
        elif section == "ccl" and rest:
            ccl[rest] = text
        elif key in _COLLECTIVE_DEFAULTS and key not in program.parameters:
            ccl[f"defaults.{key}"] = text
        else:
            parameters[key] = text
    return topology, ccl, parameters


def topology_with(source: str | Topology, fields: Mapping[str, str]) -> Topology:
    """A machine, with some of its fields set to other values, given as text.

    Raises:
        ConfigError: there is no such machine or field, or the value does not fit.
    """
    for key in fields:
        section, _, rest = key.partition(".")
        if section not in _TOPOLOGY_SECTIONS or not rest:
            raise ConfigError(
                f"--set {key}: a machine has no such field",
                hint=f"they begin with {', '.join(f'{each}.' for each in _TOPOLOGY_SECTIONS)}",
            )
    topology = source if isinstance(source, Topology) else load_topology(source)
    if not fields:
        return topology
    tree = deepcopy(topology.spec)
    if topology.machine.system.sips.levels and "system.sips.count" not in fields:
        del tree["system"]["sips"]["count"]  # it follows from the levels, which may be set
    for key, text in fields.items():
        _set(tree, key, text)
    return parse_topology(
        yaml.safe_dump(tree), f"{topology.source} with {_shown(fields)}", has_lines=False
    )


def _collectives(source: str | None, fields: Mapping[str, str]) -> CollectiveConfiguration:
    # Algorithms of the user's own are modules beside the file; what is installed goes first.
    folder = str(Path(source or FILE_NAME).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    tree, name = read_configuration(source)
    configuration = parse_configuration(tree, name)  # what is wrong with the file is told first
    if not fields:
        return configuration
    for key, text in fields.items():
        _set(tree, key, text)
    return parse_configuration(tree, f"{name} with {_shown(fields)}")


def _entry(entries: Sequence[Any], key: str, name: str) -> Any:
    """The entry of a list that is called so, such as a level of the network, or has that number."""
    for number, entry in enumerate(entries):
        if name in {str(number), entry.get("name") if isinstance(entry, dict) else None}:
            return entry
    names = [str(each.get("name") or number) for number, each in enumerate(entries)]
    raise ConfigError(f"--set {key}: there is no {name!r}; expected one of {', '.join(names)}")


def _set(tree: Any, key: str, text: str) -> None:
    """Set a field that is named by its path, such as `system.sips.count`."""
    *sections, name = key.split(".")
    for section in sections:
        inner = (
            _entry(tree, key, section)
            if isinstance(tree, list | tuple)
            else tree.setdefault(section, {})
        )
        if not isinstance(inner, dict | list | tuple):
            raise ConfigError(f"--set {key}={text}: {section} is a value and has no fields")
        tree = inner
    if isinstance(tree, list | tuple):
        raise ConfigError(f"--set {key}={text}: {name} is not a field; expected one of an entry's")
    try:
        tree[name] = load_yaml(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {key}={text}: the value is not YAML") from None


def _shown(fields: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={text}" for key, text in fields.items())
