"""`rankwise.recover`: calls a function again in the ranks that are alive when another one has died.

Runs inside workers. The decisions are in `rankwise.core.gang.machine`, and who does what when a
party dies in ADR 0021. Here are two threads. The main one runs the function, or waits for a word of
the agent when the function has been left. A thread of ours listens: when the rank is recalled it
aborts torch's process groups, for the main thread may be waiting in one of them, and sends it a
signal, whose handler raises `Recalled`. A simulated rank has another line (see
`simranks.run.recovery`).

The main thread takes `Recalled` only while it is *armed*, in the function: the handler looks, and
both run in the same thread, so that neither our own code nor the program after it is interrupted.
"""

import gc
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from rankwise.base.errors import ConfigError, LocalProtocolError
from rankwise.base.units import SECOND, Duration

if TYPE_CHECKING:
    import socket

    from rankwise.core.gang.vocabulary import RecoveryMessage
    from rankwise.drivers.real.recall_line import AgentWord

RECALL_SIGNAL = signal.SIGRTMIN + 7
"""Wakes the main thread of a rank that is recalled; the rank sends it to itself."""
RECALL_TIMEOUT_S = 5.0
NO_TIME = Duration(0)
RAISED_AT = "_rankwise_raised_at"
"""Tells the reporter when an exception that was held back was raised: monotonic and wall clock."""

R = TypeVar("R")
ReceivedWord: TypeAlias = "tuple[AgentWord, list[int]]"
"""A word of the agent, and the descriptors that have come with it."""


class Recalled(BaseException):
    """Raised inside of a function that `rankwise.recover` runs: another rank has died.

    Let it pass: a rank that catches it and goes on is killed when the time is over.
    """


def recover(function: Callable[[], R], *, timeout: float = RECALL_TIMEOUT_S) -> R:
    """Call a function, and call it again when another rank has died and been replaced.

        def train() -> None:
            torch.distributed.init_process_group("gloo")
            state = load_checkpoint()
            ...

        rankwise.recover(train)

    When a rank fails and restarts are left (`--max-restarts`), `rankwise.Recalled` is raised in the
    function on all ranks that live, torch's process groups are destroyed, a new process takes the
    dead rank's place, and the function is called again, with a new MASTER_PORT and
    `rankwise.restart_count()` one higher. The process keeps its memory: modules, data, all that is
    held outside of the function.

    An exception that the function raises is held back for up to a second, until it is known whether
    it comes of another rank's death. If not, it is raised here, and the rank fails.

    Among several nodes the same happens on all of them. A node that was lost is replaced by a
    spare, or by its own return, or is done without (`--nnodes 2:4`): so ranks may change their
    numbers, and there may be more or fewer of them.

    Simulated ranks (`--on sim`) are recovered as well. Without restarts and without a launcher the
    function is called, and that is all: a failure then starts all ranks again, as ever.

    Args:
        function: takes nothing; makes its process groups, and whatever else belongs to one world of
            ranks, each time that it is called.
        timeout: seconds that this rank may take to leave the function. One that is stuck in C code
            cannot leave it; when they are over it is killed, and begins anew like the dead one.

    Returns:
        What the function returns when it comes to its end.

    Raises:
        ConfigError: `timeout` is not positive, or this is not the main thread.
        LocalProtocolError: it is called in a function that `recover` runs.
    """
    if not timeout > 0:
        raise ConfigError(f"the timeout of recover is {timeout}, expected more than 0 s")
    rank = _simulated_rank() if "RANKWISE_SIMULATED" in os.environ else _rank()
    return function() if rank is None else rank.run(function, timeout)


def _simulated_rank() -> "RecoverableRank | None":
    from rankwise.simranks.run.recovery import recoverable_rank  # noqa: PLC0415  # only there

    return recoverable_rank()


_known: "tuple[int, RecoverableRank | None] | None" = None


def _rank() -> "RecoverableRank | None":
    """This process's end of the line to its agent; None if there is none, or it is a fork's."""
    global _known  # noqa: PLW0603  # one process is one rank
    if _known is None:
        _known = os.getpid(), _attach()
    pid, rank = _known
    return rank if pid == os.getpid() else None


def _attach() -> "RecoverableRank | None":
    from rankwise.drivers.real.recall_line import LINE_VARIABLE, attach_line  # noqa: PLC0415  # rare

    text = os.environ.get(LINE_VARIABLE)
    line = None if text is None else attach_line(int(text))
    if line is None:
        return None
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "recover was called outside the main thread",
            hint="only the main thread can be recalled: call it there",
        )
    return RecoverableRank(_SocketLine(line))


