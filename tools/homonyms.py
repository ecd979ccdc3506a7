"""Counts names that mean different things: classes of one name, files of one name.

    python tools/homonyms.py [path of a checkout]

A room is a folder of the package, at most two parts deep: `simranks/run`, `core/gang`. A class
name counts when two modules of one room define it, or two modules of rooms of which one imports the
other, or when a third room imports both classes: there a reader meets both. A class name that is
defined in rooms that never meet counts apart. A file name counts when three rooms use it.
Each of these needs a reason in `CLASSES_WITH_REASON` or `FILES_WITH_REASON`, and a reason needs its
homonym: the exit code is 1 if one is missing, or is left over.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "rankwise"
ROOMS_FOR_A_FILE_NAME = 3

_TORCH = "torch's public name, for what it is in rankwise"
_SIMPLER = "simpler's public name, for the class of ours that it extends"

CLASSES_WITH_REASON = {
    "ChipWorker": _SIMPLER,
    "Copy": "two public names: an instruction of collective algorithms, a command of the machine",
    "EtcdStore": _TORCH,
    "Event": "two public names of torch: of elastic's events, and of streams",
    "RendezvousError": _TORCH,
    "RendezvousTimeout": "torch's public name, for its settings of timeouts; ours is an exception",
    "Span": "two public names: elements in collective algorithms, and a time of a device",
    "Stream": "torch's public name, of the simulated accelerator and of modelled CUDA devices",
    "Worker": f"{_SIMPLER}; in `compat.torch`, torch's public name",
    "WorkerSpec": _TORCH,
    "Device": "of a platform, and of simulated tensors: the two public interfaces say `device`",
}
FILES_WITH_REASON = {
    "addresses": "network addresses, of what the folder talks to",
    "distributed": "names of torch and of triton_distributed for the same thing",
    "errors": "the exceptions of its folder",
    "journal": "the port, and its two drivers",
    "kernels": "kernels in the kernel language",
    "machine": "the state machine of its folder, as `base.machine` shapes it",
    "sentences": "how the things of its folder are said",
    "state": "what the state machine of its folder remembers",
    "transitions": "every way from one phase to another of the state machine of its folder",
    "vocabulary": "what the state machine of its folder is told, and what it orders",
    "wording": "the texts of its folder",
}


class Definition(NamedTuple):
    """A class statement."""

    name: str
    module: str
    line: int


class Homonym(NamedTuple):
    """A name with the places where it stands."""

    name: str
    places: tuple[str, ...]


class Source(NamedTuple):
    """What is known of a package: its classes, its modules, and which room imports which."""

    classes: tuple[Definition, ...]
    modules: dict[str, str]  # by dotted name: the room
    imports: frozenset[tuple[str, str]]  # rooms: who imports, what is imported
    names: frozenset[tuple[str, str]]  # a room, and the dotted name of what it imports

    def is_package(self, module: str) -> bool:
        """Whether this is a folder: the name of a room, and not of a file."""
        return any(each.startswith(f"{module}.") for each in self.modules)

    def meet(self, one: str, other: str) -> bool:
        """Whether a reader of one of these modules' rooms meets the other module."""
        rooms = self.modules[one], self.modules[other]
        return rooms[0] == rooms[1] or rooms in self.imports or rooms[::-1] in self.imports

    def rooms_importing(self, each: Definition) -> frozenset[str]:
        """The rooms that import a class, from its module or from the package around it."""
        package = each.module.rpartition(".")[0]
        wanted = {f"{each.module}.{each.name}", f"{package}.{each.name}"}
        return frozenset(room for room, name in self.names if name in wanted)


def read(package: Path) -> Source:
    """Everything in the modules below a package's folder."""
    trees = {_dotted(path, package): path for path in sorted(package.rglob("*.py"))}
    modules = {name: _room(path.relative_to(package)) for name, path in trees.items()}
    classes, imports, names = [], set(), set()
    for name, path in trees.items():
        tree = ast.parse(path.read_bytes(), str(path))
        nodes = list(ast.walk(tree))
        classes += [
            Definition(n.name, name, n.lineno) for n in nodes if isinstance(n, ast.ClassDef)
        ]
        imports |= {(modules[name], modules[each]) for each in _imported(nodes) if each in modules}
        names |= {(modules[name], each) for each in _imported(nodes)}
    return Source(tuple(classes), modules, frozenset(imports), frozenset(names))


