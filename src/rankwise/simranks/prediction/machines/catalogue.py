"""Find a machine by its name or in its file, and give it the shape of a `Topology`.

A machine has a topology as well, made of its figures, since kernels of Triton are tried on one, and
pages and drawings show one. Its prices come from `DevicePrices` and `FabricPrices`.
"""

import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import nearest
from rankwise.sim.config_errors import mistake_in
from rankwise.sim.faults.vocabulary import FaultOfChip
from rankwise.sim.files import Loader, load_yaml, read_text
from rankwise.sim.hardware.cost_models import SHIPPED
from rankwise.sim.hardware.plugins import plugin_names
from rankwise.sim.hardware.specification import MachineSpec
from rankwise.sim.hardware.topology import GROUP, PRESETS, Topology, load_topology
from rankwise.simranks.prediction.machines.description import RealMachine

MACHINES = (
    "a100-40gb", "a100-80gb", "h100-sxm", "h100-96gb-500w", "h200", "b200", "gb200", "mi300x",
)  # fmt: skip
"""In the order in which tables show them."""
_ELEMENTS_PER_TFLOP = 1e12


class MachineTopology(Topology):
    """The topology of some nodes of a machine.

    Attributes:
        real: the machine.
        per_node: how many devices of each node have a rank.
    """

    def __init__(self, real: RealMachine, nodes: int, per_node: int, source: str) -> None:
        super().__init__(_as_chips(real, nodes, per_node), source)
        self.real = real
        self.per_node = per_node

    @property
    def described(self) -> str:
        """Its devices, in a few words."""
        nodes = self.sip_count // self.per_node
        return f"{self.sip_count} devices" + (f" on {nodes} nodes" if nodes > 1 else "")

    @property
    def own_facts(self) -> list[tuple[str, str]]:
        """Its figures: it has no chips to draw."""
        device, levels = self.real.device, self.real.levels
        peaks = ", ".join(f"{each.value:g} in {name}" for name, each in device.peak_tflops.items())
        return [
            ("machine", self.real.title),
            ("peak", f"TFLOPS: {peaks}"),
            ("memory", f"{device.memory_gib.value:g} GiB at {device.bandwidth.value:,g} GB/s"),
            *((level.name, f"{level.bandwidth.value:g} GB/s per device") for level in levels),
            ("software", self.real.software),
        ]

    def with_faults(self, faults: Sequence[FaultOfChip]) -> "MachineTopology":
        """The same machine, which has no faults of chips.

        Raises:
            ConfigError: there is one.
        """
        if faults:
            raise ConfigError(
                f"{self.name} has no chips to give a fault to: it is described by devices",
                hint="faults of ranks and nodes work on every machine; faults of chips need a "
                f"topology, such as {', '.join(PRESETS)}",
            )
        return self


def open_machine(name: str, nodes: int = 1, per_node: int = 1) -> Topology:
    """A preset, a topology file, what a package offers, or so many nodes of a machine.

    Raises:
        ConfigError: there is no such name or file, something in it is wrong, or a node has fewer
            devices.
    """
    real = None if name in PRESETS else find_machine(name)
    if real is None:
        return _topology(name)
    if per_node > real.node_size:
        raise ConfigError(
            f"a node of {real.name} has {real.node_size} devices, and there are {per_node} ranks"
            " per node",
            hint=f"--nnodes {(count := math.ceil(nodes * per_node / real.node_size))}"
            f" --nproc-per-node {real.node_size} has {count * real.node_size} ranks",
        )
    return MachineTopology(real, nodes, per_node, name)


def _topology(name: str) -> Topology:
    try:
        return load_topology(name)
    except ConfigError as error:
        # Only of a word that is nothing at all: what is wrong in a file has its own message.
        # A name that the system refuses is one that `exists` cannot ask for, so that comes last.
        if error.__cause__ is not None or name in plugin_names(GROUP) or Path(name).exists():
            raise
        # Topologies do not know the machines, which are made of them.
        # `h100` means one of the machines that begin so, though h200 is spelled more like it.
        begun = next((each for each in MACHINES if name and each.startswith(f"{name}-")), None)
        meant = begun or nearest(name, [*MACHINES, *PRESETS, *plugin_names(GROUP)])
        presets = ", ".join([*PRESETS, *plugin_names(GROUP)])
        raise ConfigError(
            f"there is no machine, preset or topology file {name!r}",
            hint=f"did you mean {meant}?"
            if meant
            else f"machines are {', '.join(MACHINES)}; presets are {presets}",
        ) from error


