"""`ccl.yaml`: which algorithm carries out which collective, and how its queues are laid out.

The file is optional, and read from the working directory; a program may be given another one. Every
error names the file and the field, and comes before anything runs: unknown fields and algorithms,
slots that chunks do not fill exactly, buffers that are too small.
"""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import msgspec
import yaml

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import hint_behind
from rankwise.sim.ccl.algorithm_modules import (
    MULTICAST_HINT,
    algorithm_module,
    needs_multicast,
)
from rankwise.sim.config_errors import mistake_in
from rankwise.sim.files import load_yaml, read_text

FILE_NAME = "ccl.yaml"

AUTO = "auto"
"""The name that lets the fastest algorithm be chosen (`choice`)."""

BufferKind = Literal["tcm", "hbm"]
Backpressure = Literal["sleep", "spin"]
Fidelity = Literal["auto", "kernel", "queue", "message"]
Level = Literal["kernel", "queue", "message"]
Layout = Literal["ring_1d", "mesh_2d", "torus_2d", "fully_connected", "switch", "tree"]
SLOTS_LEAST = 4
"""Slots of a queue at least, unless the configuration says how many."""

CHUNK_LEAST = 256
"""Bytes of the pieces of a slot at least, unless the configuration says how many."""

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]

_ALGORITHMS = "rankwise.sim.ccl.algorithms."


class QueueLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the queues between the PEs of a collective are laid out.

    Attributes:
        buffer_kind: where the slots of a queue lie at its receiver.
        backpressure: whether a sender without credit sleeps, or spins.
        n_slots: slots per queue, which is how many messages may be under way in it; None for
            as many as the way needs, so that senders hardly wait for credits (`lanes`).
        slot_size: bytes per slot.
        vc_chunk_size: bytes of the pieces in which a slot crosses the links; None for what a link
            between devices carries in some 5 ns.
        ipcq_credit_size_bytes: size of the message that gives a slot back.
        n_elem: elements per PE, for programs that choose the size of their data by it.
        n_lanes: over how many PEs of each rank messages are spread; 0 lets their size decide.
    """

    buffer_kind: BufferKind = "tcm"
    backpressure: Backpressure = "sleep"
    n_slots: Count | None = None
    slot_size: Count = 4096
    vc_chunk_size: Count | None = None
    ipcq_credit_size_bytes: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 16
    n_elem: Count | None = None
    n_lanes: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0


class Algorithm(msgspec.Struct, frozen=True, kw_only=True):
    """A configured algorithm: its module, the order of its ring, and its queues.

    Attributes:
        topology: `mesh_2d` and `torus_2d` let a ring snake through the grid of SIPs, so that
            neighbours on the ring are neighbours in the machine; the others take ranks in order.
        fidelity: how exactly it is simulated (`fidelity`).
    """

    name: str
    module: str
    topology: Layout = "ring_1d"
    fidelity: Fidelity = "auto"
    queues: QueueLayout = QueueLayout()

    @property
    def collective(self) -> str:
        """What it is an algorithm for."""
        return str(algorithm_module(self.module).COLLECTIVE)


SHIPPED: dict[str, str] = {
    "ring_allreduce": "ring_allreduce",
    "ring_allreduce_tcm": "ring_allreduce",
    "tree_allreduce": "tree_allreduce",
    "recursive_doubling_allreduce": "recursive_doubling_allreduce",
    "halving_doubling_allreduce": "halving_doubling_allreduce",
    "direct_allreduce": "direct_allreduce",
    "hierarchical_allreduce": "hierarchical_allreduce",
    "torus_allreduce": "torus_allreduce",
    "nvls_allreduce": "nvls_allreduce",
    "ring_allgather": "ring_allgather",
    "direct_allgather": "direct_allgather",
    "ring_reduce_scatter": "ring_reduce_scatter",
    "direct_reduce_scatter": "direct_reduce_scatter",
    "ring_all_to_all": "ring_all_to_all",
    "direct_all_to_all": "direct_all_to_all",
    "pairwise_all_to_all": "pairwise_all_to_all",
    "hierarchical_all_to_all": "hierarchical_all_to_all",
    "tree_broadcast": "tree_broadcast",
    "tree_reduce": "tree_reduce",
    "direct_gather": "direct_gather",
    "direct_scatter": "direct_scatter",
    "dissemination_barrier": "dissemination_barrier",
    "point_to_point": "point_to_point",
}
"""Algorithms that can be named without being configured, and their modules here."""

_FIRST_CHOICE = {
    "all_reduce": "ring_allreduce_tcm",
    "all_gather": "ring_allgather",
    "reduce_scatter": "ring_reduce_scatter",
    "all_to_all": "direct_all_to_all",
    "broadcast": "tree_broadcast",
    "reduce": "tree_reduce",
    "gather": "direct_gather",
    "scatter": "direct_scatter",
    "barrier": "dissemination_barrier",
    "send_receive": "point_to_point",
}


class CollectiveConfiguration:
    """The configured algorithms, and which of them a collective gets.

    Attributes:
        algorithms: by name.
        chosen: the name of the algorithm of every collective.
        world_size: how many ranks the shipped programs start; None for one per SIP.
        source: the file, or what errors call it.
    """

    def __init__(
        self,
        algorithms: Mapping[str, Algorithm],
        chosen: Mapping[str, str],
        world_size: int | None = None,
        source: str = "the given configuration",
    ) -> None:
        self.algorithms = dict(algorithms)
        self.chosen = dict(chosen)
        self.world_size = world_size
        self.source = source

    def algorithm(self, collective: str, name: str | None = None) -> Algorithm:
        """The algorithm for a collective, or the one of that name; `auto` is one, too.

        An entry with the name `auto` stands for the one that a `Chooser` finds.
        """
        asked = name or self.chosen[collective]
        if asked == AUTO:
            first = self.algorithms[_FIRST_CHOICE[collective]]
            return msgspec.structs.replace(first, name=AUTO)
        found = self.algorithms.get(asked)
        if found is None:
            raise ConfigError(
                f"no collective algorithm is called {name!r}",
                hint=f"there are {AUTO} and {', '.join(sorted(self.algorithms))}",
            )
        if found.collective != collective:
            raise ConfigError(
                f"algorithm {found.name} is for {found.collective}, not for {collective}"
            )
        return found


def load_configuration(
    source: str | Path | Mapping[str, Any] | None = None,
    *,
    name: str = "the given configuration",
) -> CollectiveConfiguration:
    """Read a configuration.

    Args:
        source: a file, or the mapping that one would hold; None reads `ccl.yaml` of the working
            directory if there is one, and else gives what ships.
        name: what errors call a mapping.

    Raises:
        ConfigError: something in it is wrong; the message names the file and the field.
    """
    if isinstance(source, Mapping):
        return parse_configuration(dict(source), name)
    if not isinstance(source, str | PathLike | None):
        raise ConfigError(f"ccl is {source!r}, expected a file or a mapping")
    return parse_configuration(*read_configuration(source))


def read_configuration(source: str | PathLike[str] | None) -> tuple[Any, str]:
    """What a file holds, unchecked, and what errors call it; it is read once: it may be a pipe.

    Raises:
        ConfigError: it cannot be read, or is no YAML.
    """
    path = Path(FILE_NAME if source is None else source)
    try:
        text = read_text(path)
    except FileNotFoundError:
        if source is None:
            return {}, "the defaults of collectives"
        raise ConfigError(f"there is no collective configuration {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        tree = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not YAML: it is nested too deeply") from None
    return {} if tree is None else tree, str(path)


class _Defaults(QueueLayout, frozen=True, kw_only=True, forbid_unknown_fields=True):
    algorithm: str | None = None
    world_size: Count | None = None
    fidelity: Fidelity = "auto"


class _Entry(QueueLayout, frozen=True, kw_only=True, forbid_unknown_fields=True):
    module: str
    topology: Layout = "ring_1d"
    fidelity: Fidelity = "auto"


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sections of the file; entries are read one by one, on top of the defaults."""

    defaults: dict[str, Any] = {}
    algorithms: dict[str, Any] = {}
    collectives: dict[str, str] = {}