def _dotted(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(path: Path) -> str:
    return "/".join(path.parent.parts[:2]) or "."


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            submodules = [f"{node.module}.{each.name}" for each in node.names]
            # `from package import module` says nothing about what else is in the package. Whoever
            # asks ignores what is no module, so naming both is right for `from module import name`.
            yield from (node.module, *submodules)


def homonymous_classes(source: Source) -> list[Homonym]:
    """Class names that a reader can meet twice with different meanings."""
    by_name = defaultdict(list)
    for each in source.classes:
        by_name[each.name].append(each)
    found = []
    for name, definitions in sorted(by_name.items()):
        met = [
            each
            for pair in combinations(definitions, 2)
            if pair[0].module != pair[1].module and _are_met(source, *pair)
            for each in pair
        ]
        if met:
            places = dict.fromkeys(f"{each.module}:{each.line}" for each in sorted(met))
            found.append(Homonym(name, tuple(places)))
    return found


def distant_classes(source: Source) -> list[Homonym]:
    """Class names that are defined in rooms that never meet."""
    places = defaultdict(list)
    for each in source.classes:
        places[each.name].append(each)
    met = {each.name for each in homonymous_classes(source)}
    return [
        Homonym(name, tuple(f"{each.module}:{each.line}" for each in sorted(definitions)))
        for name, definitions in sorted(places.items())
        if len({each.module for each in definitions}) > 1 and name not in met
    ]


def _are_met(source: Source, one: Definition, other: Definition) -> bool:
    """Whether a reader of one room meets both classes."""
    if source.meet(one.module, other.module):
        return True
    return bool(source.rooms_importing(one) & source.rooms_importing(other))


def homonymous_files(source: Source) -> list[Homonym]:
    """Base names of modules that stand in several rooms."""
    by_name = defaultdict(list)
    for module, room in source.modules.items():
        if not source.is_package(module):
            by_name[module.rpartition(".")[2]].append((room, module))
    return [
        Homonym(name, tuple(module for _, module in places))
        for name, places in sorted(by_name.items())
        if len({room for room, _ in places}) >= ROOMS_FOR_A_FILE_NAME
    ]


def repeated(names: Iterable[tuple[str, str]]) -> frozenset[str]:
    """The names, of pairs of name and module, that several modules have."""
    modules = defaultdict(set)
    for name, module in names:
        modules[name].add(module)
    return frozenset(name for name, each in modules.items() if len(each) > 1)


def problems(
    kind: str, found: Iterable[Homonym], reasons: Mapping[str, str], defined: frozenset[str]
) -> list[str]:
    """One line for each name without a reason, and each reason for a name not `defined` twice."""
    names = {each.name: each for each in found}
    return [
        *(
            f"{kind} {each.name}: {', '.join(each.places)}"
            for each in names.values()
            if each.name not in reasons
        ),
        *(
            f"{kind} {name}: is no homonym any more, take its reason off the list"
            for name in reasons
            if name not in defined
        ),
    ]


def main(checkout: Path = ROOT) -> int:
    """Prints the counts, and what has no reason."""
    source = read(checkout / "src" / PACKAGE)
    classes, files = homonymous_classes(source), homonymous_files(source)
    distant = distant_classes(source)
    classes_twice = repeated((each.name, each.module) for each in source.classes)
    files_twice = repeated((each.rpartition(".")[2], each) for each in source.modules)
    lines = [
        *problems("class", [*classes, *distant], CLASSES_WITH_REASON, classes_twice),
        *problems("file", files, FILES_WITH_REASON, files_twice),
    ]
    print(f"{'':40} found  with a reason")
    for what, found, reasons in (
        ("class names in one room or in neighbours", classes, CLASSES_WITH_REASON),
        ("class names in rooms that never meet", distant, CLASSES_WITH_REASON),
        (f"file names in {ROOMS_FOR_A_FILE_NAME} or more rooms", files, FILES_WITH_REASON),
    ):
        print(f"{what:40} {len(found):5}  {sum(each.name in reasons for each in found):13}")
    print("", *lines, sep="\n" if lines else "", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
