"""The first import of a package by a program, before it happens.

Something stands for the package, and is installed when a program imports it. A finder would not do:
a library may have imported the real package for itself before. That library goes on with what it
has; all others get what is installed. So import statements are watched, in
`builtins.__import__`, and `importlib.import_module`. Of a package that is not imported yet, a
finder takes the other ways to ask, too (`importlib.util.find_spec`).
"""

import builtins
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, Self

_IMPORTLIB: Any = vars(importlib)["_bootstrap"]
"""The module whose function `importlib.import_module` calls, by whatever name a program has it."""
_WAYS_OF_IMPORTING = frozenset({"_frozen_importlib", "importlib", "rankwise"})


class FirstImport(MetaPathFinder):
    """Waits, while it is entered, for the first import of a package.

    Args:
        package: whose import.
        library: a package whose own imports of it do not count, nor do the package's of itself.
        then: what to do; after that, `sys.modules` has the package.
    """

    def __init__(self, package: str, *, library: str, then: Callable[[], None]) -> None:
        self._package = package
        self._library = library
        self._then: Callable[[], None] | None = then
        self._own_import = builtins.__import__
        self._find_and_load = _IMPORTLIB._gcd_import  # noqa: SLF001  # see `_IMPORTLIB`

    def __enter__(self) -> Self:
        self._own_import = builtins.__import__
        builtins.__import__ = self._import
        self._find_and_load = _IMPORTLIB._gcd_import  # noqa: SLF001  # the same
        _IMPORTLIB._gcd_import = self._import_module  # noqa: SLF001  # the same
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._then = None
        sys.meta_path.remove(self)
        builtins.__import__ = self._own_import
        _IMPORTLIB._gcd_import = self._find_and_load  # noqa: SLF001  # see `_IMPORTLIB`

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let it happen, if code outside of the library imports the package."""
        del path, target
        if fullname != self._package or self._then is None:
            return None
        self._happen(_asking(sys._getframe(1)))  # noqa: SLF001  # there is no other way to it
        module = sys.modules.get(fullname)
        if module is None:
            return None
        spec = module.__spec__ or ModuleSpec(fullname, None, is_package=True)
        spec.loader = spec.loader or _Ready(module)  # or another one would be made
        return spec

    def _import(self, name: str, *args: Any, **kwargs: Any) -> ModuleType:
        if self._then is not None and name.partition(".")[0] == self._package:
            is_relative = bool(args[3] if args[3:] else kwargs.get("level"))
            if not is_relative:
                self._happen((args[0] if args else kwargs.get("globals")) or {})
        return self._own_import(name, *args, **kwargs)

    def _import_module(self, name: str, package: str | None = None, level: int = 0) -> ModuleType:
        if self._then is not None and not level and name.partition(".")[0] == self._package:
            self._happen(_asking(sys._getframe(1)))  # noqa: SLF001  # there is no other way to it
        module: ModuleType = self._find_and_load(name, package, level)
        return module

    def _happen(self, importer: Mapping[str, Any]) -> None:
        then, whose = self._then, str(importer.get("__name__")).partition(".")[0]
        # The package's own modules are executed when the library imports it.
        if then is None or whose in {self._library, self._package}:
            return
        self._then = None
        then()


def _asking(frame: FrameType | None) -> Mapping[str, Any]:
    """The globals of the module that asks for another one."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _WAYS_OF_IMPORTING:
            return frame.f_globals
        frame = frame.f_back
    return {}


class _Ready(Loader):
    """Gives a module that is complete."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """It is there."""
        del spec
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed."""