class AgentLine(Protocol):
    """A rank's end of the line to its agent."""

    def listen(self, rank: "RecoverableRank") -> None:
        """Let a rank `note` each word as soon as it has come, and get `RECALL_SIGNAL` if told."""
        ...

    def say(self, word: "RecoveryMessage", recall_timeout: Duration) -> None:
        """Say a word to the agent."""
        ...

    def next_word(self) -> "ReceivedWord | None":
        """Wait for the next word; None when the agent has ended."""
        ...

    def release(self) -> None:
        """Have connections that are not referred to any more closed."""
        ...


class _SocketLine:
    """The line of a process, and the thread that listens to it."""

    def __init__(self, line: "socket.socket") -> None:
        self._line = line
        self._main = threading.get_ident()
        self._words: queue.SimpleQueue[ReceivedWord | None] = queue.SimpleQueue()

    def listen(self, rank: "RecoverableRank") -> None:
        """Begin to listen, in a thread of ours."""
        threading.Thread(
            target=self._listen, args=(rank,), name="rankwise-recover", daemon=True
        ).start()

    def say(self, word: "RecoveryMessage", recall_timeout: Duration) -> None:
        """Say a word to the agent."""
        from rankwise.drivers.real.recall_line import WorkerWord, say  # noqa: PLC0415  # as below

        say(self._line, WorkerWord(word, recall_timeout))

    def next_word(self) -> "ReceivedWord | None":
        """Wait for the next word."""
        return self._words.get()

    def release(self) -> None:
        """Models and their reducers hold each other, and the groups' connections."""
        gc.collect()

    def _listen(self, rank: "RecoverableRank") -> None:
        from rankwise.core.gang.vocabulary import RecoveryOrder  # noqa: PLC0415  # not needed to boot
        from rankwise.drivers.real.recall_line import receive  # noqa: PLC0415  # the same

        received = receive(self._line)
        while received is not None:
            rank.note(received[0])
            self._words.put(received)
            if received[0].word is RecoveryOrder.RECALL:
                _interrupt_waits(received[0].peers, rank.earlier_connections)
                signal.pthread_kill(self._main, RECALL_SIGNAL)
            received = receive(self._line)
        self._words.put(None)


class RecoverableRank:
    """A rank that can be called again. It lasts as long as the process.

    Attributes:
        earlier_connections: those that the function has not made; None where no peer is on another
            machine.
    """

    def __init__(self, line: AgentLine) -> None:
        self._line = line
        self._pid = os.getpid()
        self._is_recalled = False
        self._is_armed = False
        self._is_running = False
        self._held: Exception | None = None
        self._store: object = None
        """What keeps torch's store on rank 0 at work until the function has made its own."""
        self.earlier_connections: frozenset[int] | None = None
        signal.signal(RECALL_SIGNAL, self._on_signal)
        line.listen(self)

    def note(self, word: "AgentWord") -> None:
        """A word has come, which `next_word` will tell when the main thread asks."""
        from rankwise.core.gang.vocabulary import RecoveryOrder  # noqa: PLC0415  # not needed to boot

        self._is_recalled = word.word is RecoveryOrder.RECALL

    def run(self, function: Callable[[], R], timeout: float) -> R:
        """Call the function until it comes to its end by itself."""
        from rankwise.core.gang.vocabulary import RecoveryMessage  # noqa: PLC0415  # not needed to boot

        if self._is_running:
            raise LocalProtocolError(
                "rankwise.recover was called in a function that rankwise.recover runs, and "
                "recoveries cannot be nested",
                hint="call it once, around everything that must run again, and call inner "
                "functions directly",
            )
        self._is_running = True
        try:
            self._say(RecoveryMessage.OFFERS, Duration(round(timeout * SECOND)))
            while True:
                result = self._call(function)
                if result is not None:
                    return result[0]
                self._wait_until_called_again()
        finally:
            self._is_running = False
            self._store = None
            self._say(RecoveryMessage.WITHDRAWS)

    def _call(self, function: Callable[[], R]) -> tuple[R] | None:
        """Call it once; what it returns, or None if it was recalled, or has raised."""
        from rankwise.core.gang.vocabulary import RecoveryMessage  # noqa: PLC0415  # as above

        try:
            self.earlier_connections = _connections_to_keep()
            self._store = _serve_store()
            try:
                self._is_armed = True
                if self._is_recalled:
                    raise Recalled
                return (function(),)
            finally:
                self._is_armed = False
        except Recalled as recalled:
            self._is_armed = False
            _let_go_of(recalled)
        except Exception as error:  # noqa: BLE001  # it is raised again, or belongs to a death
            _stamp(error)
            self._held = error
            self._say(RecoveryMessage.EXCEPTION_HELD)
        return None

    def _wait_until_called_again(self) -> None:
        """Do what the agent says; come back when the function is to be called again."""
        from rankwise.core.gang.vocabulary import RecoveryMessage, RecoveryOrder  # noqa: PLC0415  # as above

        while True:
            received = self._line.next_word()
            word = None if received is None else received[0].word
            if received is not None and word is RecoveryOrder.RECALL:
                held, self._held = self._held, None
                if held is not None:
                    _let_go_of(held)
                    del held
                self._store = None
                _give_up_world()
                self._line.release()
                self._say(RecoveryMessage.YIELDED)
            elif received is not None and word is RecoveryOrder.AGAIN:
                _enter_world(*received)
                return
            else:  # it is ours, or the agent has ended, and its guardian is about to end us
                held, self._held = self._held, None
                raise held or SystemExit(1)

    def _say(self, word: "RecoveryMessage", recall_timeout: Duration = NO_TIME) -> None:
        self._line.say(word, recall_timeout)

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        if self._is_armed and self._is_recalled and os.getpid() == self._pid:
            raise Recalled


