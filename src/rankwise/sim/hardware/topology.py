"""Read topology files: YAML in, a validated `Topology` out, errors with file, line and field.

The validation is msgspec's; this module only finds the line that its path belongs to, which YAML's
own node tree knows, and the field that was probably meant.
"""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import nearest
from rankwise.sim.config_errors import Mistake, mistake_in
from rankwise.sim.faults.vocabulary import FaultOfChip
from rankwise.sim.files import Loader, load_yaml, read_text
from rankwise.sim.hardware.faults import ChipFaults
from rankwise.sim.hardware.plugins import load_plugin, plugin_failed, plugin_names
from rankwise.sim.hardware.shown import in_notebook
from rankwise.sim.hardware.specification import MachineSpec

PRESETS = tuple(
    sorted(
        each.name.removesuffix(".yaml")
        for each in resources.files(__package__).joinpath("presets").iterdir()
        if each.name.endswith(".yaml")
    )
)

GROUP = "rankwise.topologies"
"""The entry points of packages that offer machines."""


class Topology:
    """A machine's description.

    Attributes:
        machine: the typed tree.
        spec: the same as plain mappings and lists, defaults filled in.
        source: the file or preset that it was read from.
        faults: of its chips; None if all are well.
    """

    def __init__(self, machine: MachineSpec, source: str) -> None:
        self.machine = machine
        self.source = source
        self.faults: ChipFaults | None = None
        self.spec: dict[str, Any] = msgspec.to_builtins(machine)

    @property
    def described(self) -> str:
        """Its devices, in a few words."""
        sips = self.machine.system.sips
        return f"{self.sip_count} SIPs, {sips.words if sips.levels else sips.graph}"

    @property
    def own_facts(self) -> list[tuple[str, str]]:
        """What pages tell of it if it has no chips to draw."""
        return []

    @property
    def name(self) -> str:
        """What the file calls the system, or else the file's own name."""
        return self.machine.system.name or Path(self.source).stem

    def with_faults(self, faults: Sequence[FaultOfChip]) -> "Topology":
        """The same machine, with faults.

        Raises:
            ConfigError: one names a part that there is not.
        """
        same = Topology(self.machine, self.source)
        same.faults = ChipFaults(faults, self.machine) if faults else None
        return same

    @property
    def sip_count(self) -> int:
        """How many devices the system has; ranks map to them."""
        return self.machine.system.sips.count

    @property
    def pe_count(self) -> int:
        """How many PEs one SIP has."""
        return self.machine.sip.cubes.count * self.machine.cube.pes.count

    def _repr_html_(self) -> str:
        return in_notebook("topology_html", self)

    def __repr__(self) -> str:
        return f"<Topology {self.name}: {self.sip_count} SIPs, {self.machine.system.sips.words}>"


def load_topology(path_or_preset: str | Path) -> Topology:
    """Read a topology: a preset, a file, or what an installed package offers under that name.

    Raises:
        ConfigError: there is no such file or name, or something in it is wrong; the message names
            the file, the line, the field, the value and what was expected.
    """
    name = str(path_or_preset)
    if name in PRESETS:
        return parse_topology(_text_of_preset(name), name)
    try:
        text = read_text(name)
    except FileNotFoundError:
        return _plugged_topology(name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"topology file {name!r} cannot be read: {error}") from error
    return parse_topology(text, name)


def _plugged_topology(name: str) -> Topology:
    """What an installed package offers: a mapping or a file's `Path`, or a function giving one."""
    offered = load_plugin(GROUP, name)
    if offered is None:
        installed = plugin_names(GROUP)
        more = f"; installed packages offer {', '.join(installed)}" if installed else ""
        meant = nearest(name, [*PRESETS, *installed])
        raise ConfigError(
            f"there is no topology file {name!r}, and no preset of that name",
            hint=f"did you mean {meant}?" if meant else f"presets are {', '.join(PRESETS)}{more}",
        )
    if callable(offered):
        try:
            offered = offered()
        except Exception as error:
            raise plugin_failed(GROUP, name, "failed", error) from error
    if isinstance(offered, Mapping):
        try:
            return parse_topology(yaml.safe_dump(dict(offered)), name, has_lines=False)
        except yaml.YAMLError as error:
            raise plugin_failed(GROUP, name, "has values that YAML lacks", error) from error
    if not isinstance(offered, Path):
        raise ConfigError(
            f"{name!r} of {GROUP} is {offered!r}, expected a mapping or the Path of a topology file"
        )
    try:
        return parse_topology(read_text(offered), str(offered))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name!r} of {GROUP}: {offered} cannot be read: {error}") from error


def parse_topology(text: str, source: str, *, has_lines: bool = True) -> Topology:
    """Read a topology from YAML text.

    Args:
        text: what a file would hold.
        source: what errors call it.
        has_lines: whether these are the lines of a file, so that errors may name them.
    """
    try:
        node = yaml.compose(text, Loader=Loader)
        tree = load_yaml(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{source}:{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not YAML: it is nested too deeply") from None
    try:
        _refuse_repeated_keys(node, source)
        tree = _with_preset(tree, source)
        machine = msgspec.convert(tree, MachineSpec)
    except msgspec.ValidationError as error:
        mistake = mistake_in(error, MachineSpec, tree)
        raise ConfigError(_located(mistake, node, source, has_lines=has_lines)) from None
    except RecursionError:
        raise ConfigError(f"{source}: it is nested without end") from None
    return Topology(machine, source)


def _with_preset(tree: Any, source: str) -> Any:
    """The tree of a file, with the sections of the preset that it is like."""
    name = tree.get("like") if isinstance(tree, dict) else None
    if not name:
        return tree
    if name not in PRESETS:
        meant = nearest(str(name), PRESETS)
        raise ConfigError(
            f"{source}: like: there is no preset {name!r}",
            hint=f"did you mean {meant}?" if meant else f"presets are {', '.join(PRESETS)}",
        )
    preset = load_yaml(_text_of_preset(name))
    whole = {**preset, **tree}
    if isinstance(tree.get("system"), dict):
        # A file that is like another one is another system: it has a name and a network of its own.
        usual = {key: value for key, value in preset["system"].items() if key != "name"}
        whole["system"] = {**usual, **tree["system"]}
    return whole


def _text_of_preset(name: str) -> str:
    return resources.files(__package__).joinpath("presets", f"{name}.yaml").read_text("utf-8")


def _refuse_repeated_keys(node: yaml.Node | None, source: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise ConfigError(
                    f"{source}:{line}: {key.value} is given twice, first in line {seen[key.value]}"
                )
            seen[key.value] = line
            _refuse_repeated_keys(value, source)


def _located(mistake: Mistake, root: yaml.Node | None, source: str, *, has_lines: bool) -> str:
    """What does not fit, with the file, the line and the field."""
    node, line = _walk(root, mistake.keys)
    _, line = _walk_to_key(node, mistake.name, line)
    place = f"{source}:{line}" if has_lines else source
    return f"{place}: {mistake.field or 'the file'}: {mistake.problem}"


def _walk(root: yaml.Node | None, keys: list[str]) -> tuple[yaml.Node | None, int]:
    node, line = root, 1
    for key in keys:
        if isinstance(node, yaml.SequenceNode) and key.isdigit() and int(key) < len(node.value):
            node = node.value[int(key)]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode):
            node, line = _walk_to_key(node, key, line)
    return node, line


def _walk_to_key(node: yaml.Node | None, wanted: str, line: int) -> tuple[yaml.Node | None, int]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == wanted:
                return value, key.start_mark.line + 1
    return node, line
