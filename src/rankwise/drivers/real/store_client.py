"""Carries out the orders of a rendezvous on a store, in threads, and posts answers to a reactor.

A store's calls block, and the agent's thread must not; so there is one thread that makes requests,
one after another, and one for each watch, of which an agent has one. Answers are delivered in the
reactor's thread. Nothing is polled: a thread sleeps until there is an order, or in the store.

- Renewals have threads of their own, several when one does not come back: a lease must not end
  because others are slow, or because what was sent on a way that is cut is waited for.
- An order that has waited for longer than a request may take is answered `RequestFailed` without
  being tried: its answer would come too late for the machine to believe in.
- A watch whose store does not answer goes on trying for as long as it is wanted.
- An exception that a store should never raise (a bug of ours, or of a plug-in) is raised in the
  reactor's thread, where it ends the run with its traceback instead of one thread in silence.
- `close` closes the store, which wakes every thread, and waits for them to end.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Condition, Event, Thread
from typing import NamedTuple, Protocol, Self

from rankwise.base.errors import (
    Compacted,
    LeaseLost,
    StoreError,
    StoreOfAnotherRun,
    StoreRefused,
    StoreUnavailable,
)
from rankwise.base.keys import Committed
from rankwise.base.units import SECOND, Duration, Instant, after, format_duration
from rankwise.core.rendezvous.vocabulary import (
    Answer,
    Commit,
    EndWatch,
    GrantLease,
    KeysChanged,
    KeysRead,
    LeaseEnded,
    LeaseGranted,
    LeaseRenewed,
    LeaseRevoked,
    Order,
    ReadKeys,
    RenewLease,
    RequestFailed,
    RevokeLease,
    StoreDenied,
    TransactionCommitted,
    TransactionConflicted,
    WatchLost,
)
from rankwise.ports.clock import Clock
from rankwise.ports.store import Store, Watch

Request = ReadKeys | Commit | GrantLease | RenewLease | RevokeLease

WATCH_PATIENCE = Duration(3600 * SECOND)
"""A watch is woken when it is closed, so it may as well wait for long."""
RENEWERS_MAX = 5
"""Renewals come every half a second, and each may take two."""
RETRY_PAUSE = Duration(SECOND // 2)


class Posts(Protocol):
    """What is needed of a reactor."""

    def post(self, callback: Callable[[], None]) -> None:
        """Call back in the reactor's thread."""
        ...


class _Waiting(NamedTuple):
    request: Request
    useless_at: Instant


class _OrderQueue:
    """Orders that wait, first come, first served, by threads that are made when they are needed."""

    def __init__(self, threads_max: int) -> None:
        self.threads_max = threads_max
        self.waiting: deque[_Waiting] = deque()
        self.serving = 0
        self.idle = 0


class _Followed:
    """A watch with its thread."""

    def __init__(self, token: int, watch: Watch) -> None:
        self.token = token
        self.watch = watch
        self._ended = Event()

    @property
    def is_wanted(self) -> bool:
        """Whether it still has a listener."""
        return not self._ended.is_set()

    def end(self) -> None:
        """Let its thread end by itself, telling nothing any more."""
        self._ended.set()
        self.watch.close()

    def give_way(self) -> None:
        """Pause before the store is asked again."""
        self._ended.wait(RETRY_PAUSE / SECOND)


