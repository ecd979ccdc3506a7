"""A script that says `import triton`, run as it is: by the emulator, or on a simulated machine."""

import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.sim.benches.parameters import Parameters
from rankwise.sim.reporting.results import BenchResult
from rankwise.sim.runtime.multiprocessing import exit_code
from rankwise.sim.triton.triton_shim import installed


class TritonScript:
    """The script, in the place of a program that knows the simulator.

    Attributes:
        parameters: none.
        computes: whether there are numbers.
    """

    computes = True

    def __init__(self, path: str, arguments: Sequence[str]) -> None:
        if not Path(path).is_file():
            raise ConfigError(f"script {path!r} does not exist")
        self._path = path
        self._arguments = arguments
        self.parameters = Parameters(path, lambda _torch: None)

    def run(self, context: Any, options: Mapping[str, Any]) -> list[BenchResult]:
        """Run it, on the context's machine; None is the emulator alone."""
        del options  # it has none
        machine: AbstractContextManager[None] = nullcontext()
        if context is not None:
            from rankwise.sim.runtime.host_tensors import launches_on  # noqa: PLC0415  # see there

            machine = launches_on(context)
        with installed(), machine, self._command_line():
            try:
                runpy.run_path(self._path, run_name="__main__")
            except SystemExit as end:
                if exit_code(end):
                    raise
        return []

    @contextmanager
    def _command_line(self) -> Iterator[None]:
        argv, path = sys.argv, list(sys.path)
        sys.argv = [self._path, *self._arguments]
        sys.path.insert(0, os.fspath(Path(self._path).resolve().parent))
        try:
            yield
        finally:
            sys.argv, sys.path[:] = argv, path
