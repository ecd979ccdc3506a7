"""The life of a pool's worker: it takes calls from its socket and answers each.

A fork of a clean server becomes one, see `drivers.real.worker.function`; this module is imported
by the server. A worker ends when its socket does. While it waits for a call, Ctrl-C means that it
ends, too.
"""

import os
import pickle
import time
from contextlib import suppress
from socket import AF_UNIX, SOCK_SEQPACKET, socket
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rankwise.drivers.real.pool.messages import (
    NO_SLOT,
    SLOT_COUNT,
    Kind,
    Message,
    Packed,
    Receiver,
    send_small,
)
from rankwise.drivers.real.pool.pickles import dumps_result

if TYPE_CHECKING:
    from rankwise.drivers.real.pool.memory import Buffers

SOCKET_VARIABLE = "RANKWISE_POOL_FD"
"""Names the descriptor of a worker's socket."""
_now = time.monotonic_ns


def serve(initializer: bytes, sources: dict[str, Any], *, is_writable: bool) -> None:
    """Be a worker until the pool closes the socket.

    Args:
        initializer: a pickle of a function and its arguments to call first, or empty.
        sources: of the initializer, as far as they are in no file.
        is_writable: whether arrays are given to tasks writable.
    """
    fd = int(os.environ.pop(SOCKET_VARIABLE))
    os.set_inheritable(fd, False)  # noqa: FBT003  # the standard library's signature
    with socket(AF_UNIX, SOCK_SEQPACKET, 0, fd) as ours:
        _add_sources(sources)
        worker = _Worker(ours, Receiver(is_writable=is_writable))
        if worker.initialize(initializer):
            with suppress(KeyboardInterrupt):
                worker.serve()


class _Worker:
    def __init__(self, ours: socket, receiver: Receiver) -> None:
        self._socket = ours
        self._receiver = receiver
        self._functions: list[Any] = [None] * SLOT_COUNT

    def initialize(self, initializer: bytes) -> bool:
        try:
            if initializer:
                function, arguments = pickle.loads(initializer)  # noqa: S301  # the caller's own
                function(*arguments)
        except BaseException as error:  # noqa: BLE001  # the pool tells it to its users
            self._send_error(Kind.INITIALIZER_FAILED, 0, error, 0)
            return False
        Packed(Kind.READY, os.getpid(), b"").send(self._socket)
        return True

    def serve(self) -> None:
        receive, ours = self._receiver.receive, self._socket
        while (message := receive(ours)) is not None:
            began = _now()
            task = message.task
            try:
                if message.kind == Kind.CHUNK:
                    value: Any = self._answer_chunk(message)
                else:
                    function, arguments, keywords = self._call_of(message)
                    value = function(*arguments, **keywords)
                    function = arguments = keywords = None
            except BaseException as error:  # noqa: BLE001  # the caller gets whatever it is
                self._send_error(Kind.ERROR, task, error, _now() - began)
                message = function = arguments = keywords = None
                continue
            packed: Packed | None = None
            buffers: Buffers | None = None
            try:
                body, buffers = dumps_result(value)
                took = _now() - began
                if buffers.found or not send_small(ours, Kind.VALUE, task, body, extra=took):
                    described = buffers.described()
                    packed = Packed(Kind.VALUE, task, body, described, extra=took)
            except BaseException as error:  # noqa: BLE001  # the same
                self._send_error(Kind.ERROR, task, _unsendable(value, error), 0)
                continue
            finally:
                # Before the next message: they may be large.
                message = value = buffers = None
            if packed is not None:
                try:
                    packed.send(ours)
                except OSError as error:  # too many descriptors are on their way
                    packed.close()
                    self._send_error(Kind.ERROR, task, error, 0)

    def _answer_chunk(self, message: Message) -> Any:
        """The values up to the first failure, and that failure."""
        function, items, _ = self._call_of(message)
        values = []
        for item in items:
            try:
                values.append(function(*item))
            except BaseException as error:  # noqa: BLE001  # the caller gets whatever it is
                return values, _packed_error(error)
        return values, None

    def _call_of(self, message: Message) -> Any:
        if message.is_cut:
            raise OSError(
                "the arguments cannot be received: this worker may open no more files"
                " (raise `ulimit -n`)"
            )
        body = message.body
        if message.extra:
            _add_sources(pickle.loads(body[message.extra :]))  # noqa: S301  # the caller's own
        slot = message.slot
        if slot == NO_SLOT:
            return pickle.loads(body, buffers=message.buffers)  # noqa: S301  # the same
        if message.function:
            self._functions[slot] = _loaded(message.function)
        function = self._functions[slot]
        if isinstance(function, _Unreadable):
            raise function.error
        return function, *pickle.loads(body, buffers=message.buffers)  # noqa: S301  # the same

    def _send_error(self, kind: int, task: int, error: BaseException, took: int) -> None:
        body = pickle.dumps(_packed_error(error))
        Packed(kind, task, body, extra=took).send(self._socket)


class _Unreadable:
    """Stands where a function would be that cannot be unpickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _loaded(pickled: "memoryview") -> Any:
    try:
        body, sources = pickle.loads(pickled)  # noqa: S301  # the caller's own
        _add_sources(sources)
        return pickle.loads(body)  # noqa: S301  # the same
    except Exception as error:  # noqa: BLE001  # an import may raise anything; each call tells it
        error.add_note("The worker could not unpickle the function.")
        return _Unreadable(error)


def _add_sources(sources: dict[str, Any]) -> None:
    if sources:
        import linecache  # noqa: PLC0415  # only from notebooks and the like

        linecache.cache.update(sources)


def _packed_error(error: BaseException) -> tuple[bytes | None, str, str]:
    """An exception, its traceback as text, and itself in a line."""
    import traceback  # noqa: PLC0415  # takes milliseconds, and only failures need it

    from rankwise.base.exception_pickle import dumps  # noqa: PLC0415  # the same

    error.__traceback__ = _without_our_frames(error.__traceback__)
    try:
        text = "".join(traceback.format_exception(error))
        line = "".join(traceback.format_exception_only(error)).strip()
    except Exception as trouble:  # noqa: BLE001  # a foreign class that cannot be printed
        text = line = f"{type(error).__qualname__} (its text cannot be had: {trouble!r})"
    try:
        return dumps(error), text, line
    except Exception:  # noqa: BLE001  # whatever a foreign class does: its text is told
        return None, text, line


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _unsendable(value: object, error: BaseException) -> BaseException:
    if not isinstance(error, (pickle.PicklingError, AttributeError, TypeError)):
        error.add_note("This happened when the result was pickled for the caller.")
        return error
    kind = type(value)
    told = TypeError(
        f"the result, a {kind.__module__}.{kind.__qualname__}, "
        f"cannot be sent to the caller: {error}"
    )
    return told.with_traceback(None)
