"""Finds out what the workers run, and whether they can, before anything is started.

A mistake in a path would otherwise be told by every worker, in the interpreter's words.
"""

import errno
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankwise.base.errors import ConfigError
from rankwise.launch.run.job import Executable, Module, Program, Script
from rankwise.launch.run.search_path import search_path

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


_PYTHON = re.compile(r"(?:python|pypy)(?:\d(?:\.\d+)?)?t?")


def python_script(path: str, args: Sequence[str]) -> Script:
    """A script that exists and can be read; a directory or archive with `__main__.py` counts."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        place = "" if os.path.isabs(path) else f" in {os.getcwd()}"
        raise ConfigError(
            f"script {_quoted(path)} does not exist{place}",
            hint=_hint_on_script(path, args)
            or (f"use -m {path} to run a module" if _could_be_module(path) else None),
        ) from None
    except OSError as error:
        raise ConfigError(f"script {_quoted(path)} cannot be used: {_reason(error)}") from None
    if stat.S_ISDIR(mode) and not os.path.isfile(os.path.join(path, "__main__.py")):
        raise ConfigError(f"script {_quoted(path)} is a directory without __main__.py")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"script {_quoted(path)} cannot be read", hint="see its permissions")
    if _is_python(path) and stat.S_ISREG(mode) and _is_executable(path):
        raise ConfigError(
            f"script {_quoted(path)} is a Python interpreter", hint=_hint_on_script(path, args)
        )
    if path.endswith(".ipynb"):
        raise ConfigError(
            f"script {_quoted(path)} is a notebook",
            hint="call rankwise.run(function, nprocs=…) in one of its cells",
        )
    return Script(path, tuple(args))


def script_from_standard_input(args: Sequence[str]) -> Script:
    """The program that standard input holds, read to its end: each rank gets it."""
    try:
        source = sys.stdin.buffer.read()
    except OSError as error:
        raise ConfigError(f"script - (standard input) cannot be read: {_reason(error)}") from None
    if not source.strip():
        raise ConfigError(
            "script - is read from standard input, which is empty",
            hint="rankwise run - < train.py",
        )
    return Script("-", tuple(args), source)


def python_module(name: str, args: Sequence[str], environ: Mapping[str, str]) -> Module:
    """A module that `python -m` will find, when workers run this very interpreter."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"-m {_quoted(name)} is not a module's name",
            hint="leave -m out to run a script" if os.path.exists(name) else None,
        )
    if not environ.get("PYTHON_EXEC"):
        path = search_path(Module(name), environ)
        check_module(name, path, where="the current directory", is_run=True)
    return Module(name, tuple(args))


def executable(path: str, args: Sequence[str], environ: Mapping[str, str]) -> Executable:
    """A program that exists and may be executed; without a slash it is looked up in PATH."""
    if "/" not in path:
        folders = environ.get("PATH", os.defpath).split(os.pathsep)
        if not any(_is_executable(os.path.join(folder or ".", path)) for folder in folders):
            here = (
                f"write ./{path} for the file in this directory" if os.path.exists(path) else None
            )
            raise ConfigError(f"program {_quoted(path)} is not in PATH", hint=here)
    elif reason := _reason_missing(path):
        raise ConfigError(f"program {_quoted(path)} {reason}")
    elif os.path.isdir(path):
        raise ConfigError(f"program {_quoted(path)} is a directory")
    elif not _is_executable(path):
        raise ConfigError(
            f"program {_quoted(path)} may not be executed",
            hint=f"run chmod +x {path}, or leave out --no-python if it is a Python script",
        )
    return Executable(path, tuple(args))


def python_interpreter(environ: Mapping[str, str]) -> str:
    """The interpreter that PYTHON_EXEC names, or the empty string for this one."""
    path = environ.get("PYTHON_EXEC", "")
    if path:
        try:
            executable(path, (), environ)
        except ConfigError as error:
            raise ConfigError(f"PYTHON_EXEC: {error}") from None
    return path