def parse_configuration(tree: Any, source: str) -> CollectiveConfiguration:
    """The configuration that a file holds; `load_configuration` says what is raised."""
    file = _convert(tree, _File, source, "")
    defaults = _convert(file.defaults, _Defaults, source, "defaults")
    common = {
        key: value for key, value in file.defaults.items() if key not in {"algorithm", "world_size"}
    }
    algorithms = {
        name: _algorithm(
            name, {"module": _ALGORITHMS + module, **common}, source, f"defaults ({name})"
        )
        for name, module in SHIPPED.items()
    }
    for name, entry in file.algorithms.items():
        if name == AUTO:
            raise ConfigError(
                f"{source}: algorithms: {AUTO} is the choice of the fastest one, expected another"
                " name"
            )
        shipped = {"module": _ALGORITHMS + SHIPPED[name]} if name in SHIPPED else {}
        where = f"algorithms.{name}"
        own = _convert(entry, dict[str, Any], source, where)
        algorithms[name] = _algorithm(name, {**shipped, **common, **own}, source, where)
        if "fidelity" in own:
            _check_fidelity(algorithms[name], f"{source}: {where}.fidelity")
    chosen = dict(_FIRST_CHOICE)
    if defaults.algorithm == AUTO:
        chosen = dict.fromkeys(chosen, AUTO)
    elif defaults.algorithm is not None:
        name = _known(defaults.algorithm, algorithms, source, "defaults.algorithm")
        chosen[algorithms[name].collective] = name
    for collective, name in file.collectives.items():
        if collective not in chosen:
            raise ConfigError(
                f"{source}: collectives: there is no collective {collective!r}"
                f"{hint_behind(collective, chosen)}"
            )
        if name == AUTO:
            chosen[collective] = AUTO
            continue
        chosen[collective] = _known(name, algorithms, source, f"collectives.{collective}")
        found = algorithms[name].collective
        if found != collective:
            raise ConfigError(
                f"{source}: collectives.{collective}: algorithm {name} is for {found}"
            )
    return CollectiveConfiguration(algorithms, chosen, defaults.world_size, source)


def _algorithm(name: str, fields: dict[str, Any], source: str, where: str) -> Algorithm:
    entry = _convert(fields, _Entry, source, where)
    _check_sizes(entry, f"{source}: {where}")
    try:
        algorithm_module(entry.module)
    except ConfigError as error:
        raise ConfigError(f"{source}: {where}.module: {error.message}", hint=error.hint) from error
    queues = {field: getattr(entry, field) for field in QueueLayout.__struct_fields__}
    return Algorithm(
        name=name,
        module=entry.module,
        topology=entry.topology,
        fidelity=entry.fidelity,
        queues=QueueLayout(**queues),
    )


def levels_of(module: ModuleType) -> tuple[Level, ...]:
    """The levels of fidelity that an algorithm has, the most exact first."""
    needed: tuple[tuple[Level, str], ...] = (
        ("kernel", "kernel"),
        ("queue", "program"),
        ("message", "rounds"),
    )
    levels = tuple(level for level, name in needed if hasattr(module, name))
    # Programs are timed by messages, too (`message_graph`).
    return (*levels, "message") if levels[-1] == "queue" else levels