class StoreClient:
    """The agent's end of its store. `submit` and `close` are for the reactor's thread.

    Args:
        store: belongs to the client from now on.
        reactor: in whose thread answers are delivered.
        clock: tells how long an order has waited.
        deliver: takes an answer.
        request_timeout: see the module's text.
    """

    def __init__(
        self,
        store: Store,
        *,
        reactor: Posts,
        clock: Clock,
        deliver: Callable[[Answer], None],
        request_timeout: Duration,
    ) -> None:
        self._store = store
        self._reactor = reactor
        self._clock = clock
        self._deliver = deliver
        self._request_timeout = request_timeout
        self._requests = _OrderQueue(1)
        self._renewals = _OrderQueue(RENEWERS_MAX)
        self._changed = Condition()
        self._is_closed = False
        self._trouble = ""
        """Why the store did not answer the last request that it was asked; "" if it did."""
        self._followed: dict[int, _Followed] = {}
        self._threads: list[Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close(*exc_info)

    def submit(self, order: Order) -> None:
        """Carry out an order soon; its answer is delivered from the reactor."""
        match order:
            case EndWatch(token):
                self._end_watch(token)
            case RenewLease():
                self._enqueue(order, self._renewals)
            case _:
                self._enqueue(order, self._requests)

    def close(self, *, has_last_words: bool = True) -> None:
        """Close the store and end all threads; no answer is delivered any more.

        Args:
            has_last_words: whether a store that lives here waits until others have read them.
        """
        if has_last_words:
            self._close(None, None, None)
        else:
            error = StoreUnavailable("this node leaves a run that is not over")
            self._close(type(error), error, None)

    def _close(self, *exc_info: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for followed in self._followed.values():
            followed.end()
        self._store.__exit__(*exc_info)
        deadline = after(self._clock.now(), Duration(2 * self._request_timeout))
        for thread in self._threads:
            # torch's store may block inside torch, and has no way out; its threads are left behind.
            thread.join(max(0, deadline - self._clock.now()) / SECOND)

    def _enqueue(self, request: Request, line: _OrderQueue) -> None:
        waiting = _Waiting(request, after(self._clock.now(), self._request_timeout))
        with self._changed:
            if self._is_closed:
                return
            line.waiting.append(waiting)
            is_short = line.idle < len(line.waiting) and line.serving < line.threads_max
            line.serving += is_short
            self._changed.notify_all()
        if is_short:
            self._start("rankwise-store", partial(self._serve, line))

    def _begin_watch(self, read: KeysRead, watch: Watch) -> None:
        """Tell the snapshot, and from then on what changes: in the reactor's thread."""
        assert read.watch is not None, "a watch has a token"
        if self._is_closed:
            watch.close()
            return
        followed = self._followed[read.watch] = _Followed(read.watch, watch)
        self._deliver(read)
        if followed.is_wanted:
            self._start("rankwise-watch", partial(self._follow, followed))

    def _end_watch(self, token: int) -> None:
        followed = self._followed.pop(token, None)
        if followed is not None:
            followed.end()

    def _start(self, name: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 -- raised again where it can be seen
                self._reactor.post(partial(_raise, error))

        # A daemon, so that an agent that dies of an exception is not kept by its store.
        thread = Thread(target=guarded, name=name, daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _serve(self, line: _OrderQueue) -> None:
        while True:
            with self._changed:
                line.idle += 1
                while not line.waiting and not self._is_closed:
                    self._changed.wait()
                line.idle -= 1
                if self._is_closed:
                    return
                request, useless_at = line.waiting.popleft()
            answer = self._answer(request, useless_at)
            if answer is not None:
                self._post(answer)

    def _answer(self, request: Request, useless_at: Instant) -> Answer | None:
        """What is to be told; nothing if that is on its way already."""
        token = request.token
        if self._clock.now() >= useless_at:
            waited = format_duration(self._request_timeout)
            busy = f"other requests kept the store busy for {waited}"
            return RequestFailed(token, self._trouble or busy)
        try:
            answer = self._carry_out(request)
        except LeaseLost:
            return LeaseEnded(token)
        except StoreRefused as error:
            return _denied(token, error)
        except StoreError as error:
            self._trouble = str(error)
            return RequestFailed(token, self._trouble)
        self._trouble = ""
        return answer

    def _carry_out(self, request: Request) -> Answer | None:
        token = request.token
        match request:
            case ReadKeys(watch=None):
                return KeysRead(token, self._store.read(request.prefix))
            case ReadKeys():
                snapshot, watch = self._store.follow(request.prefix)
                read = KeysRead(token, snapshot, request.watch)
                self._reactor.post(partial(self._begin_watch, read, watch))
                return None
            case Commit():
                result = self._store.commit(request.transaction)
                if isinstance(result, Committed):
                    return TransactionCommitted(token, result.revision)
                return TransactionConflicted(token, result.revision)
            case GrantLease():
                return LeaseGranted(token, self._store.grant_lease(request.ttl))
            case RenewLease():
                self._store.renew_lease(request.lease)
                return LeaseRenewed(token)
            case RevokeLease():
                self._store.revoke_lease(request.lease)
                return LeaseRevoked(token)

    def _follow(self, followed: _Followed) -> None:
        """Tell the changes of a watch until it is not wanted any more, or lost."""
        while followed.is_wanted:
            began = self._clock.now()
            try:
                changes = followed.watch.next(WATCH_PATIENCE)
            except Compacted as error:
                self._tell(followed, WatchLost(followed.token, str(error)))
                return
            except StoreRefused as error:
                self._tell(followed, _denied(followed.token, error))
                return
            except StoreError:
                # Requests tell of it. A store tries for its whole request timeout, and pauses while
                # it does; one that does not must not keep a core busy.
                if self._clock.now() < after(began, RETRY_PAUSE):
                    followed.give_way()
                continue
            if changes:
                self._tell(followed, KeysChanged(followed.token, changes))

    def _tell(self, followed: _Followed, answer: Answer) -> None:
        def deliver() -> None:
            if followed.is_wanted:
                self._deliver(answer)

        self._reactor.post(deliver)

    def _post(self, answer: Answer) -> None:
        def deliver() -> None:
            if not self._is_closed:
                self._deliver(answer)

        self._reactor.post(deliver)


def _denied(token: int, error: StoreRefused) -> StoreDenied:
    is_of_another_run = isinstance(error, StoreOfAnotherRun)
    return StoreDenied(token, error.message, error.hint or "", is_of_another_run)


def _raise(error: Exception) -> None:
    raise error
