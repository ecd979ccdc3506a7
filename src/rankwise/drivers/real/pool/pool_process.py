"""The life of a pool's worker: it takes calls from its socket and answers each.

A fork of a clean server becomes one, see `drivers.real.worker.function`; this module is imported
by the server. A worker ends when its socket does. While it waits for a call, Ctrl-C means that it
ends, too.
"""

import os
import pickle
import time
from contextlib import suppress
from itertools import islice, starmap
from socket import AF_UNIX, SOCK_SEQPACKET, socket
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rankwise.drivers.real.pool.messages import (
    CHUNKS,
    FIRST_SHIFT,
    NO_SLOT,
    SLOT_COUNT,
    MessageKind,
    Packed,
    PoolMessage,
    Receiver,
    send_small,
)
from rankwise.drivers.real.pool.notes import NotesWriter, piece
from rankwise.drivers.real.pool.pickles import dumps_result

if TYPE_CHECKING:
    from rankwise.drivers.real.pool.array_memory import Buffers

SOCKET_VARIABLE = "RANKWISE_POOL_FD"
"""Names the descriptor of a worker's socket."""
NOTES_VARIABLE = "RANKWISE_POOL_NOTES_FD"
"""Names the descriptor of the memory in which it notes what it has done of a chunk."""
_NOTED_ONE_BY_ONE_MAX = 128
"""Of a longer chunk, results of short calls are noted in groups: a note takes a microsecond."""
_GROUP_MAX = 64
_GROUP_NS = 20_000
"""How long the calls of a group take: the next group is of one call if they take longer."""
_PLAIN = frozenset({int, float, str, bool, type(None)})
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
    notes = NotesWriter(int(os.environ.pop(NOTES_VARIABLE)))
    with socket(AF_UNIX, SOCK_SEQPACKET, 0, fd) as ours:
        _add_sources(sources)
        worker = _PoolWorker(ours, Receiver(is_writable=is_writable), notes)
        # A caller that is killed may leave answers unread, which resets the connection.
        with suppress(ConnectionError):
            if worker.initialize(initializer):
                with suppress(KeyboardInterrupt):
                    worker.serve()


