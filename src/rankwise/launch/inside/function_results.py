"""What function workers send back: values, or exceptions as real objects.

A result pipe carries one frame, `<u32 length><pickle of ("ok", value) or ("error", exception or
None)>`. Unpickling runs code of the worker's choice, which is the caller's own code: the pipe is
anonymous and only the workers of this run can write to it.
"""

import pickle
from collections.abc import Mapping
from typing import Any

from rankwise.base.errors import GangError
from rankwise.drivers.real.interrupts import came_from_handler, gate_here

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
    with gate_here().handlers_replaced():
        for rank, frame in frames.items():
            try:
                result = read_result(frame)
            except Exception as error:
                if came_from_handler(error):
                    raise
                raise GangError(
                    f"the result of rank {rank} cannot be unpickled:"
                    f" {type(error).__name__}: {error}",
                    hint="return plain data, or objects whose class the caller can import",
                ) from error
            if result is not None and result[0] == "ok":
                values[rank] = result[1]
    return values


def exceptions_by_rank(frames: Mapping[int, bytes | bytearray]) -> dict[int, BaseException]:
    """The real exception of each worker that raised one which can be unpickled here."""
    from rankwise.base.exception_pickle import loads  # noqa: PLC0415  # only for failures

    exceptions: dict[int, BaseException] = {}
    with gate_here().used():  # for an instant: what cannot be rebuilt is passed over without a word
        for rank, frame in frames.items():
            try:
                result = read_result(frame)
                if result is None or result[0] != "error" or result[1] is None:
                    continue
                exception = loads(result[1])
            except Exception:  # noqa: BLE001, S112  # its text is in the failure; the object is lost
                continue
            if exception is not None:
                exceptions[rank] = exception
    return exceptions
