"""What a process has once and each simulated rank must have for itself.

Two kinds. What hangs on a name (`sys.argv`, `os.environ`, `sys.modules["__main__"]`, the working
directory) is moved in and out when the baton changes hands, by `ProcessBelongings`. What costs
more to move, such as the state of a random generator, stays with each rank, and the process's
functions are replaced by ones that look for the rank that runs (`substitutes`).
"""

import builtins
import gc
import logging
import multiprocessing.context
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TextIO

import msgspec

from rankwise.sim.rehearsal.modules import MAIN, UserModules
from rankwise.sim.rehearsal.scheduler import Belongings, Rank


class RankProcess(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank begins with, as a process of its own would.

    Attributes:
        environment: its whole environment.
        argv, path: its `sys.argv` and `sys.path`.
    """

    environment: Mapping[str, str]
    argv: tuple[str, ...] = ()
    path: tuple[str, ...] = ()


class _Name(NamedTuple):
    """A name in some namespace; its value belongs to the rank."""

    namespace: dict[str, Any]
    name: str
    first: Callable[[RankProcess], Any]


_RARE: tuple[tuple[dict[str, Any], str], ...] = (
    (builtins.__dict__, "print"),
    (warnings.__dict__, "showwarning"),
    (logging.__dict__, "_warnings_showwarning"),
    (tempfile.__dict__, "tempdir"),
    (multiprocessing.context._default_context.__dict__, "_actual_context"),  # noqa: SLF001  # as set_start_method does
)
"""Names that few programs change: put in their place only where the rank before has others."""


def _names(stdout: TextIO, stderr: TextIO) -> list[_Name]:
    system, environ = sys.__dict__, os.environ.__dict__
    return [
        _Name(environ, "_data", _environment),
        _Name(os.environb.__dict__, "_data", lambda _: environ["_data"]),
        _Name(system, "argv", lambda process: list(process.argv)),
        _Name(system, "path", lambda process: list(process.path)),
        _Name(system, "excepthook", lambda _: sys.__excepthook__),
        _Name(system, "displayhook", lambda _: sys.__displayhook__),
        _Name(system, "stdout", lambda _: stdout),
        _Name(system, "stderr", lambda _: stderr),
        _Name(system, "stdin", lambda _: sys.stdin),
        _Name(warnings.__dict__, "filters", lambda _: list(warnings.filters)),
        _Name(logging.root.__dict__, "handlers", lambda _: list(logging.root.handlers)),
        _Name(logging.root.manager.__dict__, "loggerDict", _loggers),
    ]


def _environment(process: RankProcess) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(text) for name, text in process.environment.items()}


def _loggers(_process: RankProcess) -> dict[str, Any]:
    return dict(logging.root.manager.loggerDict)


class ProcessBelongings:
    """Moves a rank's process state in and out; a `Belongings`.

    Args:
        stdout, stderr: what all ranks find as `sys.stdout` and `sys.stderr`.
        after: what to call when a shared module has been imported, by its name.
        packages: installed packages that each rank imports for itself.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        after: dict[str, Callable[[], None]],
        packages: Sequence[str] = (),
    ) -> None:
        self._names = _names(stdout, stderr)
        self._slots = [(each.namespace, each.name) for each in self._names]
        self._more: list[Belongings] = []
        self._users = UserModules(self._note_import, after, packages)
        self._home_values: list[Any] = []
        self._home_modules: dict[str, ModuleType] = {}
        self._home_directory = ""
        self._directory = ""
        self._settings = _settings()
        self._rare: list[Any] = []
        self._present_rare: list[Any] = []
        self._rank: Rank | None = None

    def add(self, belongings: Belongings) -> None:
        """Move more things of the ranks; called by the rank that runs."""
        self._more.append(belongings)
        if self._rank is not None:
            belongings.move_in(self._rank)

    def begin(self) -> None:
        """Keep what the process has, until `end`; the user's modules leave the table."""
        self._home_values = [each.namespace.get(each.name) for each in self._names]
        self._rare = self._present_rare = [namespace[name] for namespace, name in _RARE]
        self._settings = _settings()
        self._home_modules = {MAIN: sys.modules[MAIN], **self._users.loaded()}
        self._home_directory = self._directory = os.getcwd()  # noqa: PTH109  # as os.chdir has it
        for name in self._home_modules:
            sys.modules.pop(name, None)
        self._users.install()

    def end(self) -> None:
        """Give the process back what it had."""
        self._users.uninstall()
        for each, value in zip(self._names, self._home_values, strict=True):
            each.namespace[each.name] = value
        sys.modules.update(self._home_modules)
        self._change_directory(self._home_directory)
        self._put_rare(self._rare)
        _set(self._settings)

    def move_in(self, rank: Rank) -> None:
        """Let a rank find its own things."""
        self._rank = rank
        mine = rank.belongings.get(self)
        if mine is None:
            mine = rank.belongings[self] = self._first(rank)
        for (namespace, name), value in zip(self._slots, mine.values):  # noqa: B905  # equally many; a check at each hand-over would cost
            namespace[name] = value
        sys.modules.update(mine.modules)
        if mine.directory != self._directory:
            self._change_directory(mine.directory)
        if mine.rare != self._present_rare:
            self._put_rare(mine.rare)
        if mine.settings != _settings():
            _set(mine.settings)
        for more in self._more:
            more.move_in(rank)

    def move_out(self, rank: Rank) -> None:
        """Keep what a rank has, and take its modules from the table."""
        mine: _Mine = rank.belongings[self]
        for more in self._more:
            more.move_out(rank)
        try:
            mine.values = [namespace[name] for namespace, name in self._slots]
        except KeyError:  # it has deleted one
            mine.values = [namespace.get(name) for namespace, name in self._slots]
        mine.rare = self._present_rare = [namespace[name] for namespace, name in _RARE]
        mine.settings = _settings()
        table = sys.modules
        mine.modules = {name: table.pop(name) for name in mine.module_names if name in table}
        self._rank = None

    def directory_changed(self) -> None:
        """The rank that runs has changed its working directory."""
        self._directory = os.getcwd()  # noqa: PTH109  # the same
        if self._rank is not None:
            self._rank.belongings[self].directory = self._directory

    def module_names(self, rank: Rank) -> "dict[str, None]":
        """The names of the user's modules that a rank has imported."""
        names: dict[str, None] = rank.belongings[self].module_names
        return names

    def _first(self, rank: Rank) -> "_Mine":
        process: RankProcess = rank.process
        values = []
        for each, home in zip(self._names, self._home_values, strict=True):
            each.namespace[each.name] = home
            first = each.first(process)
            each.namespace[each.name] = first
            values.append(first)
        return _Mine(values, self._rare, ModuleType(MAIN), self._home_directory, self._settings)

    def _note_import(self, name: str) -> None:
        if self._rank is not None:
            self.module_names(self._rank)[name] = None

    def _change_directory(self, directory: str) -> None:
        if directory != self._directory:
            _chdir(directory)
            self._directory = directory

    def _put_rare(self, values: list[Any]) -> None:
        for (namespace, name), value in zip(_RARE, values, strict=True):
            namespace[name] = value
        self._present_rare = values


def _settings() -> tuple[int, int, bool]:
    """What `logging` lets through (root's level, `logging.disable`), and whether `gc` runs."""
    return logging.root.level, logging.root.manager.disable, gc.isenabled()


def _set(settings: tuple[int, int, bool]) -> None:
    level, disabled, collects = settings
    if collects != gc.isenabled():
        (gc.enable if collects else gc.disable)()
    if (level, disabled) != (logging.root.level, logging.root.manager.disable):
        logging.root.level, logging.root.manager.disable = level, disabled
        logging.root.manager._clear_cache()  # type: ignore[attr-defined]  # noqa: SLF001  # as setLevel does


class _Mine:
    """What one rank has."""

    def __init__(
        self,
        values: list[Any],
        rare: list[Any],
        main: ModuleType,
        directory: str,
        settings: tuple[int, int, bool],
    ) -> None:
        self.values = values
        self.rare = rare
        self.module_names: dict[str, None] = {MAIN: None}
        self.modules: dict[str, ModuleType] = {MAIN: main}
        self.directory = directory
        self.settings = settings


_chdir = os.chdir
