"""Pickles functions and classes by value, so that their code keeps the name of its file.

`cloudpickle` 3.1.3 writes `<dynamic-code>` in place of the file, so that equal code has equal
bytes. Tracebacks, reports of hangs and call records then name no file and show no line.
Every pickle by value in this package is made here.
"""

import io
import pickle
from collections import ChainMap
from functools import partial
from types import CodeType
from typing import Any

import cloudpickle

Source = tuple[int, None, list[str], str]
"""What `linecache` holds of a source that is in no file."""

_FILE_PLACE = 10
"""Where `CodeType` takes the name of the file, since Python 3.8."""


def dumps_by_value(value: object, protocol: int = pickle.HIGHEST_PROTOCOL) -> bytes:
    """Pickle a value; what the reader may not find by its name is pickled by value."""
    return dumps_with_sources(value, protocol)[0]


def dumps_with_sources(
    value: object, protocol: int = pickle.HIGHEST_PROTOCOL
) -> tuple[bytes, dict[str, Source]]:
    """Pickle a value as `dumps_by_value` does, and collect the sources that its tracebacks need.

    The sources are those of its code that are in no file, such as the cells of a notebook. The
    reader puts them into its `linecache.cache`.
    """
    file = io.BytesIO()
    pickler = ValuePickler(file, protocol)
    pickler.dump(value)
    return file.getvalue(), pickler.sources_in_memory()


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles by value as `cloudpickle` does, with the files of code."""

    def __init__(
        self,
        file: io.BytesIO,
        protocol: int = pickle.HIGHEST_PROTOCOL,
        buffer_callback: Any = None,
    ) -> None:
        self._files: set[str] = set()
        # Before the base is initialised, which looks it up. A bound method would make a cycle, and
        # keep all that was pickled until the next collection.
        self.dispatch_table = ChainMap(
            {CodeType: partial(_reduced_code, self._files)}, cloudpickle.Pickler.dispatch_table
        )
        super().__init__(file, protocol, buffer_callback)

    def sources_in_memory(self) -> dict[str, Source]:
        """The sources of the pickled code that are in no file, as `linecache` has them."""
        import linecache  # noqa: PLC0415  # only code by value needs it

        found: dict[str, Source] = {}
        for name in sorted(self._files):
            entry = linecache.cache.get(name, ())
            # One that is still to be looked up has one part; that of a file has a time.
            if len(entry) == 4 and entry[1] is None:
                size, _, lines, full_name = entry
                found[name] = size, None, lines, full_name
        return found


def _reduced_code(files: set[str], code: CodeType) -> tuple[Any, ...]:
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    files.add(code.co_filename)
    return make, (*args[:_FILE_PLACE], code.co_filename, *args[_FILE_PLACE + 1 :])
