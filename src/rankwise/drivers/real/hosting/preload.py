"""Guesses what a fork server may import before it forks workers for a program.

The guess must be safe, not complete: a module that is imported too early can behave differently,
and one that is not guessed is imported by each worker, as always. Nothing is executed to make it.

**From a script**: the imports at its very beginning, up to the first statement that *does*
something. `os.environ["OMP_NUM_THREADS"] = "1"` before `import torch` is common, and means that
torch must not have been imported before. Imports inside `if` and `try` are left alone.

**From a pickled function**: the modules that the pickle names, and those that cloudpickle has
found in the function's global names.

Of these, only modules of the standard library and of `site-packages` count: the user's own code
is what changes between two runs of a warm fork server. A name for which the script's own directory
or PYTHONPATH holds something else does not count either.
"""

import ast
import io
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from importlib.util import decode_source
from itertools import islice
from typing import Any

_SITE_DIRECTORIES = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PICKLE_OPCODES_MAX = 100_000
"""Function and globals stand at the beginning of a pickle; a million numbers may follow."""

_BY_NAME = ("cloudpickle.cloudpickle", "subimport")
"""What cloudpickle calls, with a module's name, for a module among a function's global names."""


def modules_to_preload(
    program: tuple[Any, ...], payload: bytes = b"", path: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return names of modules that the workers will certainly import, in the order of first use.

    Args:
        program: as a fork server is told it: `("script", path, …)`, `("module", name, …)` or
            `("function",)`; `("source",)` is a script without a file, and nothing is known about
            any other.
        payload: the packed function, or the source.
        path: where the workers will look for modules, the script's own directory aside; by
            default `sys.path`.

    Never raises: what cannot be read, found or parsed is not preloaded.
    """
    search_path = [entry or os.getcwd() for entry in (sys.path if path is None else path)]
    try:
        if program[0] == "function":
            names = _names_in_pickles(payload)
        elif program[0] == "source":
            search_path.insert(0, os.getcwd())
            names = _names_in_source(payload)
        else:
            file = _file_of(program[0], program[1], search_path)
            own_directory = os.getcwd() if program[0] == "module" else os.path.dirname(file)
            search_path.insert(0, own_directory)
            with open(file, "rb") as source:
                names = _names_in_source(source.read())
        return tuple(name for name in dict.fromkeys(names) if _is_foreign(name, search_path))
    except Exception:  # noqa: BLE001 - a guess is not worth an error, and the worker will show it
        return ()


def _file_of(kind: str, target: str, search_path: list[str]) -> str:
    """Return the source file that will be `__main__`."""
    if kind == "script":
        location = os.path.realpath(target)
        return os.path.join(location, "__main__.py") if os.path.isdir(location) else location
    places: Sequence[str] | None = [os.getcwd(), *search_path]
    spec = None
    parts = target.split(".")
    for length in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:length]), places)
        if spec is None:
            raise ModuleNotFoundError(target)
        places = spec.submodule_search_locations
    if places is not None:
        spec = PathFinder.find_spec(f"{target}.__main__", places)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(target)
    return spec.origin


def _names_in_source(source: bytes) -> Iterator[str]:
    tree = ast.parse(decode_source(source))
    for statement in tree.body:
        match statement:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(name), level=0) if name != "__future__":
                yield name
            case ast.ImportFrom():
                continue
            case _:
                if not _is_inert(statement):
                    return


def leading_imports(
    source: bytes, path: Sequence[str], packages: Collection[str]
) -> tuple[list[str], str]:
    """Return the imports with which a source file begins, and what ends them.

    They are those of some installed packages, where nothing that could matter to them comes before.
    Imports of the standard library are skipped.

    Args:
        source: the file's content.
        path: where its modules are found, its own folder included.
        packages: names of the packages.

    Returns:
        Modules, and a sentence without its end; the latter is empty at the end of the file.
    """
    try:
        tree = ast.parse(decode_source(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [], "it is not a Python source file"
    places = [entry or os.getcwd() for entry in path]
    found: list[str] = []
    for statement in tree.body:
        match statement:
            case ast.ImportFrom(module="__future__"):
                continue
            case ast.ImportFrom(level=int(level)) if level > 0:
                return found, f"line {statement.lineno} imports a module of its own package"
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(name)):
                names = [name]
            case ast.Try() if any(map(_is_import, ast.walk(statement))):
                return found, f"line {statement.lineno} has imports that may fail"
            case _ if not _is_inert(statement):
                return found, f"line {statement.lineno} does something"
            case _:
                continue
        for name in names:
            if not _is_foreign(name, places):
                return found, f"line {statement.lineno} imports {name}, which is not installed"
            if name.partition(".")[0] in packages:
                found.append(name)
            elif name.partition(".")[0] not in sys.stdlib_module_names:
                return found, f"line {statement.lineno} imports {name}"
    return found, ""


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call | ast.Await | ast.NamedExpr)


def _is_inert(statement: ast.stmt) -> bool:
    """Tell whether a statement can only bind names, so that imports after it mean the same."""
    match statement:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]):
            # Defaults and annotations are evaluated now, the body is not.
            return not any(map(_is_call, ast.walk(statement.args)))
        case ast.Assign(targets=targets, value=value):
            return all(isinstance(target, ast.Name) for target in targets) and _is_literal(value)
        case ast.AnnAssign(target=ast.Name(), value=value):
            return value is None or _is_literal(value)
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return not statement.orelse
        case ast.Try(body=body, handlers=handlers, orelse=[], finalbody=[]):
            # Imports that may fail: not certain to happen, and so not preloaded.
            blocks = [body, *(handler.body for handler in handlers)]
            return all(
                isinstance(inner, ast.Import | ast.ImportFrom | ast.Pass) or _is_inert(inner)
                for block in blocks
                for inner in block
            )
        case _:
            return False


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return False
    return True


def _names_in_pickles(payload: bytes) -> Iterator[str]:
    """Return the modules that the pickles of a payload, one after the other, refer to."""
    import pickletools  # noqa: PLC0415 - takes 3 ms, and scripts do not need it

    pickles = io.BytesIO(payload)
    while pickles.tell() < len(payload):
        names = _PickleNames()
        for opcode, argument, _ in islice(pickletools.genops(pickles), _PICKLE_OPCODES_MAX):
            names.take(opcode.name, argument)
        yield from names.found
        if opcode.name != "STOP":
            return


class _PickleNames:
    """Follows a pickle's operations just far enough to see which modules it names."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._pushed: list[Any] = []
        self._memo: dict[int, Any] = {}

    def take(self, operation: str, argument: Any) -> None:
        """Take in the next operation."""
        if operation.endswith(("UNICODE", "UNICODE8")):
            self._push(argument)
        elif operation == "STACK_GLOBAL":
            self._push_global(self._pushed[-2], self._pushed[-1])
        elif operation == "GLOBAL":
            self._push_global(*argument.split(" ", 1))
        elif operation == "MEMOIZE":
            self._memo[len(self._memo)] = self._pushed[-1] if self._pushed else None
        elif operation in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[int(argument)] = self._pushed[-1] if self._pushed else None
        elif operation in ("GET", "BINGET", "LONG_BINGET"):
            self._push(self._memo.get(int(argument)))
        elif operation not in ("PROTO", "FRAME"):
            self._push(None)

    def _push(self, value: Any) -> None:
        if isinstance(value, str) and self._pushed and self._pushed[-1] == _BY_NAME:
            self.found.append(value)
        self._pushed.append(value)

    def _push_global(self, module: str, name: str) -> None:
        self.found.append(module)
        self._push((module, name))


def _is_foreign(name: str, search_path: list[str]) -> bool:
    """Tell whether importing a name gets the standard library or an installed package."""
    top = name.partition(".")[0]
    if top == "__main__":
        return False
    if BuiltinImporter.find_spec(top) or FrozenImporter.find_spec(top):
        return True
    spec = PathFinder.find_spec(top, search_path)
    if spec is None or spec.origin is None:
        return False
    places = os.path.dirname(spec.origin).split(os.sep)
    if any(directory in places for directory in _SITE_DIRECTORIES):
        return True
    return top in sys.stdlib_module_names and spec.origin.startswith(_STANDARD_LIBRARY)
