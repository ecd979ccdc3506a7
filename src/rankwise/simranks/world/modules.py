"""Modules of the user's own: each rank imports them afresh, so that each has its own globals.

What comes with Python, what is installed, in site-packages or elsewhere on the path, and rankwise
itself are shared: torch can be imported once in a process. Installed packages that take a process
for a rank are chosen by their names, and count as the user's. The import system has one table of
modules, `sys.modules`, to which C code refers directly; so the table stays, and its entries are
moved in and out.

An extension module of the user's is shared too: most of them cannot be loaded twice.
"""

import csv
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

MAIN = "__main__"
PACKAGES_OF_PROCESSES = frozenset({"functorch", "numpy", "torch", "torchgen"})
"""Packages that C++ registers once in a process: shared also as a checkout of their sources."""
PACKAGES_OF_RANKS = frozenset({"accelerate", "deepspeed", "megatron", "torchtitan", "transformers"})
"""Installed packages that keep what they know of their rank in globals of their modules, or classes
of such a package there, as transformers does."""


@cache
def shared_places() -> tuple[str, ...]:
    """Where modules lie that all ranks share, each with a slash at its end."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    package = Path(__file__).parents[2]
    return tuple(f"{Path(path)}/" for path in dict.fromkeys([*paths, str(package)]))


def is_shared(file: str) -> bool:
    """Whether all ranks share the module of a file: it is part of what is installed."""
    return file.startswith((*shared_places(), *_installed_elsewhere))


_installed_elsewhere: set[str] = set()
"""Packages and files of other places that turned out to be installed."""


class UserModules:
    """A finder that takes note of the user's modules, and of the end of chosen imports.

    Args:
        on_import: is told the name of each module of the user's that is about to be imported.
        after: what to call once a shared module has been imported, by its name.
        packages: installed packages that count as the user's, by their names in imports.
    """

    def __init__(
        self,
        on_import: Callable[[str], None],
        after: dict[str, Callable[[], None]],
        packages: Iterable[str] = (),
    ) -> None:
        self._on_import = on_import
        self._after = after
        self._shared = shared_places()
        self._packages = PACKAGES_OF_RANKS.union(packages)

    def install(self) -> None:
        """Watch imports from now on."""
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Watch them no more."""
        sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module where the other finders do."""
        for finder in list(sys.meta_path):
            if finder is self or (find := getattr(finder, "find_spec", None)) is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if self.is_users(spec):
                    self._on_import(name)
                elif name in self._after and spec.loader is not None:
                    spec.loader = cast("Loader", _FollowedLoader(spec.loader, self._after[name]))
                return spec
        return None

    def is_of_ranks(self, name: str) -> bool:
        """Whether each rank imports the module of this name for itself, though it is installed."""
        return name.partition(".")[0] in self._packages

    def is_users(self, spec: ModuleSpec | None) -> bool:
        """Whether the module that a spec describes is the user's, or counts as such."""
        if spec is None or isinstance(spec.loader, ExtensionFileLoader):
            return False
        if self.is_of_ranks(spec.name):
            return True
        if not spec.has_location:
            return spec.origin is None and self._are_users(spec.submodule_search_locations or ())
        return (
            spec.origin is not None and self._are_users((spec.origin,)) and not _is_installed(spec)
        )

    def loaded(self) -> dict[str, ModuleType]:
        """The user's modules that are in the table now, without `__main__`."""
        return {
            name: module
            for name, module in list(sys.modules.items())
            if name != MAIN and self.is_users(getattr(module, "__spec__", None))
        }

    def _are_users(self, places: Iterable[str]) -> bool:
        places = list(places)
        return bool(places) and not any(place.startswith(self._shared) for place in places)


def _is_installed(spec: ModuleSpec) -> bool:
    """Whether an installer has put a module where it lies: with `pip install --target`, say."""
    levels = spec.name.count(".") + (1 if spec.submodule_search_locations is None else 2)
    parts = Path(spec.origin or "").parts
    if len(parts) <= levels:
        return False
    folder, package = Path(*parts[:-levels]), parts[-levels]
    if package not in PACKAGES_OF_PROCESSES and package not in _installed_in(folder):
        return False
    # `torch/` has nothing of a `torch_train.py` beside it.
    _installed_elsewhere.add(f"{folder / package}{'/' if levels > 1 else ''}")
    return True


@cache
def _installed_in(folder: Path) -> frozenset[str]:
    """The files and packages in a folder that its installers' records name."""
    names: set[str] = set()
    for record in folder.glob("*.*-info"):
        if (record / "SOURCES.txt").exists():  # beside a project's own sources: `pip install -e`
            continue
        with suppress(OSError):
            names.update((record / "top_level.txt").read_text(encoding="utf-8").split())
        with suppress(OSError), (record / "RECORD").open(newline="", encoding="utf-8") as rows:
            names.update(row[0].partition("/")[0] for row in csv.reader(rows) if row)
    return frozenset(names | {f"{name}.py" for name in names})


class _FollowedLoader:
    """A loader that calls a function once its module is complete."""

    def __init__(self, loader: Any, follow: Callable[[], None]) -> None:
        self._loader = loader
        self._follow = follow

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as its own loader does."""
        spec.loader = self._loader
        module: ModuleType | None = self._loader.create_module(spec)
        spec.loader = cast("Loader", self)  # until it is executed
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute it as its own loader does, then follow."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._follow()
