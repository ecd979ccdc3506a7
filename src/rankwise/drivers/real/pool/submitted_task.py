"""A task of a pool while it is under way: its call as bytes, and what its answer stands for.

The engine owns the tasks and says when they are pickled, sent and answered; nothing here is shared
between threads without its lock, but for the future.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from rankwise.base.errors import ConfigError, TaskFailed
from rankwise.base.exception_pickle import loads as loads_exception
from rankwise.base.exception_pickle import tell_traceback
from rankwise.core.pool.vocabulary import PoolStimulus, TaskCancelled
from rankwise.drivers.real.call_pickle import UNSENDABLE_HINT, find_culprit, name_of
from rankwise.drivers.real.pool.messages import CHUNKS, NO_SLOT, MessageKind, PoolMessage
from rankwise.drivers.real.pool.notes import pieces
from rankwise.drivers.real.pool.pickles import dumps_call
from rankwise.drivers.real.pool.remembered_functions import WITH_CALL, FunctionTable, SentFunction

_PLAIN = (int, float, str, bytes)
"""Types of arguments that a task may keep to be named by: they cannot change."""
_SHOWN_MAX = 40


class PoolFuture(Future[Any]):
    """The future of a task; cancelling it takes the task out of the queue.

    Attributes:
        task: the number of the task.
        tell: tells the machine of the pool; None once nothing may come of a cancellation.
        took_ns: how long its worker was busy with it.
    """

    task: int = 0
    tell: Callable[[PoolStimulus], None] | None = None
    took_ns: int = 0

    def cancel(self) -> bool:
        """Cancel the task if it has not been sent to a worker."""
        is_cancelled = super().cancel()
        tell = self.tell
        if is_cancelled and tell is not None:
            tell(TaskCancelled(self.task))
        return is_cancelled


class SubmittedTask:
    """What a task calls, and where its answer goes.

    Args:
        future: gets the answer.
        kind: a `MessageKind`: one call, or a chunk of calls.
        call: the function.
    """

    __slots__ = (
        "about", "answer", "arguments", "body", "buffers", "call", "call_count", "failure",
        "future", "has_begun", "is_notified", "kind", "sent", "sent_from", "sources_at", "values",
    )  # fmt: skip

    def __init__(self, future: PoolFuture, kind: int, call: Callable[..., Any]) -> None:
        self.future = future
        self.kind = kind
        self.call = call
        self.call_count = 1
        self.about: Any = None
        """What tells it from others: its first argument if plain, or the items of a chunk."""
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """Of a task that is pickled only when the futures among them are done."""
        self.sent: SentFunction = WITH_CALL
        self.body = b""
        self.buffers: Any = None
        self.sources_at = 0
        self.has_begun = False
        """Whether the future says that it runs."""
        self.is_notified = False
        """True once the future's waiters know that it was cancelled."""
        self.failure: BaseException | None = None
        self.answer: tuple[Any, BaseException | None] = None, None
        self.values: list[Any] = []
        """Of a chunk: what is done so far."""
        self.sent_from = 0
        """How many of them there were when it was sent last."""

    @property
    def is_concluded(self) -> bool:
        """True once the future's waiters know how it ended."""
        return self.future.done() and (self.is_notified or not self.future.cancelled())

    def name_after(self, args: tuple[Any, ...], items: range | None) -> None:
        """Keep what tells it from others: the positions of a chunk, or a plain first argument."""
        if items is not None:
            self.about = items
            self.call_count = len(items)
        elif args and type(args[0]) in _PLAIN:  # others may be large, or change
            self.about = args[0]

    def pack(self, functions: FunctionTable, args: Any, kwargs: Any) -> None:
        """Pickle the call; large arrays are copied only when it is sent."""
        self.sent = sent = functions.sent(self.call)
        value = (self.call, args, kwargs) if sent.slot == NO_SLOT else (args, kwargs)
        self.body, self.buffers, sources = dumps_call(value)
        if sources:
            self.sources_at = len(self.body)
            self.body += pickle.dumps(sources)

    def pack_late(self, functions: FunctionTable) -> None:
        """Pickle the call, now that the futures among its arguments are done.

        Raises:
            ConfigError: one of their values cannot be pickled.
        """
        assert self.arguments is not None, "it was told to wait for them"
        args, kwargs = self.arguments
        args = tuple(map(_value_of, args))
        kwargs = {name: _value_of(value) for name, value in kwargs.items()}
        try:
            self.pack(functions, args, kwargs)
        except Exception as error:  # said in words
            raise unsendable(self.call, args, kwargs, error) from error
        self.arguments = None

    def answer_of(self, message: PoolMessage) -> tuple[Any, BaseException | None]:
        """The value in a worker's last word of it, or its error."""
        if message.trouble:
            return None, OSError(f"the result cannot be received: {message.trouble}")
        if self.kind in CHUNKS and message.kind == MessageKind.VALUE:
            failure = self.failure or self.add_values(message)
            if failure is not None:
                return None, failure
            end = self.values.pop()
            return (self.values, end), None
        try:
            loaded = pickle.loads(message.body, buffers=message.buffers)  # noqa: S301  # ours
        except Exception as error:  # noqa: BLE001  # whatever a foreign class does
            return None, self._unreadable(error)
        if message.kind == MessageKind.ERROR:
            return None, rebuilt_error(*loaded)
        return loaded, None

    def add_values(self, message: PoolMessage) -> BaseException | None:
        """Note results of a chunk; the reason why they cannot be read, if there is one."""
        if message.trouble:
            return self.answer_of(message)[1]
        buffers = iter(message.buffers)
        try:
            for each in pieces(message.body):
                self.values += pickle.loads(each, buffers=buffers)  # noqa: S301  # ours
        except Exception as error:  # noqa: BLE001  # whatever a foreign class does
            return self._unreadable(error)
        return None

    def add_noted(self, notes: Iterable[Any]) -> None:
        """Take over what a dead worker has noted of a chunk, as far as it can be read."""
        for each in notes:
            self.values += pickle.loads(each)  # noqa: S301  # of a worker of ours

    def about_in_words(self) -> str:
        """Behind the name of its function: which of its calls it is."""
        about = self.about
        if isinstance(about, range):
            about = about[len(self.values) :]  # what was done before is not to blame
            several = len(about) > 1
            last = f" to {about[-1]}" if several else ""
            return f" on item{'s' * several} {about[0]}{last} of a map (counted from 0)"
        if about is None or (isinstance(about, int) and about.bit_length() > _SHOWN_MAX * 3):
            return ""  # of large integers, Python refuses to make text
        text = repr(about[: _SHOWN_MAX + 1] if isinstance(about, str | bytes) else about)
        return f" on {text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + '…'}"

    def _unreadable(self, error: Exception) -> TaskFailed:
        why = f"{type(error).__name__}: {error}"
        failure = TaskFailed(
            f"the result of {name_of(self.call)} cannot be unpickled: {why}",
            hint="return plain data, or objects whose class the caller can import",
        )
        failure.__cause__ = error
        return failure


def rebuilt_error(pickled: bytes | None, text: str, line: str) -> BaseException:
    """An exception that a worker has sent, with its traceback there."""
    error = None if pickled is None else loads_exception(pickled)
    if error is None:
        error = TaskFailed(line, hint="the exception itself could not be pickled")
    tell_traceback(error, text)
    return error


def unsendable(
    call: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
    error: Exception,
    kind: int = MessageKind.CALL,
) -> ConfigError:
    """The error of a call that cannot be pickled; it names the part that cannot be."""
    if kind in CHUNKS:
        positional = (("an input", value) for value in args[0])
    else:
        positional = ((f"argument {place}", value) for place, value in enumerate(args))
    named = ((f"argument {name!r}", value) for name, value in kwargs.items())
    parts = iter([*positional, *named])
    culprit, reason = find_culprit(call, parts, dumps_call) or (
        f"the call of {name_of(call)}",
        error,
    )
    return ConfigError(f"{culprit} cannot be sent to workers: {reason}", hint=UNSENDABLE_HINT)


def _value_of(argument: Any) -> Any:
    return argument.result() if isinstance(argument, Future) else argument
