"""Pickling by value, with the names of the files that functions are from.

cloudpickle replaces them from 3.1.3 on: a worker's traceback, and the place of its `sys.exit`,
would name `<dynamic-code>` and show no line of the program.
"""

from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

_CODE_REDUCER = cloudpickle.Pickler.dispatch_table[CodeType]
_NAMELESS = "<dynamic-code>"


def _code_with_file(code: CodeType) -> tuple[Any, ...]:
    make, arguments = _CODE_REDUCER(code)
    # A new string each time, as of all names: what is shared would change the pickle's bytes.
    file = "".join(code.co_filename)
    return make, tuple(
        file if isinstance(each, str) and each == _NAMELESS else each for each in arguments
    )


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's, with the names of files."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _code_with_file}, cloudpickle.Pickler.dispatch_table
    )


class _Chunks(list[bytes]):
    def write(self, data: Any) -> None:
        self.append(bytes(data))


def dumps_by_value(value: object, protocol: int | None = None) -> bytes:
    """Pickle by value what the reader cannot import."""
    chunks = _Chunks()
    ValuePickler(chunks, protocol).dump(value)
    return b"".join(chunks)
