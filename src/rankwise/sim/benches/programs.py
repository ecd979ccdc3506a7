"""Finding programs and calling them: those that ship by name, a user's own by path.

A program is a module with `run(torch)` or `worker(rank, world_size, torch)`. What it takes besides,
by name and with a default, are its parameters: `--set m=512` sets them, and the default's type says
how the text is read.
"""

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.sim.benches import NAMES
from rankwise.sim.benches.planning import world_size_of
from rankwise.sim.reporting.results import BenchResult

_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Program:
    """Something to run.

    Attributes:
        name: how messages call it.
        parameters: what it takes by name, with the defaults.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self._module = module
        run, worker = getattr(module, "run", None), getattr(module, "worker", None)
        self._has_run = callable(run)
        called = run if self._has_run else worker
        if not callable(called):
            raise ConfigError(
                f"{name} has neither run(torch) nor worker(rank, world_size, torch)",
                hint="define one of them",
            )
        self.parameters = _parameters(called)

    def run(self, torch: Any, values: Mapping[str, str]) -> list[BenchResult]:
        """Run it in a context; return what it measured, if it measures anything."""
        options = {name: self._converted(name, text) for name, text in values.items()}
        if self._has_run:
            measured = self._module.run(torch, **options)
        else:
            size = world_size_of(torch)
            worker: Callable[..., object] = partial(self._module.worker, **options)
            measured = torch.multiprocessing.spawn(worker, args=(size, torch), nprocs=size)
        if callable(getattr(self._module, "results", None)):
            measured = self._module.results(torch, **options)
        return [each for each in measured or () if isinstance(each, BenchResult)]

    def _converted(self, name: str, text: str) -> Any:
        if name not in self.parameters:
            close = difflib.get_close_matches(name, self.parameters, n=1)
            known = ", ".join(self.parameters) or "none"
            hint = f"did you mean {close[0]}?" if close else f"its parameters are: {known}"
            raise ConfigError(f"{self.name} has no parameter {name!r}", hint=hint)
        default = self.parameters[name]
        try:
            if isinstance(default, bool):
                return _SWITCHES[text.lower()]
            # No default value, but None: in the programs that ship that is a number to be found.
            kind = int if default is None else type(default)
            return kind(text)
        except (ValueError, KeyError):
            wanted = "a number" if default is None else f"a value like {default!r}"
            raise ConfigError(
                f"parameter {name} of {self.name} is {text!r}, expected {wanted}"
            ) from None


def _parameters(called: Callable[..., Any]) -> dict[str, Any]:
    return {
        parameter.name: parameter.default
        for parameter in inspect.signature(called).parameters.values()
        if parameter.default is not inspect.Parameter.empty
    }


def shipped_program(name: str) -> Program:
    """The bench of that name."""
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(NAMES)}"
        raise ConfigError(f"there is no bench {name!r}", hint=hint)
    return Program(name, import_module(f"rankwise.sim.benches.{name}"))


def program_from_file(path: str) -> Program:
    """A user's own program; what stands beside it can be imported by it."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no program {path!r}")
    spec = spec_from_file_location("rankwise_simulated_program", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path!r} is no Python program", hint="its name should end in .py")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = module_from_spec(spec)
    # Under its name, so that what it defines can be found again: by pickle, by inspect.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return Program(path, module)


def summaries() -> list[tuple[str, str]]:
    """Every bench that ships, with the first line of what it says about itself."""
    modules = [(name, import_module(f"rankwise.sim.benches.{name}")) for name in NAMES]
    return [(name, (module.__doc__ or "").partition("\n")[0]) for name, module in modules]