def find_machine(name: str) -> RealMachine | None:
    """A machine of this package, or of a file that describes one; None for other names.

    Raises:
        ConfigError: something in the file is wrong.
    """
    if name in MACHINES:
        return parse_machine(_shipped(name), name)
    if not name.endswith((".yaml", ".yml")):
        return None
    try:
        text = read_text(name)
        tree = load_yaml(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return None  # what is wrong with it, the reader of topologies says
    is_machine = isinstance(tree, dict) and "device" in tree and "system" not in tree
    return parse_machine(text, name) if is_machine else None


def named_machine(name: str) -> RealMachine:
    """The same, of a name that must be one.

    Raises:
        ConfigError: there is no such machine.
    """
    real = find_machine(name)
    if real is None:
        meant = nearest(name, MACHINES)
        raise ConfigError(
            f"there is no machine {name!r}",
            hint=f"did you mean {meant}?" if meant else f"machines are {', '.join(MACHINES)}",
        )
    return real


def parse_machine(text: str, source: str) -> RealMachine:
    """Read a machine from YAML text; `source` is what errors call it.

    Raises:
        ConfigError: names the field, the value and what was expected.
    """
    tree = yaml.load(text, Loader)  # noqa: S506 (a safe loader)
    try:
        return msgspec.convert(tree, RealMachine)
    except msgspec.ValidationError as error:
        mistake = mistake_in(error, RealMachine, tree)
        raise ConfigError(f"{source}: {mistake.field or 'the file'}: {mistake.problem}") from None


def _shipped(name: str) -> str:
    return resources.files(__package__).joinpath("shipped", f"{name}.yaml").read_text("utf-8")


def _network(real: RealMachine, nodes: int, per_node: int) -> list[dict[str, Any]]:
    """The levels of some nodes, in the words of topology files."""
    levels: list[dict[str, Any]] = []
    joined = 1  # nodes in a unit of the levels so far
    for number, level in enumerate(real.levels):
        count = per_node
        if number:
            within = nodes if level.devices is None else level.devices // real.node_size
            if within <= joined or nodes % within:
                continue  # the run has only a part of one unit
            count, joined = within // joined, within
        is_single = per_node == 1 and joined == count
        graph = level.graph or ("switch" if not number or is_single else "rails")
        is_tree = graph == "fat_tree"
        rate = level.bandwidth.value * level.reached.value
        levels.append(
            {
                "name": level.name if level.name.isalpha() else "",
                "count": count,
                "graph": graph,
                **({"oversubscription": level.oversubscription} if is_tree else {}),
                "link": {
                    "bandwidth_GBps": rate if is_tree else rate / level.oversubscription,
                    "latency_ns": level.latency_us.value * 500,
                },
            }
        )
    return levels


def _as_chips(real: RealMachine, nodes: int, per_node: int) -> MachineSpec:
    """The machine as the simulator's chips: one cube per device, one PE per SM."""
    device = real.device
    sms, fitted = device.sms, device.fitted
    bandwidth = device.bandwidth.value * fitted.memory.value
    peak = {
        name: figure.value * fitted.matrix.value * _ELEMENTS_PER_TFLOP / 1e9 / sms
        for name, figure in device.peak_tflops.items()
    }
    vector = device.vector_tflops.value * _ELEMENTS_PER_TFLOP / 1e9 / sms / 2  # 2 per element
    link = {"bandwidth_GBps": 1e6, "latency_ns": 0}
    tree: dict[str, Any] = {
        "system": {
            "name": real.name,
            "sips": {"levels": _network(real, nodes, per_node)},
            "host": {
                "link": {"bandwidth_GBps": 55, "latency_ns": 700},
                "command_ns": real.host.launch_us.plain.value * 1_000,
            },
        },
        "sip": {"cubes": {"shape": [1, 1], "link": link}},
        "cube": {
            "pes": {"count": sms, "link": link},
            "hbm": {
                "channels": 1,
                "capacity_MiB": round(device.memory_gib.value * 1_024),
                "bandwidth_GBps": bandwidth,
                "latency_ns": 500,
            },
        },
        "pe": {
            "cost_model": real.cost_model or SHIPPED,
            "tcm": {"capacity_KiB": 256, "bandwidth_GBps": 1e6, "latency_ns": 2},
            "dma": {"bandwidth_GBps": 1e6, "setup_ns": 20},
            "gemm": {
                "flops_per_cycle": peak,
                "startup_ns": fitted.kernel_us.value * 1_000,
            },
            "math": {
                "elements_per_cycle": {"f32": vector, "f16": vector, "bf16": vector, "i32": vector},
                "startup_ns": fitted.kernel_us.value * 1_000,
            },
        },
    }
    return msgspec.convert(tree, MachineSpec)