def _stamp(error: Exception) -> None:
    """Note when it was raised: its report comes later, and the first one is the root cause."""
    with suppress(AttributeError):  # one with slots is told with the time of its report
        setattr(error, RAISED_AT, (time.monotonic_ns(), time.time_ns()))


def _let_go_of(error: BaseException) -> None:
    """Drop what the function had in its variables: models, tensors, process groups."""
    seen: set[int] = set()
    following: list[BaseException | None] = [error]
    while following:
        each = following.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            following += (each.__cause__, each.__context__)
            each.__traceback__ = None


def _connections_to_keep() -> frozenset[int] | None:
    """The connections of before the function is called, if it has peers on other machines."""
    from rankwise.drivers.real.peer_connections import connections  # noqa: PLC0415  # rare

    return connections() if "RANKWISE_COLLECTIVES_KEY" in os.environ else None


def _serve_store() -> object:
    """In rank 0, if it is given a socket that listens at MASTER_PORT: serve torch's store there.

    The ranks that live on are in `init_process_group` long before a new rank is, and often before
    rank 0. `init_process_group` of rank 0 finds this store and uses it. Without torch it is not
    used, and the port is free for what the function has in mind.
    """
    import socket  # noqa: PLC0415  # loaded with the line

    from rankwise.drivers.real.recall_line import MASTER_VARIABLE  # noqa: PLC0415  # the same

    descriptor = os.environ.pop(MASTER_VARIABLE, None)
    if descriptor is None:
        return None
    torch = sys.modules.get("torch.distributed")
    with socket.socket(fileno=int(descriptor)) as listener:
        if torch is None or not torch.is_available():
            # The agent, or the fork server, may be about to close its copy: this ends them all.
            listener.shutdown(socket.SHUT_RD)
            return None
        return torch.TCPStore(
            os.environ["MASTER_ADDR"],
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=os.dup(listener.fileno()),  # not inheritable, as it should be
        )


def _interrupt_waits(peers: tuple[int, ...], earlier: frozenset[int] | None) -> None:
    """Let threads that wait for another rank in C code come back with an error.

    NCCL can be told to. Gloo and torch's store cannot: they come back when connections end.
    """
    from rankwise.drivers.real.peer_connections import end_connections_to  # noqa: PLC0415  # rare

    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None:
        for group in list(c10d._world.pg_names):  # noqa: SLF001  # no public list
            with suppress(Exception):  # it may be in any state, and is given up anyway
                group.abort()
    end_connections_to(peers, but_for=earlier)


def _give_up_world() -> None:
    """Destroy what joins this rank to the others."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None:
        with suppress(Exception):  # as above
            if c10d.is_initialized():
                c10d.destroy_process_group()
            # Groups find each other by this count. One that was about to be made has raised it.
            c10d._world.group_count = 0  # noqa: SLF001  # as above
    default = sys.modules.get("rankwise.collectives.default")
    if default is not None:
        default.forget_communicator()
    stopping = sys.modules.get("rankwise.launch.inside.stopping")
    if stopping is not None:
        stopping.forget_words()
    sections = sys.modules.get("rankwise.launch.inside.sections")
    if sections is not None:
        sections.forget_segment()
    ring = sys.modules.get("rankwise.drivers.real.worker.call_ring")
    if ring is not None:
        ring.forget_ring()


def _enter_world(word: "AgentWord", descriptors: list[int]) -> None:
    """Take on the variables of the new world, and the memory that its ranks on this node share."""
    from rankwise.drivers.real.segments import SEGMENT_VARIABLE  # noqa: PLC0415  # as above

    for name, value in word.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for name, descriptor in zip(word.descriptors, descriptors, strict=False):
        if name == SEGMENT_VARIABLE:  # which is ours still
            os.dup2(descriptor, int(os.environ[name]))
            os.close(descriptor)
        else:
            os.environ[name] = str(descriptor)