def _check_fidelity(algorithm: Algorithm, where: str) -> None:
    """Refuse what was asked of one algorithm that does not have it."""
    possible = levels_of(algorithm_module(algorithm.module))
    if algorithm.fidelity not in {"auto", *possible}:
        reason = {
            "kernel": "its module has no kernel",
            "queue": "its module is a kernel alone, without program(task)",
            "message": "its module is a kernel alone, without program(task)",
        }[algorithm.fidelity]
        raise ConfigError(
            f"{where}: {algorithm.name} cannot be simulated as {algorithm.fidelity!r}: {reason}",
            hint=f"it can as {', '.join(('auto', *possible))}",
        )


def _check_sizes(queues: QueueLayout, where: str) -> None:
    chunk = queues.vc_chunk_size or CHUNK_LEAST
    if queues.slot_size % chunk:
        raise ConfigError(
            f"{where}: slot_size {queues.slot_size} is not a multiple of vc_chunk_size {chunk}",
            hint="a slot crosses the links in whole chunks",
        )
    if queues.slot_size % _WIDEST_ELEMENT:
        raise ConfigError(
            f"{where}: slot_size {queues.slot_size} is not a multiple of {_WIDEST_ELEMENT} bytes",
            hint="elements must not be cut in two",
        )


_WIDEST_ELEMENT = 8


def check_against(queues: QueueLayout, tcm_bytes: int, queue_count: int, where: str) -> None:
    """Refuse queues that do not fit into the scratch memory of a PE.

    Args:
        queues: the layout.
        tcm_bytes: what a PE has.
        queue_count: how many queues end at the PE that has the most.
        where: what the message begins with.
    """
    slots = queues.n_slots or SLOTS_LEAST
    needed = slots * queues.slot_size * queue_count
    if queues.buffer_kind == "tcm" and needed > tcm_bytes:
        raise ConfigError(
            f"{where}: the buffer is too small: {queue_count} queues of {slots}"
            f" slots of {queues.slot_size} bytes need {needed} bytes of TCM, a PE has {tcm_bytes}",
            hint="use fewer or smaller slots, or buffer_kind: hbm",
        )


def check_sizes_against(configuration: CollectiveConfiguration, tcm_bytes: int) -> None:
    """Refuse sizes that were configured and of which not even one queue fits into a PE.

    How many queues end at a PE is known when a collective is planned (`check_against`); what can
    never fit is refused before anything runs.
    """
    usual = (QueueLayout().n_slots, QueueLayout().slot_size)
    for algorithm in configuration.algorithms.values():
        if (algorithm.queues.n_slots, algorithm.queues.slot_size) != usual:
            where = f"{configuration.source}: algorithm {algorithm.name}"
            check_against(algorithm.queues, tcm_bytes, 1, where)


def check_switches(configuration: CollectiveConfiguration, multicast_unit: int) -> None:
    """Refuse an algorithm that a collective was given, and that no switch of the machine can do.

    Which ranks share a switch is known when a collective is planned; that there is none, before.

    Args:
        configuration: the choice.
        multicast_unit: how many devices are at each switch that copies and combines.
    """
    for collective, name in configuration.chosen.items():
        if name == AUTO or multicast_unit:
            continue
        if needs_multicast(configuration.algorithms[name].module):
            raise ConfigError(
                f"{configuration.source}: {collective} gets algorithm {name}, which needs switches"
                " with multicast: true, and the machine has none",
                hint=MULTICAST_HINT,
            )


def _known(name: str, algorithms: Mapping[str, Algorithm], source: str, where: str) -> str:
    if name not in algorithms:
        raise ConfigError(
            f"{source}: {where}: no algorithm is called {name!r}",
            hint=hint_behind(name, sorted(algorithms)).removeprefix("; "),
        )
    return name


def _convert(value: Any, kind: Any, source: str, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        mistake = mistake_in(error, kind, value)
        named = ".".join(part for part in (where, mistake.field) if part)
        told = ": ".join(part for part in (source, named, mistake.problem) if part)
        raise ConfigError(told) from None