class _PoolWorker:
    def __init__(self, ours: socket, receiver: Receiver, notes: NotesWriter) -> None:
        self._socket = ours
        self._notes = notes
        self._receiver = receiver
        self._functions: list[Any] = [None] * SLOT_COUNT
        self._generations = [0] * SLOT_COUNT
        """Which of the functions of each slot it is."""

    def initialize(self, initializer: bytes) -> bool:
        try:
            if initializer:
                function, arguments = pickle.loads(initializer)  # noqa: S301  # the caller's own
                function(*arguments)
        except BaseException as error:  # noqa: BLE001  # the pool tells it to its users
            self._send_error(MessageKind.INITIALIZER_FAILED, 0, error, 0)
            return False
        Packed(MessageKind.READY, os.getpid(), b"").send(self._socket)
        return True

    def serve(self) -> None:
        receive, ours = self._receiver.receive, self._socket
        while (message := receive(ours)) is not None:
            began = _now()
            task = message.task
            if not self._has_function(message):
                send_small(ours, MessageKind.FUNCTION_MISSING, task, b"", message.slot)
                continue
            if message.kind in CHUNKS:
                try:
                    self._serve_chunk(message, began)
                except BaseException as error:  # noqa: BLE001  # the same
                    self._send_error(MessageKind.ERROR, task, error, _now() - began)
                message = None
                continue
            try:
                function, arguments, keywords = self._call_of(message)
                value: Any = function(*arguments, **keywords)
                function = arguments = keywords = None
            except BaseException as error:  # noqa: BLE001  # the caller gets whatever it is
                self._send_error(MessageKind.ERROR, task, error, _now() - began)
                message = function = arguments = keywords = None
                continue
            packed: Packed | None = None
            buffers: Buffers | None = None
            try:
                body, buffers = dumps_result(value)
                took = _now() - began
                if buffers.found or not send_small(ours, MessageKind.VALUE, task, body, extra=took):
                    described = buffers.described()
                    packed = Packed(MessageKind.VALUE, task, body, described, extra=took)
            except BaseException as error:  # noqa: BLE001  # the same
                self._send_error(MessageKind.ERROR, task, _unsendable(value, error), 0)
                continue
            finally:
                # Before the next message: they may be large.
                message = value = buffers = None
            if packed is not None:
                try:
                    packed.send(ours)
                except OSError as error:  # too many descriptors are on their way
                    packed.close()
                    self._send_error(MessageKind.ERROR, task, error, 0)

    def _has_function(self, message: PoolMessage) -> bool:
        """Whether a message's function is here: it may lie in one that the pool has taken back."""
        slot = message.slot
        is_known = slot == NO_SLOT or self._generations[slot] == message.generation
        return is_known or bool(message.function or message.trouble)

    def _serve_chunk(self, message: PoolMessage, began: int) -> None:
        """Answer the values up to the first failure, and that failure."""
        function, (items,), _ = self._call_of(message)
        task, first = message.task, message.extra >> FIRST_SHIFT
        left = len(items) - first
        items = islice(items, first, None) if first else iter(items)
        results = (map if message.kind == MessageKind.CHUNK else starmap)(function, items)
        self._notes.begin(task, first)
        noted, error = first, None
        group, group_max = 1, _GROUP_MAX if left > _NOTED_ONE_BY_ONE_MAX else 1
        looked_at = began
        values: list[Any] = []
        while left:
            try:
                # Not a list of them: what is done when one fails must be there.
                values.extend(islice(results, group))
            except BaseException as failure:  # noqa: BLE001  # the caller gets whatever it is
                error = failure
                break
            if len(values) < min(group, left):
                error = _stopped()
                break
            left -= len(values)
            if not left:
                break  # what follows is the answer
            error = self._noted(task, noted, values)
            if error is not None:
                break
            noted += len(values)
            values = []
            if group_max > 1:
                now = _now()
                group = min(2 * group, group_max) if now - looked_at < _GROUP_NS else 1
                looked_at = now
        self._answer_chunk(task, noted, values, error, began)

    def _noted(self, task: int, first: int, values: list[Any]) -> BaseException | None:
        """Note results so that they survive this process; what is left of `values` could not be.

        Returns the reason, if there is one.
        """
        try:
            self._note(task, first, values)
        except Exception as error:  # noqa: BLE001  # one of them cannot be pickled
            if len(values) == 1:
                return _unsendable(values.pop(), error)
        except BaseException as error:  # noqa: BLE001  # an interrupt: it may have been noted
            values.clear()
            return error
        else:
            return None
        ones, values[:] = values[:], []
        for number, value in enumerate(ones):
            if (reason := self._noted(task, first + number, [value])) is not None:
                return reason
        return None

    def _note(self, task: int, first: int, values: list[Any]) -> None:
        is_plain = len(values) == 1 and type(values[0]) in _PLAIN
        if is_plain and self._notes.add(piece(pickle.dumps(values))):
            return  # in a quarter of the time
        body, buffers = dumps_result(values)
        noted = piece(body)
        if not buffers.found and self._notes.add(noted):
            return
        content = self._notes.content + noted
        self._send(MessageKind.PART, task, content, buffers, 0)
        self._notes.begin(task, first + len(values))

    def _answer_chunk(
        self,
        task: int,
        first: int,
        values: list[Any],
        error: BaseException | None,
        began: int,
    ) -> None:
        try:
            body, buffers = dumps_result(values)
        except Exception:  # noqa: BLE001  # the good ones are noted one by one
            error = self._noted(task, first, values) or error
            body, buffers = dumps_result(values)
        end = pickle.dumps([None if error is None else _packed_error(error)])
        content = self._notes.content + piece(body) + piece(end)
        self._send(MessageKind.VALUE, task, content, buffers, _now() - began)

    def _send(self, kind: int, task: int, body: bytes, buffers: "Buffers", took: int) -> None:
        if buffers.found or not send_small(self._socket, kind, task, body, extra=took):
            packed = Packed(kind, task, body, buffers.described(), extra=took)
            try:
                packed.send(self._socket)
            except OSError:  # too many descriptors are on their way
                packed.close()
                raise

    def _call_of(self, message: PoolMessage) -> Any:
        if message.trouble:
            raise OSError(f"worker {os.getpid()} cannot receive the arguments: {message.trouble}")
        body = message.body
        sources_at = message.extra & _SOURCES_MASK
        if sources_at:
            _add_sources(pickle.loads(body[sources_at:]))  # noqa: S301  # the caller's own
        slot = message.slot
        if slot == NO_SLOT:
            return _unpickled(body, message.buffers)
        if message.function:
            self._functions[slot] = _loaded(message.function)
            self._generations[slot] = message.generation
        function = self._functions[slot]
        if isinstance(function, _Unreadable):
            raise function.error
        return function, *_unpickled(body, message.buffers)

    def _send_error(self, kind: int, task: int, error: BaseException, took: int) -> None:
        body = pickle.dumps(_packed_error(error))
        Packed(kind, task, body, extra=took).send(self._socket)


_SOURCES_MASK = (1 << FIRST_SHIFT) - 1


def _stopped() -> BaseException:
    """What stands for a StopIteration that a function raised, as `map` takes it for its own end."""
    error = StopIteration()
    error.add_note("The function of a `map` raised it.")
    return error


class _Unreadable:
    """Stands where a function would be that cannot be unpickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _unpickled(body: "memoryview", buffers: "list[memoryview]") -> Any:
    try:
        return pickle.loads(body, buffers=buffers)  # noqa: S301  # the caller's own
    except Exception as error:
        error.add_note("The worker could not unpickle the arguments.")
        raise


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
