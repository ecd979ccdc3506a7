"""Where the workers of a program look for modules first.

A script finds the modules beside it, a module run with `-m` those of the working directory, as
under plain Python; PYTHONSAFEPATH takes both away. What a fork server is to import, and whether it
can, is looked up in the very same places.
"""

import os
import sys
from collections.abc import Mapping

from rankwise.launch.job import Executable, Function, Module, Program, Script


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
