"""The engine: carries out what the task graph of one worker orders, and feeds it what happens.

It has no thread of its own: it runs in its caller's. Completions are read without waiting at every
32nd submission, and with waiting while there is no room, during commands, and at the
end of a run. Then it sleeps in one `read`, or in `poll` when there is a deadline.

An exception in the middle of any of this would part the graph from the children, so signal handlers
wait meanwhile (see `drivers.real.interrupts`). They run, and may raise, in the user's function, at
the end of each call that it makes, and in every wait, when all that was read has been taken in.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from rankwise.base.errors import TreeError, TreeTimeout, TreeValueError, WorkerDied
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.tasks.request import Deliver
from rankwise.core.tree.heap import ALIGNMENT
from rankwise.core.tree.machine import TaskGraph
from rankwise.core.tree.vocabulary import (
    FAILED_BIT,
    Access,
    AllocationAbandoned,
    AllocationGranted,
    AllocationRefused,
    AllocationRequested,
    ChildDied,
    ChildJoined,
    ChildPool,
    ChildrenReported,
    Discard,
    Dispatch,
    DrainBegan,
    Drained,
    Effect,
    GraphSpec,
    GroupSubmitted,
    Recall,
    RunAbandoned,
    ScopeClosed,
    ScopeOpened,
    SlotsRecalled,
    Stimulus,
    TaskSubmitted,
)
from rankwise.drivers.feed import Door
from rankwise.drivers.real.interrupts import HandlerGate, gate_here
from rankwise.drivers.real.journal import FileJournal
from rankwise.drivers.real.tree.arena import FRAME_BYTES, PAGE, Arena, ArenaLayout, TaskFrames
from rankwise.drivers.real.tree.children import Children, ChildSpec
from rankwise.drivers.real.tree.pipe_protocol import (
    AHEAD,
    ANSWERED,
    COMMAND,
    COUNTER_SHIFT,
    FIELD_BITS,
    FIELD_MASK,
    FLUSH,
    HAS_FRAME,
    KIND_SHIFT,
    LEFT_IN_FILE,
    MORE,
    NO_TASK,
    PROGRAM_ENDED,
    PROGRAM_FAILED,
    READY,
    VALUE_SHIFT,
)
from rankwise.drivers.real.tree.program_dispatch import ProgramRuns
from rankwise.drivers.real.tree.reports import ANSWER, UNTOLD, Report, decode_report, rebuilt
from rankwise.drivers.real.tree.requests import ChildRequests

RING_DEPTH_MAX = 8192 - 256
"""A pipe holds 8192 words, so with the ring's and a few others writing one never waits."""
_POLL_EVERY = 32
_KILLS_MAX = 2
_UNDISTURBED = Duration(SECOND // 2)
"""How long the tasks of an interrupted run may go on whatever other interrupts come."""
_ENDS = READY << KIND_SHIFT
"""Words below are ends of tasks that left nothing in their frames."""
_END_MASK = (1 << VALUE_SHIFT) - 1
_now: Callable[[], Any] = time.monotonic_ns
_SCOPE_OPENED, _SCOPE_CLOSED, _DRAIN_BEGAN = ScopeOpened(), ScopeClosed(), DrainBegan()


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is made of.

    Attributes:
        children: in the order of their numbers.
        ring_depth: how many tasks may be unfinished at a time.
        heap_bytes: how much memory tasks' `alloc` may hand out.
        start_patience: how long all children together may take to come up.
        close_patience: how long they may take to end before they are killed.
        favourite: see `GraphSpec`.
        journal: a file to append every fact and order of its machines to; None for none.
    """

    children: tuple[ChildSpec, ...]
    ring_depth: int
    heap_bytes: int
    start_patience: Duration
    close_patience: Duration
    favourite: int | None = None
    journal: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.ring_depth <= RING_DEPTH_MAX:
            raise TreeValueError(
                f"ring_depth is {self.ring_depth}, expected between 1 and {RING_DEPTH_MAX}"
            )


class TreeEngine:
    """The processes and the task graph of one worker.

    Attributes:
        arena: the memory that all children share.
        children: the processes.
        reports: what failing tasks of this run have told, by their number; each with its child.
        forgotten_commands: how many commands' answers were not waited for.
        on_lost: told a child's number, and how it ended.
        on_left: told a task's number, the child, and what the task left; returns the simulated
            instant at which it ended.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._journal = journal = None if spec.journal is None else _journal_at(spec.journal)
        layout = ArenaLayout(len(spec.children), spec.ring_depth, spec.heap_bytes)
        self.arena = Arena(layout)
        heap_start = self.arena.address + layout.heap
        self._graph = TaskGraph(
            GraphSpec(
                pools=tuple(child.pool for child in spec.children),
                ring_depth=spec.ring_depth,
                heap_start=-(-heap_start // ALIGNMENT) * ALIGNMENT,
                heap_bytes=spec.heap_bytes,
                favourite=spec.favourite,
            )
        )
        door: Door[Stimulus, Effect] = Door("graph", self._graph, journal)
        self._tell_graph, self._wake_graph = door.tell, door.wake
        self.children = Children(
            spec.children,
            self.arena,
            self,
            start_patience=spec.start_patience,
            close_patience=spec.close_patience,
            journal=journal,
        )
        self.reports: dict[int, list[tuple[int, Report]]] = {}
        self.on_lost: Callable[[int, str], None] | None = None
        self.on_left: Callable[[int, int, bytes], int] | None = None
        self._clock_base = 0
        self.forgotten_commands = 0
        self._deadline: Instant | None = None
        self._words = [0] * spec.ring_depth
        self._memory = memoryview(self.arena.memory)
        self._frames = TaskFrames(self._memory, layout.frames)
        self._since_poll = 0
        self._has_gate = False
        self._drained: list[Drained] = []
        self._allocations: list[AllocationGranted | AllocationRefused] = []
        self._left: dict[int, bytes] = {}
        """What tasks have left in report files, by slot."""
        self._requests: list[ChildRequests] = []
        self._answers: dict[int, Report] = {}
        """What children have told in report files that was no task's."""
        self._deaths: dict[int, str] = {}
        """Children that have ended since the wait for them began."""
        self._programs = ProgramRuns(self.children, self._deaths, self._on_words, self._check_alive)

    def start(self) -> None:
        """Start all children; see `Children.start` for what is raised."""
        self._requests = [self._requests_to(child) for child in range(len(self.spec.children))]
        self.gate().acquire(self)
        self._has_gate = True
        try:
            self.children.start()
        except BaseException:
            self._let_go()
            raise

    def _requests_to(self, child: int) -> ChildRequests:
        place = self.arena.layout.command(child)
        return ChildRequests(
            self.children.name_of(child),
            self._memory[place : place + FRAME_BYTES],
            lambda length: self.children.send(child, [COMMAND | length]),
            lambda: self.children.kill(child),
            self._journal,
        )

    def gate(self) -> HandlerGate:
        """The gate of the thread that uses the engine now, which is this one."""
        gate = self.children.gate = gate_here()
        return gate

    def close(self) -> tuple[str, ...]:
        """End all children and let go of the memory; the names of those that were killed."""
        self.gate()
        try:
            return self.children.close()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._has_gate:
            self._has_gate = False
            self.children.gate.release(self)
        self._requests = []
        self._memory.release()
        self.arena.close()
        if self._journal is not None:
            self._journal.close()

    # A run

    def begin_run(self, clock: int = 0, deadline: Instant | None = None) -> None:
        """Forget what was told in the run before.

        Args:
            clock: the simulated instant before which no task can begin.
            deadline: when waiting ends with a `TimeoutError`, whatever is waited for.
        """
        self.reports.clear()
        self._clock_base = clock
        self._deadline = deadline

    def submit(
        self,
        pool: ChildPool,
        callable_: int,
        frame: bytes | None,
        *,
        accesses: tuple[Access, ...] = (),
        child: int | None = None,
        name: str = "",
    ) -> int:
        """Hand in a task; returns its slot. Waits while the ring is full.

        Raises:
            ConfigError: no child could ever take it, or its frame is too long.
        """
        graph, gate = self._graph, self.children.gate
        gate.is_shut = True
        try:
            slot = graph.next_slot
            if slot < 0:
                slot = self._wait_for_slots(1)[0]
            word = slot | callable_ << FIELD_BITS
            if frame is not None:
                word |= HAS_FRAME
                self._frames.write(slot, frame)
            self._words[slot] = word
            effects = self._tell_graph(TaskSubmitted(pool, name, accesses, child), _now())
            if effects:
                self._carry_out(effects)
            self._since_poll += 1
            if self._since_poll >= _POLL_EVERY:
                self._poll()
        finally:
            gate.is_shut = False
            if gate.due:
                gate.run_due()
        return slot

    def submit_group(
        self,
        pool: ChildPool,
        callable_: int,
        frames: Sequence[bytes | None],
        *,
        children: Sequence[int | None],
        accesses: tuple[Access, ...] = (),
        name: str = "",
    ) -> int:
        """Hand in a group, one frame per member; returns its first slot."""
        stimulus = GroupSubmitted(pool, tuple(children), name, accesses)
        with self.gate().closed():
            slots = self._graph.next_slots(len(frames)) or self._wait_for_slots(len(frames))
            for slot, frame in zip(slots, frames, strict=True):
                word = slot | callable_ << FIELD_BITS
                if frame is not None:
                    word |= HAS_FRAME
                    self._frames.write(slot, frame)
                self._words[slot] = word
            self._tell(stimulus)
        return slots[0] if slots else 0

    def _wait_for_slots(self, count: int) -> list[int]:
        while not (slots := self._graph.next_slots(count)) and count:
            self._wait()
        return slots

    def open_scope(self) -> None:
        """Open a scope."""
        with self.gate().closed():
            self._tell(_SCOPE_OPENED)

    def close_scope(self) -> None:
        """Close the innermost scope."""
        with self.gate().closed():
            self._tell(_SCOPE_CLOSED)

    def allocate(self, size_bytes: int) -> int:
        """Address of memory that lives as long as the scope; waits for tasks that hold memory.

        Raises:
            TreeError: nothing that happens could free enough; says who holds the memory.
        """
        with self.gate().closed():
            self._allocations.clear()
            try:
                self._tell(AllocationRequested(size_bytes))
                while not self._allocations:
                    self._wait()
            except BaseException:
                self._tell(AllocationAbandoned())
                raise
            allocation = self._allocations.pop()
        if isinstance(allocation, AllocationRefused):
            raise TreeError(
                f"the heap is full: {allocation.reason}",
                hint="close scopes earlier, or give the worker a larger heap_ring_size",
            )
        return allocation.address

    def poll(self) -> None:
        """Take in what has been reported, and send what has waited for long enough."""
        with self.gate().closed():
            self._poll()

    def _poll(self) -> None:
        self._since_poll = 0
        words = self.children.read_now()
        if words:
            self._on_words(words)
        deadline = self._graph.next_deadline
        if deadline is not None and _now() >= deadline:
            self._carry_out(self._wake_graph(_now()))

    def drain(self) -> Drained:
        """Wait until every task of the run has ended.

        Raises:
            TimeoutError: the run's deadline has passed.
        """
        self._tell(_DRAIN_BEGAN)
        while not self._drained:
            self._wait()
        return self._end_run()

    def abandon_run(
        self, grace: Duration, kill_patience: Duration
    ) -> tuple[Drained, BaseException | None]:
        """Let what has not begun not begin, and kill what does not end within `grace`.

        Another interrupt ends the grace; but not in the first moment, which is enough for most:
        they may come in volleys.

        Returns:
            What has not come about, and the interrupt that has ended the grace, if one has: it is
            the caller's to raise, since the program may go on after the one before it.

        Raises:
            TreeError: not even killing has ended it, twice `kill_patience` later.
        """
        gate, undisturbed = self.children.gate, min(grace, _UNDISTURBED)
        self.children.continue_fork_server()
        if not self._drained:  # or the interrupt came along with the last end
            self._tell(RunAbandoned())
        with gate.patience():
            self._wait_drained(undisturbed)
        another: BaseException | None = None
        try:
            self._wait_drained(Duration(grace - undisturbed))
        except BaseException as raised:  # noqa: BLE001  # it goes on when all is quiet
            another = raised
        with gate.patience():
            for _ in range(_KILLS_MAX):
                if not self._drained:
                    for child in self._graph.busy_children:
                        self.children.kill(child)
                    self._wait_drained(kill_patience)
        if not self._drained:
            raise TreeError("a run did not end although its children were killed")
        return self._end_run(), another

    def _wait_drained(self, patience: Duration) -> None:
        self._deadline = Instant(_now() + patience)
        with suppress(TimeoutError):
            while not self._drained:
                self._wait()

    def _end_run(self) -> Drained:
        drained = self._drained.pop()
        self._deadline = None
        if drained.unfinished:
            for file in self.children.reports:
                file.empty()
        return drained

    # Commands and programs

    def command(self, child: int, body: bytes, deadline: Instant | None = None) -> bytes:
        """Ask a child for something that is no task, after all that was sent to it.

        Raises:
            WorkerDied: the child has ended.
            TimeoutError: the deadline has passed, or else the run's.
            Exception: whatever the child raised.
        """
        with self.gate().closed():
            self._deaths.clear()
            self._check_alive(child)
            requests = self._requests[child]
            call = requests.call(body)
            of_run = self._deadline
            if deadline is not None:
                self._deadline = deadline
            try:
                while (end := requests.end_of(call)) is None:
                    self._wait()
            except BaseException:
                requests.forget(call)
                self.forgotten_commands += 1
                raise
            finally:
                self._deadline = of_run
        if not isinstance(end, Deliver):
            raise WorkerDied(end.reason)
        if not end.succeeded:
            raise rebuilt(decode_report(end.body), self.children.name_of(child))
        return end.body

    def run_programs(self, programs: dict[int, int], deadline: Instant | None = None) -> None:
        """Run a recorded program at each of these children, all at once, and wait for all.

        Raises:
            WorkerDied: a child has ended.
            TimeoutError: the deadline has passed. A child that was not done is killed.
            Exception: whatever the first child raised.
        """
        with self.gate().closed():
            self.children.check_whole()
            self._deaths.clear()
            self._programs.run(programs, deadline)

    def _check_alive(self, child: int) -> None:
        how = self._deaths.get(child) or self.children.lost.get(child)
        if how is not None:
            raise WorkerDied(f"{self.children.name_of(child)} {how}")

    # What happens

    def _tell(self, stimulus: Stimulus) -> None:
        effects = self._tell_graph(stimulus, _now())
        if effects:
            self._carry_out(effects)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            # A match costs several times as much, and these are the most frequent.
            if type(effect) is Dispatch:
                self._dispatch(effect)
                continue
            if type(effect) is Drained:
                self._drained.append(effect)
                continue
            match effect:
                case Dispatch() | Drained():  # found above
                    pass
                case Recall():
                    self._recall(effect.child)
                case AllocationGranted() | AllocationRefused():
                    self._allocations.append(effect)
                case Discard():
                    if effect.size_bytes >= PAGE:
                        self.arena.discard(effect.address - self.arena.address, effect.size_bytes)

    def _dispatch(self, order: Dispatch) -> None:
        words = self._words
        if self.on_left is not None:
            self._write_clocks(order.slots)
        if len(order.slots) == 1:
            word = words[order.slots[0]]
            if order.ahead[0]:
                word |= AHEAD | order.epoch << COUNTER_SHIFT
            self.children.send(order.child, [word])
            return
        batch = [words[slot] | MORE for slot in order.slots]
        if True in order.ahead:
            ahead = AHEAD | order.epoch << COUNTER_SHIFT
            for place, is_ahead in enumerate(order.ahead):
                if is_ahead:
                    batch[place] |= ahead
        batch[-1] &= ~MORE
        self.children.send(order.child, batch)

    def _write_clocks(self, slots: list[int]) -> None:
        for slot in slots:
            if self._words[slot] & HAS_FRAME:
                self._frames.set_clock(slot, max(self._clock_base, self._graph.clock_of(slot)))

    def _recall(self, child: int) -> None:
        taken = self.children.take_back(child)
        slots = [word & FIELD_MASK for word in taken if not word & NO_TASK]
        others = [word for word in taken if word & NO_TASK]
        if taken:
            # The child may hold back what it has to tell, in the belief that these would follow.
            self.children.send(child, [*others, FLUSH])
        self._tell(SlotsRecalled(child, slots))

    def _wait(self) -> None:
        """Sleep until something has happened.

        Raises:
            TimeoutError: the run's deadline has passed.
        """
        held = deadline = self._graph.next_deadline
        if self._deadline is not None:
            if _now() >= self._deadline:
                count = self._graph.unfinished_count
                what = "a task has" if count == 1 else f"{count} tasks have"
                raise TreeTimeout(f"{what} not ended in time")
            deadline = self._deadline if held is None else min(held, self._deadline)
        words = self.children.read(deadline)
        if words:
            self._on_words(words)
        elif held is not None:
            self._carry_out(self._wake_graph(_now()))
        gate = self.children.gate
        if gate.due:
            gate.run_due()

    def _on_words(self, words: list[int]) -> None:
        highest = max(words) if words else 0
        if highest < _ENDS:
            if words:
                report = ChildrenReported(words) if highest < FAILED_BIT else self._ends(words)
                effects = self._tell_graph(report, _now())
                if effects:
                    self._carry_out(effects)
            return
        ends: list[int] = []
        for word in words:
            kind = word >> KIND_SHIFT & 0xFF
            if kind < READY:
                ends.append(word)
                continue
            if ends:
                # They come first, also because a dead child's last words must be handled before.
                self._tell(self._ends(ends))
                ends = []
            self._on_child_message(kind, word)
        if ends:
            self._tell(self._ends(ends))

    def _ends(self, words: list[int]) -> ChildrenReported:
        if max(words) < FAILED_BIT:
            return ChildrenReported(words)
        clocks: dict[int, int] = {}
        for word in words:
            slot = word & FIELD_MASK
            if word >> VALUE_SHIFT:
                clocks[slot] = self._take_what_was_left(slot, word >> VALUE_SHIFT)
            elif word & FAILED_BIT:
                child = self._graph.child_of(slot)
                self._read_reports(child)
                number, _ = self._graph.task_in(slot)
                self.reports.setdefault(number, [(child, UNTOLD)])
        return ChildrenReported([word & _END_MASK for word in words], clocks)

    def _take_what_was_left(self, slot: int, length: int) -> int:
        """Hand over what a task has left; the simulated instant at which it ended."""
        child = self._graph.child_of(slot)
        if length == LEFT_IN_FILE:
            self._read_reports(child)
            left = self._left.pop(slot)
        else:
            left = self._frames.left(slot, length)
        number, _ = self._graph.task_in(slot)
        return self.on_left(number, child, left) if self.on_left is not None else 0

    def _read_reports(self, child: int) -> None:
        for subject, report in self.children.reports[child].read_new():
            if subject == ANSWER:
                self._answers[child] = report
            elif report.left:
                self._left[subject] = report.left
            else:
                number, _ = self._graph.task_in(subject)
                self.reports.setdefault(number, []).append((child, report))
                if report.loss:
                    # It ends, which is told like any end; but the next run must know for sure.
                    self.children.lost[child] = report.loss

    def _on_child_message(self, kind: int, word: int) -> None:
        child, value = word & FIELD_MASK, word >> VALUE_SHIFT
        if kind == ANSWERED:
            if value == LEFT_IN_FILE:
                self._read_reports(child)
                self._requests[child].on_answer_bytes(self._answers.pop(child).left)
            else:
                self._requests[child].on_answer(value)
        elif kind == PROGRAM_ENDED:
            self._programs.on_ended(child, None)
        elif kind == PROGRAM_FAILED:
            self._read_reports(child)
            self._programs.on_ended(child, self._answers.pop(child, UNTOLD))
        else:
            self.children.on_word(word)

    def child_lost(self, child: int, how: str, *, successor: bool) -> None:
        """A child has ended: what it had counted decides what becomes of its queue."""
        place = self.arena.layout.counter(child)
        counters = self._memory[place : place + 16].cast("Q")
        begun, done = counters
        counters[0] = counters[1] = 0
        self.children.take_back(child)  # or its successor would find the words
        self._deaths[child] = how
        self._requests[child].on_child_ended(how)
        if self.on_lost is not None:
            self.on_lost(child, how)
        self._tell(ChildDied(child, begun, done, successor))

    def child_replaced(self, child: int) -> None:
        """The successor of a dead child is ready."""
        self._requests[child] = self._requests_to(child)
        self._tell(ChildJoined(child))


def _journal_at(path: str) -> FileJournal:
    try:
        return FileJournal(path, _tell_of_lost_journal)
    except OSError as error:
        raise TreeValueError(
            f"journal is {path!r}, which cannot be written: {error.strerror}",
            hint="give the name of a file in a folder that exists",
        ) from error


def _tell_of_lost_journal(path: str, error: OSError) -> None:
    warnings.warn(f"no more is written to {path}: {error.strerror}", RuntimeWarning, stacklevel=2)
