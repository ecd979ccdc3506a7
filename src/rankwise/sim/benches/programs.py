"""Finding programs and calling them: those that ship by name, a user's own by path.

A program is a module with `run(torch)` or `worker(rank, world_size, torch)`. Its other arguments,
by name and with a default, are its parameters: `--set m=512` sets them (`parameters`).

A user's file is looked at before it is executed: what is no Python, or can define neither function,
is refused without running a line of it.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import hint_on_name
from rankwise.sim.benches import NAMES
from rankwise.sim.benches.parameters import Parameters, signature_of
from rankwise.sim.benches.planning import world_size_of
from rankwise.sim.files import read_bytes
from rankwise.sim.reporting.results import BenchResult

_ENTRIES = {"run": "run(torch)", "worker": "worker(rank, world_size, torch)"}
_EXPECTED = (
    "define run(torch), or worker(rank, world_size, torch), at the top level; a script that says"
    " `import triton` runs as it is with --triton"
)


class Program:
    """Something to run.

    Attributes:
        name: how messages call it.
        parameters: what it takes by name.
        computes: whether there are numbers.
    """

    computes = True

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self._module = module
        found = [entry for entry in _ENTRIES if callable(getattr(module, entry, None))]
        if not found:
            raise _without_entry(name)
        self._has_run = found[0] == "run"
        called = getattr(module, found[0])
        _check_signature(name, found[0], called)
        self.parameters = Parameters(name, called)

    def run(self, torch: Any, options: Mapping[str, Any]) -> list[BenchResult]:
        """Run it in a context, with values for some of its parameters.

        Returns:
            What it measured, if it measures anything.
        """
        if self._has_run:
            measured = self._module.run(torch, **options)
        else:
            size = world_size_of(torch)
            worker: Callable[..., object] = partial(self._module.worker, **options)
            measured = torch.multiprocessing.spawn(worker, args=(size, torch), nprocs=size)
        if callable(getattr(self._module, "results", None)):
            measured = self._module.results(torch, **options)
        if not isinstance(measured, list | tuple):
            return []
        return [each for each in measured if isinstance(each, BenchResult)]


def shipped_program(name: str) -> Program:
    """The bench of that name."""
    if name not in NAMES:
        hint = hint_on_name(name, NAMES, "there are")
        if Path(name).is_file():
            hint = f"to run a file: rankwise sim run {name}"
        raise ConfigError(f"there is no bench {name!r}", hint=hint)
    return Program(name, import_module(f"rankwise.sim.benches.{name}"))


def program_from_file(path: str) -> Program:
    """A user's own program; what stands beside it can be imported by it.

    Raises:
        ConfigError: it cannot be read, is no Python, or has neither entry.
    """
    file = Path(path)
    try:
        source = read_bytes(file)
    except FileNotFoundError:
        hint = f"to run what ships: rankwise sim bench {path}" if path in NAMES else None
        place = "" if file.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(f"program {path!r} does not exist{place}", hint=hint) from None
    except OSError as error:
        raise ConfigError(f"program {path!r} cannot be read: {error.strerror}") from error
    _check_source(path, source)
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    loader = SourceFileLoader("rankwise_simulated_program", str(file))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None, "a loader of our own makes a spec"
    module = module_from_spec(spec)
    # Under its name, so that what it defines can be found again: by pickle, by inspect.
    sys.modules[spec.name] = module
    loader.exec_module(module)
    return Program(path, module)


def summaries() -> list[tuple[str, str]]:
    """Every bench that ships, with the first line of what it says about itself."""
    modules = [(name, import_module(f"rankwise.sim.benches.{name}")) for name in NAMES]
    return [(name, (module.__doc__ or "").partition("\n")[0]) for name, module in modules]


def _without_entry(path: str) -> ConfigError:
    entries = " nor ".join(_ENTRIES.values())
    return ConfigError(f"{path} has neither {entries}", hint=_EXPECTED)


def _check_signature(program: str, entry: str, called: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called with what every program is given."""
    if inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called):
        raise ConfigError(
            f"{program}: {entry} is a coroutine or a generator, and calling it would run nothing",
            hint="make it a plain function: its calls wait by themselves",
        )
    given = [None] * (1 + _ENTRIES[entry].count(","))
    try:
        signature_of(called).bind(*given)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{program}: {entry} is called as {_ENTRIES[entry]}, but: {error}",
            hint="give all further parameters a default",
        ) from None


def _check_source(path: str, source: bytes) -> None:
    """Refuse what is no Python, and what certainly defines no entry."""
    try:
        tree = ast.parse(source, path)
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else path
        raise ConfigError(f"{place}: this is not Python: {error.msg}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: this is not Python: {error}") from None
    names = _top_level_names(tree)
    if "*" not in names and not names & set(_ENTRIES):
        raise _without_entry(path)


def _top_level_names(tree: ast.Module) -> set[str]:
    """Names that a module may bind; `*` if it may bind others, too."""
    names: set[str] = set()
    remaining: list[ast.AST] = list(tree.body)
    while remaining:
        node = remaining.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
                continue  # what stands inside is the function's own
            case ast.ClassDef(name=name):
                names.add(name)
                continue
            case ast.alias(name=name, asname=asname):
                names.add(asname or name.partition(".")[0])
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Name(id="globals" | "exec" | "setattr" | "vars"):
                names.add("*")
            case _:
                pass
        remaining.extend(ast.iter_child_nodes(node))
    return names
