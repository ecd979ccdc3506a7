"""What a process has once and each simulated rank must have for itself.

Two kinds. State under a name (`sys.argv`, `os.environ`, `sys.modules["__main__"]`, the working
directory) is moved in and out when the run token changes hands, by `ProcessState`. State that costs
more to move, such as the state of a random generator, stays with each rank, and the process's
functions are replaced by ones that look for the rank that runs (`process_patches`).
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

from rankwise.simranks.world.modules import MAIN, UserModules
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.scheduler import PerRankState


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


def _environment(process: RankProcess) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(text) for name, text in process.environment.items()}


_environ, _environb, _root, _manager = os.environ, os.environb, logging.root, logging.root.manager
_context: Any = multiprocessing.context._default_context  # noqa: SLF001  # as set_start_method does
_ENVIRON, _ENVIRONB, _SYSTEM, _WARNINGS = map(vars, (_environ, _environb, sys, warnings))
_ROOT, _MANAGER = map(vars, (_root, _manager))
_OWN: tuple[_Name, ...] = (
    _Name(_ENVIRON, "_data", _environment),
    _Name(_ENVIRONB, "_data", lambda _: _ENVIRON["_data"]),
    _Name(_SYSTEM, "argv", lambda process: list(process.argv)),
    _Name(_SYSTEM, "path", lambda process: list(process.path)),
    _Name(_SYSTEM, "excepthook", lambda _: sys.__excepthook__),  # torch.distributed sets it
    _Name(_WARNINGS, "filters", lambda _: list(warnings.filters)),
    _Name(_ROOT, "handlers", lambda _: list(_root.handlers)),
    _Name(_MANAGER, "loggerDict", lambda _: dict(_manager.loggerDict)),
)
"""Names whose values differ from rank to rank from the first."""


def _own_values() -> tuple[Any, ...]:
    """What they are; written out, as below, since that is quicker, and done at each hand-over."""
    return (
        _environ._data, _environb._data, sys.argv, sys.path, sys.excepthook, warnings.filters,  # type: ignore[attr-defined]  # noqa: SLF001  # as os does
        _root.handlers, _manager.loggerDict,
    )  # fmt: skip


def _put_own(values: tuple[Any, ...]) -> None:
    (
        _ENVIRON["_data"], _ENVIRONB["_data"], _SYSTEM["argv"], _SYSTEM["path"],
        _SYSTEM["excepthook"], _WARNINGS["filters"], _ROOT["handlers"], _MANAGER["loggerDict"],
    ) = values  # fmt: skip


_ALIKE: tuple[tuple[dict[str, Any], str], ...] = (
    *((_SYSTEM, name) for name in ("displayhook", "stdout", "stderr", "stdin")),
    (vars(builtins), "print"),
    (_WARNINGS, "showwarning"),
    (vars(logging), "_warnings_showwarning"),
    (vars(tempfile), "tempdir"),
    (vars(_context), "_actual_context"),
    (_ROOT, "level"),
    (_MANAGER, "_disable"),
)
"""Names that few programs change: put in their place only where the rank before has others.

