"""Where the workers of a program look for modules first, and which files they run first.

A script finds the modules beside it, a module run with `-m` those of the working directory, as
under plain Python; PYTHONSAFEPATH takes both away. The modules that a fork server is to import, and
whether it can, is looked up in the very same places.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress

from rankwise.launch.run.job import Executable, Function, Module, Program, Script


def search_path(program: Program, environ: Mapping[str, str]) -> list[str]:
    """Where workers that run `program` with this interpreter look for modules, in order."""
    first = None if environ.get("PYTHONSAFEPATH") else _first_place(program)
    return list(sys.path) if first is None else [first, *sys.path]


def _first_place(program: Program) -> str | None:
    match program:
        case Script(source=bytes()):
            return os.getcwd()
        case Script(path=path):
            location = os.path.realpath(path)
            # A directory or archive that holds a `__main__.py` is itself where modules are.
            is_plain = os.path.isfile(location) and not _is_archive(location)
            return os.path.dirname(location) if is_plain else os.path.abspath(path)
        case Module():
            return os.getcwd()  # pathlib costs milliseconds
        case Function() | Executable():
            return None


def _is_archive(path: str) -> bool:
    from zipimport import ZipImportError, zipimporter  # noqa: PLC0415  # only with a fork server

    try:
        zipimporter(path)
    except ZipImportError:
        return False
    return True


def sources(program: Program) -> Iterator[bytes]:
    """The source files that are run before all others, in this order."""
    match program:
        case Script(source=bytes(source)):
            yield source
        case Script(path=path):
            location = os.path.join(path, "__main__.py") if os.path.isdir(path) else path
            yield from _read(location)
        case Module(name=name):
            for location in _files_of_module(name, search_path(program, os.environ)):
                yield from _read(location)
        case _:
            return


def _files_of_module(name: str, path: list[str]) -> Iterator[str]:
    """The files that `python -m` runs, packages first, if they are plain files in folders."""
    parts = name.split(".")
    for folder in path:
        base = os.path.join(folder, *parts)
        main = next(filter(os.path.isfile, (os.path.join(base, "__main__.py"), f"{base}.py")), None)
        if main is None:
            continue
        is_package = main.startswith(base + os.sep)
        for length in range(1, len(parts) + is_package):
            init = os.path.join(folder, *parts[:length], "__init__.py")
            if os.path.isfile(init):
                yield init
        yield main
        return


def _read(path: str) -> Iterator[bytes]:
    """A file's content, unless reading it would take it from the ranks, as from a pipe."""
    with suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                yield file.read()
