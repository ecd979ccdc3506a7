"""A torch operation under way: `Work`, whose `wait` lets other simulated ranks run."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.autograd import Variable
from torch.distributed import Work as TorchWork
from torch.futures import Future

from rankwise.base.errors import CollectiveTimeout
from rankwise.base.units import SECOND, Duration
from rankwise.simranks.torch.in_flight import TensorGuard
from rankwise.simranks.world.collective_groups import CollectiveGroup, PendingCollective, Post
from rankwise.simranks.world.turn_takers import taking_turns

if TYPE_CHECKING:
    from rankwise.simranks.prediction import Passage, RankClock

Timed = tuple["RankClock", "Passage"]
"""A clock, and what it waits for."""
NO_TIMEOUT = timedelta(0)


class RehearsedWork(TorchWork):  # type: ignore[misc]  # torch is untyped here
    """An operation under way.

    Args:
        group, gates: what is to be waited for.
        outputs: the tensors that are filled.
        source: tells who has sent, if it is a message.
        handle: of `CollectiveGroup.open_handle`; None if it needs no wait of its own.
        watch: looks after the tensors that must be left alone until the wait is over.
        passages: what clocks wait for, on a modelled machine.
    """

    def __init__(
        self,
        group: CollectiveGroup,
        gates: Sequence[PendingCollective | Post],
        outputs: Any,
        source: Callable[[], int] | None = None,
        *,
        handle: int | None = None,
        watch: TensorGuard | None = None,
        passages: Sequence[Timed] = (),
    ) -> None:
        super().__init__()
        self._handle = handle
        self._watch = watch
        self._group = group
        self._gates = gates
        self._outputs = outputs
        self._source = source
        self._passages = passages
        self._future: Any = None

    @taking_turns
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Let others run until it is done."""
        self._close()
        self._meet(timeout)
        self._let_time_pass()
        return True

    def _meet(self, timeout: timedelta = NO_TIMEOUT) -> None:
        seconds = timeout.total_seconds()
        patience = Duration(round(seconds * SECOND)) if seconds > 0 else None
        for gate in self._gates:
            if not self._group.wait(gate, patience):
                raise CollectiveTimeout(
                    f"waited {seconds:g} s of virtual time for {gate.describe()}"
                )

    @property
    def _takes_time(self) -> bool:
        return bool(self._passages)

    def _let_time_pass(self) -> None:
        """Go on when it is over, on a machine that is modelled."""
        for clock, passage in self._passages:
            clock.wait(passage)

    def synchronize(self) -> None:
        """There is no stream to synchronise with."""
        self.wait()

    @taking_turns
    def is_completed(self) -> bool:
        """Whether all ranks have come; if not, others run before the next look."""
        for gate in self._gates:
            if not gate.is_open:
                self._group.poll(gate)
                return False
        self._close()
        return True

    def is_success(self) -> bool:
        """Whether it is done, and well."""
        return all(gate.is_open and gate.error is None for gate in self._gates)

    def exception(self) -> Exception | None:
        """Why it has failed, if it has."""
        errors = (gate.error for gate in self._gates)
        return next((error for error in errors if isinstance(error, Exception)), None)

    def result(self) -> Any:
        """The tensors that were filled."""
        return self._outputs

    @taking_turns
    def get_future(self) -> Any:
        """A future that is done: C++ code blocks on it where no other rank could run.

        DDP asks for it in the middle of backward and waits at its end, so the time passes there.
        """
        if self._future is None:
            self._close()
            self._meet()
            self._future = Future()
            self._future.set_result(self._outputs)
            if self._takes_time:
                try:
                    Variable._execution_engine.queue_callback(self._let_time_pass)  # noqa: SLF001  # as DDP does in C++
                except RuntimeError:  # nothing goes backward
                    self._let_time_pass()
        return self._future

    def _close(self) -> None:
        """The wait begins: were its tensors left alone until now?"""
        if self._handle is not None:
            misuse = "" if self._watch is None else self._watch.close()
            self._group.close_handle(self._handle, misuse)
            self._handle = self._watch = None

    def source_rank(self) -> int:
        """Which rank of the group a message came from."""
        return -1 if self._source is None else self._source()

    _source_rank = source_rank


class WorkDone(RehearsedWork):
    """One that torch waits for at once, and that has been waited for."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:  # noqa: ARG002  # torch's signature
        """Nothing is left to wait for."""
        return True


class WorkOfGraph(WorkDone):
    """One that has been captured by a graph: who waits for it, waits in each replay.

    Args:
        waits: note a wait in the graph, of each operation that this is.
    """

    def __init__(
        self, group: CollectiveGroup, outputs: Any, waits: Sequence[Callable[[], None]]
    ) -> None:
        super().__init__(group, [], outputs)
        self.waits = waits

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:  # noqa: ARG002  # torch's signature
        """Note the wait."""
        self._let_time_pass()
        return True

    @property
    def _takes_time(self) -> bool:
        return bool(self.waits)

    def _let_time_pass(self) -> None:
        for wait in self.waits:
            wait()
