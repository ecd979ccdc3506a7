"""From a kernel's operations to the work of a processing element's engines, in simulated time.

A program calculates its values as it goes, and runs ahead of simulated time: each operation is
handed to its engine (DMA, GEMM or math) as soon as the results that it reads are there in simulated
time, and operations that do not depend on each other overlap as far as the engines allow. The
program itself stops where the future could change what it does: at atomics, at loads of single
numbers, at messages that it receives, and wherever it decides by a value that had to be loaded or
calculated. And it runs ahead by no more than a fixed number of operations, and in loops by no more
turns than the kernel's `num_stages` says, as a real kernel does by the size of its scratch memory.

A message that it sends is one more operation: it leaves when its block is there and, unless it is
relaxed, when everything that the program has stored before is in memory, so that who receives it
may read that. Messages to one peer leave in the order in which they were sent.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from rankwise.sim.hardware.hardware_machine import Pe
from rankwise.sim.kernel import Future, Simulator, Steps, all_of
from rankwise.sim.triton.dtypes import SHORT_NAMES
from rankwise.sim.triton.execution import Operation, leaves
from rankwise.sim.triton.launch_replay import RecordedOperation, Recording


class ProgramClock:
    """The observer of one program: hands its operations to the engines of its PE.

    Args:
        simulator: the simulation.
        pe: the processing element that the program runs on.
        start_dma: begins to move bytes: lowest address, which ones, `is_load` into scratch memory.
        wait: leaves the program's greenlet until a future has happened.
        log: takes note of each operation when it ends: where it was, and from when to when.
        ahead: how many operations the program may run ahead.

    Attributes:
        pe: the processing element.
        dma_waited: picoseconds for which calculations and messages have waited for loads, and the
            program for what was under way when it had done everything.
    """

    def __init__(
        self,
        simulator: Simulator,
        pe: Pe,
        start_dma: Callable[..., Future],
        wait: Callable[[Future], Any],
        log: Callable[[Operation, str, int, int], None],
        ahead: int,
    ) -> None:
        self._simulator = simulator
        self.pe = pe
        self._start_dma = start_dma
        self._wait = wait
        self._log = log
        self._ahead = ahead
        self._under_way: deque[Future] = deque()
        self._aside: list[Future] = []
        """Signals, and copies from memory to memory: they take no scratch memory."""
        self._begun = 0
        self.dma_waited = 0
        self._stores: list[Future] = []
        self._copies: list[Future] = []
        self._loads: list[Future] = []
        self._last_message: dict[str, Future] = {}

    def operation(self, operation: Operation) -> Future | None:
        """Hand an operation to its engine; the token is the future of its end."""
        if operation.kind in ("load", "store", "atomic") and not operation.size_bytes:
            return None
        self._make_room()
        return self._begin(operation, _flattened(operation.after))

    def send(
        self,
        way: str,
        steps: Steps,
        after: tuple[Any, ...],
        locate: Callable[[], str],
        *,
        releases: bool,
    ) -> None:
        """Begin to send a message.

        Args:
            way: the name of its queue.
            steps: what takes the time of sending; ends when the bytes have left.
            after: tokens of its block.
            locate: tells the line of the kernel.
            releases: whether it waits for the stores before it.
        """
        self._make_room()
        before = _flattened(after)
        if releases:
            before += [*self._stores, *self._copies]
        if way in self._last_message:
            before.append(self._last_message[way])
        work = self._simulator.process(
            self._after(before, steps), f"send on {way} by {self.pe.name}", locate=locate
        )
        self._last_message[way] = work
        self._keep(work)

    def release(
        self, operation: Operation, take_effect: Callable[[], None], locate: Callable[[], str]
    ) -> None:
        """Begin to store a word that tells others of the stores before it, after which it comes."""
        name = f"{operation.name} on {operation.buffer} by {self.pe.name}"
        steps = self._after([*self._stores, *self._copies], self._released(operation, take_effect))
        self._aside.append(self._simulator.process(steps, name, locate=locate))

    def _released(self, operation: Operation, take_effect: Callable[[], None]) -> Steps:
        yield from self._carry_out(operation, [])
        take_effect()

    def complete(self, operation: Operation) -> None:
        """Do an operation, and wait for it alone: what was begun before goes on."""
        self.wait_for(self._begin(operation, []))

    def copy(self, operation: Operation, start: Callable[[], Future]) -> Future:
        """Begin to move bytes from memory to memory, after the stores that it may read."""
        name = f"{operation.name} to {operation.buffer} by {self.pe.name}"
        before = [future for future in self._stores if not future.is_done]
        work = self._simulator.process(self._copied(operation, start, before), name)
        self._aside.append(work)
        self._copies = [future for future in self._copies if not future.is_done]
        self._copies.append(work)
        return work

    def _copied(
        self, operation: Operation, start: Callable[[], Future], before: list[Future]
    ) -> Steps:
        if before:
            yield all_of(before)
        since = self._simulator.now
        yield start()
        self._log(operation, self.pe.name, since, self._simulator.now)

    def wait_for(self, future: Future) -> None:
        """Let the program go on when something that it has begun is done."""
        if not future.is_done:
            self._wait(future)

    def _keep(self, work: Future) -> None:
        self._begun += 1
        self._under_way.append(work)

    def _make_room(self) -> None:
        while len(self._under_way) >= self._ahead:
            self._wait(self._under_way.popleft())

    def settle(self) -> None:
        """Wait until everything that the program has begun is done."""
        pending = self._pending()
        if pending:
            self._wait(all_of(pending))

    def mark(self) -> int:
        """How many operations have been begun."""
        return self._begun

    def reach(self, mark: int) -> None:
        """Wait until so many of the operations are done, counted from the first."""
        for future in self._taken_before(mark):
            self._wait(future)

    def _taken_before(self, mark: int) -> Iterator[Future]:
        """What is still under way of the first so many operations; to be waited for at once."""
        while self._under_way and self._begun - len(self._under_way) < mark:
            yield self._under_way.popleft()

    def repeat(
        self, recording: Recording, placed: Callable[[RecordedOperation], Operation]
    ) -> Steps:
        """Do what a recorded program did: a process of the simulation instead of a fiber.

        Args:
            recording: the program.
            placed: makes the operation of a step, with the address that it has now.
        """
        results: list[Future] = []
        for step in recording:
            if isinstance(step, int):
                yield from self._taken_before(step)
                continue
            if step is None:
                pending = self._pending()
                if pending:
                    yield all_of(pending)
                continue
            while len(self._under_way) >= self._ahead:
                yield self._under_way.popleft()
            results.append(self._begin(placed(step), [results[number] for number in step.after]))
        pending = self._pending()
        if pending:
            yield all_of(pending)

    def _pending(self) -> list[Future]:
        """What is still under way, which need not be remembered from now on."""
        pending = [future for future in (*self._under_way, *self._aside) if not future.is_done]
        self._under_way.clear()
        self._aside.clear()
        return pending

    def _begin(self, operation: Operation, after: list[Future]) -> Future:
        before = [future for future in after if not future.is_done]
        name = f"{operation.name} on {self.pe.name}"
        work = self._simulator.process(self._carry_out(operation, before), name)
        self._keep(work)
        if operation.kind in {"store", "atomic"}:
            self._stores = [future for future in self._stores if not future.is_done]
            self._stores.append(work)
        elif operation.kind == "load":
            self._loads = [future for future in self._loads if not future.is_done]
            self._loads.append(work)
        return work

    def _wait_for_operands(self, before: list[Future], *, counts: bool) -> Steps:
        """Wait for what an operation reads, and count for how long if it was to be loaded."""
        counts = counts and any(future in self._loads for future in before)
        since = self._simulator.now
        yield all_of(before)
        if counts:
            self.dma_waited += self._simulator.now - since

    def _after(self, before: list[Future], steps: Steps) -> Steps:
        pending = [future for future in before if not future.is_done]
        if pending:
            yield from self._wait_for_operands(pending, counts=True)
        yield from steps

    def finish(self) -> None:
        """Wait until everything is done; the program has come to its end."""
        since = self._simulator.now
        self.settle()
        self.dma_waited += self._simulator.now - since

    def _carry_out(self, operation: Operation, before: list[Future]) -> Steps:
        if before:
            yield from self._wait_for_operands(before, counts=operation.kind == "math")
        start = self._simulator.now
        dtype = SHORT_NAMES[operation.dtype]
        match operation.kind:
            case "load" | "store" | "atomic" as kind:
                assert operation.footprint is not None, "it touches what it moves"
                for is_load in (True, False) if kind == "atomic" else (kind == "load",):
                    yield self._start_dma(operation.address, operation.footprint, is_load=is_load)
            case "dot":
                assert operation.shape is not None, "a dot has sizes"
                yield self.pe.gemm_engine.request(*operation.shape, dtype)
            case _:
                yield self.pe.math_engine.request(operation.elements, operation.name, dtype)
        self._log(operation, self.pe.name, start, self._simulator.now)


def _flattened(tokens: tuple[Any, ...]) -> list[Future]:
    return [token for token in leaves(tokens) if isinstance(token, Future)]