def check_preload(name: str, program: Program, environ: Mapping[str, str]) -> None:
    """Make sure that the fork server for a program can find a module.

    Raises:
        ConfigError: it cannot.
    """
    where = "the script's directory" if isinstance(program, Script) else "the current directory"
    check_module(name, search_path(program, environ), where=where)


def check_module(name: str, path: list[str], *, where: str, is_run: bool = False) -> None:
    """Make sure that a module can be found.

    Args:
        name: the module.
        path: where to look.
        where: what to call the first of these places.
        is_run: whether it must be one that can be run as a program, too.

    Raises:
        ConfigError: it cannot be found, or run.
    """
    with _looking_in(path):
        spec = _find(name)
        if spec is None:
            raise ConfigError(f"module {name!r} is not found", hint=_where_modules_are(name, where))
        locations = spec.submodule_search_locations
        is_package = locations is not None
        if is_run and is_package and _find_in(f"{name}.__main__", locations) is None:
            raise ConfigError(f"module {name!r} is a package without __main__, so it cannot be run")


def _find(name: str) -> "ModuleSpec | None":
    """Find a module without importing its parents, unless only they know where it is."""
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        parent = spec.submodule_search_locations if spec else None
        if end > 1 and parent is None:
            return None
        spec = _find_in(".".join(parts[:end]), parent)
        if spec is None:
            break
    return spec or (_find_by_import(name) if len(parts) > 1 else None)


def _find_in(name: str, locations: Sequence[str] | None) -> "ModuleSpec | None":
    for finder in sys.meta_path:
        if (spec := finder.find_spec(name, locations)) is not None:
            return spec
    return None


def _find_by_import(name: str) -> "ModuleSpec | None":
    """Some packages make up their parts when imported; a parent that fails will say so itself."""
    from importlib.machinery import ModuleSpec  # noqa: PLC0415  # hardly ever comes to this
    from importlib.util import find_spec  # noqa: PLC0415  # the same

    try:
        return find_spec(name)
    except ModuleNotFoundError:
        return None
    except Exception:  # noqa: BLE001  # the workers will meet and report the very same error
        return ModuleSpec(name, None)


@contextmanager
def _looking_in(path: list[str]) -> Iterator[None]:
    before = list(sys.path)
    sys.path[:] = path
    try:
        yield
    finally:
        sys.path[:] = before


def _reason_missing(path: str) -> str:
    """Why nothing can be found at a path; empty when something can."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be used: {_reason(error)}"
    return ""


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "it is a symbolic link that leads back to itself"
    return str(error.strerror)


def _quoted(path: str) -> str:
    r"""A name in quotes, bytes that are no UTF-8 as `\xff`."""
    if path.isprintable():
        return repr(path)
    return f"'{os.fsencode(path).decode('utf-8', 'backslashreplace')}'"


def _is_executable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _could_be_module(path: str) -> bool:
    is_file = path.endswith((".py", ".ipynb", ".sh"))
    return not is_file and all(part.isidentifier() for part in path.split("."))


def _where_modules_are(name: str, first_place: str) -> str:
    if name.endswith(".py"):
        return "leave -m out to run a script"
    return f"looked in {first_place} and in the packages of {sys.executable}"


def _is_python(path: str) -> bool:
    """Whether this is how people call a Python interpreter."""
    return _PYTHON.fullmatch(os.path.basename(path)) is not None


def _hint_on_script(path: str, args: Sequence[str]) -> str | None:
    """The likely meaning of a script that does not exist."""
    if _is_python(path):
        return f"leave out {path}: rankwise run {args[0] if args else 'SCRIPT'}"
    words = path.split()
    if len(words) > 1 and _is_python(words[0]):
        return f"leave out {words[0]} and the quotes: rankwise run {' '.join(words[1:])}"
    first = words[:1]
    if first != [path] and first and os.path.exists(first[0]):
        return f"the quotes make it one word: write {path} without them"
    return None
