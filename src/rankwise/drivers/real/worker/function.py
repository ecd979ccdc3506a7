"""Calls a Python function in a worker and sends back what it returns or raises.

The payload is two pickles, one after the other: a header of plain data, and `(function,
arguments)`. The header says how to call it, and carries the `sys.path` and `sys.argv` of the
program that asked for it, which must be in place *before* the second pickle is read: its modules
are found there. Sources that are in no file come along for tracebacks. Whether `cloudpickle` is
needed to read it, the pickle itself says.

The answer is one frame on the result pipe, `<u32 length>` and a pickle of `("ok", value)` or
`("error", exception or None)`, the exception as `rankwise.base.exception_pickle` writes it. Its
text travels on the report pipe too, and first.
"""

import _signal  # type: ignore[import-not-found]  # built in; `signal` imports more
import io
import os
import pickle
import sys

TYPE_CHECKING = False  # `typing` would cost more than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable

STOP_SIGNALS = (_signal.SIGTERM, _signal.SIGINT)
FRAME_BYTES_MAX = (1 << 32) - 1
LOCAL_RANK_VARIABLES = ("RANKWISE_LOCAL_RANK", "LOCAL_RANK")
"""Where the worker's place in its gang is found. With virtual local ranks, torchrun's variable is
always 0, and only the first one tells."""
_NOT_BY_NAME = (pickle.PicklingError, AttributeError, TypeError)
"""What `pickle` itself raises when a value cannot travel."""


def call_payload(
    payload_fd: "int | None",
    result_fd: "int | None",
    report: "Callable[[BaseException], None]",
) -> None:
    """Call the function of the payload, once; raises whatever it raises.

    Args:
        payload_fd: a file with the payload; several workers may share it.
        result_fd: where the answer goes; None throws it away.
        report: is told of an exception, before anything else can go wrong with it.
    """
    assert payload_fd is not None, "a function worker is given a payload"
    with io.BytesIO(os.pread(payload_fd, os.fstat(payload_fd).st_size, 0)) as payload:
        os.close(payload_fd)
        header = pickle.load(payload)  # noqa: S301 - the payload is the caller's own code
        sys.path[:] = header["sys_path"]
        sys.argv[:] = header["argv"]
        if header["sources"]:
            import linecache  # noqa: PLC0415 - only from notebooks and the like

            linecache.cache.update(header["sources"])
        try:
            try:
                function, arguments = pickle.load(payload)  # noqa: S301 - the same
            except Exception as error:
                _add_note(error, f"The worker could not unpickle {header['name']}.")
                raise
            rank = local_rank()
            if header["arguments_by_rank"]:
                arguments = arguments[rank]
            value = function(*([rank] if header["pass_rank"] else []), *arguments)
            body = _checked_body(_pickled_value(value, header["name"]))
        except SystemExit:
            raise
        except BaseException as error:
            # Another rank may have failed as well, so that we are told to stop: after our words.
            held = _signal.pthread_sigmask(_signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                report(error)
                _send(result_fd, _checked_body(pickle.dumps(("error", _pickled_exception(error)))))
            finally:
                _signal.pthread_sigmask(_signal.SIG_SETMASK, held)
            raise
    _send(result_fd, body)


def local_rank() -> int:
    """Return the worker's place in its gang, counted from 0."""
    for variable in LOCAL_RANK_VARIABLES:
        text = os.environ.get(variable)
        if text is not None:
            return int(text)
    return 0


def _pickled_exception(error: BaseException) -> "bytes | None":
    try:
        from rankwise.base.exception_pickle import dumps  # noqa: PLC0415 - takes 5 ms

        return dumps(error)
    except Exception:  # noqa: BLE001 - a program may have broken even imports; the text is told
        return None


def _pickled_value(value: object, name: str) -> bytes:
    returned = f"{name} returned a {type(value).__module__}.{type(value).__qualname__}, which"
    try:
        try:
            return pickle.dumps(("ok", value), pickle.HIGHEST_PROTOCOL)
        except _NOT_BY_NAME:  # a class or function of `__main__`, perhaps
            return _dumps_by_value(("ok", value))
    except _NOT_BY_NAME as error:
        raise TypeError(f"{returned} cannot be sent to the caller: {error}") from None
    except Exception as error:  # of a foreign `__reduce__`, or of a signal handler
        _add_note(error, f"{returned} was being pickled for the caller.")
        raise


def _dumps_by_value(value: object) -> bytes:
    # Takes as long as starting a worker.
    from rankwise.base.value_pickle import dumps_by_value  # noqa: PLC0415

    return dumps_by_value(value)


def _checked_body(body: bytes) -> bytes:
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(
            f"the return value is {len(body)} bytes as a pickle, more than can be sent to the "
            f"caller ({FRAME_BYTES_MAX}); write it to a file and return its path"
        )
    return body


def _send(result_fd: "int | None", body: bytes) -> None:
    """Send one frame; its body may be large, and is not copied for its header's sake."""
    if result_fd is None:
        return
    rest = memoryview(body)
    length = len(body).to_bytes(4, "little")
    sent = os.writev(result_fd, [length, rest])
    rest = rest[sent - len(length) :]
    while rest:
        rest = rest[os.write(result_fd, rest) :]
    os.close(result_fd)


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(note)