The settings of `logging` are at the end.
"""


def _alike_values() -> tuple[Any, ...]:
    return (
        sys.displayhook, sys.stdout, sys.stderr, sys.stdin,
        builtins.print, warnings.showwarning, logging._warnings_showwarning,  # type: ignore[attr-defined]  # noqa: SLF001  # as logging does
        tempfile.tempdir, _context._actual_context, _root.level, _manager._disable,  # type: ignore[attr-defined]  # noqa: SLF001  # the same
    )  # fmt: skip


class ProcessState:
    """Moves a rank's process state in and out; a `PerRankState`.

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
        self._streams = (stdout, stderr)
        self._more: list[PerRankState] = []
        self._users = UserModules(self._note_import, after, packages)
        self._home_values: tuple[Any, ...] = ()
        self._home_modules: dict[str, ModuleType] = {}
        self._home_directory = ""
        self._directory = ""
        self._home_alike: tuple[Any, ...] = ()
        self._first_alike: tuple[Any, ...] = ()
        self._present_alike: tuple[Any, ...] = ()
        self._home_collects = True
        self._rank: Rank | None = None

    def add(self, own_state: PerRankState) -> None:
        """Move more things of the ranks; called by the rank that runs."""
        self._more.append(own_state)
        if self._rank is not None:
            own_state.move_in(self._rank)

    def is_of_ranks(self, module: str) -> bool:
        """Whether each rank imports this module for itself, though it is installed."""
        return self._users.is_of_ranks(module)

    def begin(self) -> None:
        """Keep what the process has, until `end`; the user's modules leave the table."""
        self._home_values = tuple(each.namespace.get(each.name) for each in _OWN)
        self._home_alike = self._present_alike = _alike_values()
        self._home_collects = gc.isenabled()
        self._first_alike = (sys.__displayhook__, *self._streams, *self._home_alike[3:])
        self._home_modules = {MAIN: sys.modules[MAIN], **self._users.loaded()}
        self._home_directory = self._directory = os.getcwd()  # noqa: PTH109  # as os.chdir has it
        for name in self._home_modules:
            sys.modules.pop(name, None)
        self._users.install()

    def end(self) -> None:
        """Give the process back what it had."""
        self._users.uninstall()
        _put_own(self._home_values)
        sys.modules.update(self._home_modules)
        self._change_directory(self._home_directory)
        self._put_alike(self._home_alike)
        _collect(self._home_collects)

    def move_in(self, rank: Rank) -> None:
        """Let a rank find its own things."""
        self._rank = rank
        mine = rank.own_state.get(self)
        if mine is None:
            mine = rank.own_state[self] = self._first(rank)
        _put_own(mine.values)
        sys.modules.update(mine.modules)
        if mine.directory != self._directory:
            self._change_directory(mine.directory)
        if mine.alike is not self._present_alike:
            self._put_alike(mine.alike)
        if mine.collects != gc.isenabled():
            _collect(mine.collects)
        for more in self._more:
            more.move_in(rank)

    def move_out(self, rank: Rank) -> None:
        """Keep what a rank has, and take its modules from the table."""
        mine: _StateOfRank = rank.own_state[self]
        for more in self._more:
            more.move_out(rank)
        try:
            mine.values, alike = _own_values(), _alike_values()
        except AttributeError:  # it has deleted one
            mine.values = tuple(each.namespace.get(each.name) for each in _OWN)
            alike = tuple(namespace.get(name) for namespace, name in _ALIKE)
        mine.collects = gc.isenabled()
        if alike != mine.alike:
            mine.alike = self._present_alike = alike
        table, modules = sys.modules, mine.modules
        for name in mine.module_names:
            if name in table:
                modules[name] = table.pop(name)
            else:
                modules.pop(name, None)
        self._rank = None

    def environment_of(self, rank: Rank) -> dict[bytes, bytes]:
        """The variables of a rank that has run, whether it runs now or not."""
        environment: dict[bytes, bytes] = rank.own_state[self].values[0]
        return environment

    def settle(self, rank: Rank) -> None:
        """A child that a thread of this rank has forked finds what the rank has."""
        if self._rank is not rank:
            mine: _StateOfRank = rank.own_state[self]
            _put_own(mine.values)
            self._change_directory(mine.directory)

    def directory_changed(self) -> None:
        """The rank that runs has changed its working directory."""
        self._directory = os.getcwd()  # noqa: PTH109  # the same
        if self._rank is not None:
            self._rank.own_state[self].directory = self._directory

    def module_names(self, rank: Rank) -> "dict[str, None]":
        """The names of the user's modules that a rank has imported."""
        names: dict[str, None] = rank.own_state[self].module_names
        return names

    def _first(self, rank: Rank) -> "_StateOfRank":
        process: RankProcess = rank.process
        values = []
        for each, home in zip(_OWN, self._home_values, strict=True):
            each.namespace[each.name] = home
            first = each.first(process)
            each.namespace[each.name] = first
            values.append(first)
        alike, collects = self._first_alike, self._home_collects
        return _StateOfRank(tuple(values), alike, ModuleType(MAIN), self._home_directory, collects)

    def _note_import(self, name: str) -> None:
        if self._rank is not None:
            self.module_names(self._rank)[name] = None

    def _change_directory(self, directory: str) -> None:
        if directory != self._directory:
            _chdir(directory)
            self._directory = directory

    def _put_alike(self, values: tuple[Any, ...]) -> None:
        for (namespace, name), value in zip(_ALIKE, values, strict=True):
            namespace[name] = value
        if values[-2:] != self._present_alike[-2:]:
            _manager._clear_cache()  # type: ignore[attr-defined]  # noqa: SLF001  # as setLevel does
        self._present_alike = values


class _StateOfRank:
    def __init__(
        self,
        values: tuple[Any, ...],
        alike: tuple[Any, ...],
        main: ModuleType,
        directory: str,
        collects: bool,  # the constructor of a record
    ) -> None:
        self.values = values
        self.alike = alike
        self.module_names: dict[str, None] = {MAIN: None}
        self.modules: dict[str, ModuleType] = {MAIN: main}
        self.directory = directory
        self.collects = collects
        """Whether `gc` runs by itself."""


def _collect(collects: bool) -> None:  # what it is set to
    if collects != gc.isenabled():
        (gc.enable if collects else gc.disable)()


_chdir = os.chdir
