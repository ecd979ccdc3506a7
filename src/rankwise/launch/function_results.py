"""What function workers send back: values, or exceptions as real objects.

A result pipe carries one frame, `<u32 length><pickle of ("ok", value) or ("error", pickle or
None)>`. Unpickling runs code of the worker's choice, which is the caller's own code: the pipe is
anonymous and only the workers of this run can write to it.
"""

import pickle
from collections.abc import Mapping
from typing import Any

from rankwise.base.errors import GangError

LENGTH_BYTES = 4


def read_result(frame: bytes | bytearray) -> tuple[str, Any] | None:
    """Split a result frame into its kind and its load; None when the worker sent no whole frame."""
    if len(frame) < LENGTH_BYTES:
        return None
    length = int.from_bytes(frame[:LENGTH_BYTES], "little")
    body = memoryview(frame)[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(body) < length:
        return None
    kind, load = pickle.loads(body)  # noqa: S301  # see the module's text
    return kind, load


def values_by_rank(frames: Mapping[int, bytes | bytearray]) -> dict[int, Any]:
    """The return value of each worker that returned; those that exited by themselves are missing.

    Raises:
        GangError: a value arrived that cannot be unpickled here.
    """
    values: dict[int, Any] = {}
    for rank, frame in frames.items():
        try:
            result = read_result(frame)
        except Exception as error:
            raise GangError(
                f"the result of rank {rank} cannot be unpickled: {type(error).__name__}: {error}",
                hint="return plain data, or objects whose class the caller can import",
            ) from error
        if result is not None and result[0] == "ok":
            values[rank] = result[1]
    return values


def exceptions_by_rank(frames: Mapping[int, bytes | bytearray]) -> dict[int, BaseException]:
    """The real exception of each worker that raised one which can be unpickled here."""
    exceptions: dict[int, BaseException] = {}
    for rank, frame in frames.items():
        try:
            result = read_result(frame)
            if result is None or result[0] != "error" or result[1] is None:
                continue
            exception = pickle.loads(result[1])  # noqa: S301  # see the module's text
        except Exception:  # noqa: BLE001, S112  # its text is in the failure; only the object is lost
            continue
        if isinstance(exception, BaseException):
            exceptions[rank] = exception
    return exceptions
