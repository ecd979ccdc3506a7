"""A launch among ranks: peers' memory, signals, and what a program waits for.

A *signal* is a word of symmetric memory. It is set in simulated time: when all stores that its
program made before are in memory, and its own bytes have gone their way. The program goes on
meanwhile. A waiting program looks at the word again whenever memory has changed.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankwise.base.errors import LocalProtocolError
from rankwise.sim.hardware.environment import KernelEnvironment
from rankwise.sim.hardware.footprint import Footprint
from rankwise.sim.kernel import Future, where_of
from rankwise.sim.triton.dtypes import dtype, uint8
from rankwise.sim.triton.execution import (
    Execution,
    KernelValueError,
    Operation,
    kernel_frames,
    line_of_kernel,
    place,
)
from rankwise.sim.triton.memory import Buffer
from rankwise.sim.triton.timing import ProgramClock
from rankwise.sim.triton.wait_addresses import BufferElement, LastWriters

if TYPE_CHECKING:
    from rankwise.sim.triton.races import LaunchRaces


class LaunchRank(NamedTuple):
    """Where a launch runs: its rank, among so many."""

    rank: int
    size: int


class Condition(NamedTuple):
    """What a word has to be: `== 1`."""

    name: str
    holds: Callable[[Any, Any], Any]
    value: int

    def __str__(self) -> str:
        return f"{self.name} {self.value}"


class SignalAwaited(NamedTuple):
    """That a signal has the value that a program waits for."""

    word: BufferElement
    setters: LastWriters
    condition: Condition
    rank: int

    def __str__(self) -> str:
        word = self.word
        name = f"{word.buffer.name}[{word.position}] of rank {self.rank} at {word.address:#x}"
        setter = self.setters.of(word) or ", and no program has set it"
        return f"signal {name} to be {self.condition}: it holds {word.value}{setter}"


class LaunchPeers:
    """The peers of one launch.

    Attributes:
        rank: the rank whose launch it is; 0 outside of ranks.
        size: how many ranks there are.
    """

    def __init__(
        self,
        env: KernelEnvironment,
        own: LaunchRank,
        setters: LastWriters,
        take: Callable[[Buffer], Buffer],
    ) -> None:
        self.rank, self.size = own
        self._env = env
        self._setters = setters
        self._take = take
        self._twins: dict[tuple[int, int, dtype, int], Buffer] = {}

    def twin(self, buffer: Buffer, rank: int) -> Buffer:
        """The buffer at a rank that corresponds to one here."""
        key = (buffer.address, buffer.size_bytes, buffer.dtype, rank)
        found = self._twins.get(key)
        if found is None:
            try:
                address = self._env.engine.peers.twin(buffer.address, rank)
            except LocalProtocolError as error:
                raise KernelValueError(
                    f'{place()}: "{buffer.name}" at rank {rank}: {error}'
                ) from None
            found = buffer
            if address != buffer.address:
                # The twin of a twin is named once: this decides no more than how messages call it.
                name = buffer.name.partition(" of rank ")[0]
                found = self._take(
                    self.buffer(f"{name} of rank {rank}", address, buffer.dtype, buffer.size_bytes)
                )
            self._twins[key] = found
        return found

    def buffer(self, name: str, address: int, type_: dtype, size: int) -> Buffer:
        """Bytes of a device's memory as a buffer."""
        mapping = self._env.mapping_at(address)
        if not mapping.has_data:
            return Buffer(name, np.zeros(size // type_.itemsize, type_.storage), type_, address)
        start = address - mapping.start
        return Buffer(name, mapping.data[start : start + size], type_, address)

    def behind(self, address: int) -> Buffer | None:
        """The symmetric memory that a bare address lies in; None if it is in none."""
        found = self._env.engine.peers.around(address)
        if found is None:
            return None
        shared, rank = found
        name = f"{shared.name} of rank {rank}"
        return self._take(self.buffer(name, shared.bases[rank], uint8, shared.size))

    def signal(
        self,
        execution: Execution,
        word: BufferElement,
        change: Callable[[Any, Any], Any],
        value: int,
    ) -> None:
        """Begin to set a word; the program goes on."""
        clock = execution.observer
        assert isinstance(clock, ProgramClock), "a launch with peers runs in simulated time"
        line, who = line_of_kernel(), execution.name_of(0)
        races: LaunchRaces | None = execution.launch.races
        known = None if races is None else races.snapshot(execution)

        def take_effect() -> None:
            flat = word.buffer.elements(word.element)
            here = slice(word.position, word.position + 1)
            before = word.element.decode(flat[here])
            flat[here] = word.element.encode(change(before, np.array([value], before.dtype)))
            if races is not None and known is not None:
                races.publish(word, known)
            self._setters.note(word.address, word.value, who, line)
            self._env.engine.watchpoints.changed(word.address, word.element.itemsize)

        where = where_of(kernel_frames())
        clock.release(_access("store", word, execution), take_effect, lambda: where)

    def wait(
        self, execution: Execution, words: Sequence[BufferElement], condition: Condition
    ) -> None:
        """Leave the program until consecutive words are as they should be, and load them."""
        clock = execution.observer
        assert isinstance(clock, ProgramClock), "a launch with peers runs in simulated time"
        assert execution.wait is not None, "its programs run one by one"
        if not words:
            return
        for word in words:
            awaited = SignalAwaited(word, self._setters, condition, self.rank)
            while not condition.holds(word.value, condition.value):
                execution.wait(awaited)
        clock.complete(_access("load", words[0], execution, len(words)))
        races: LaunchRaces | None = execution.launch.races
        if races is not None:
            for word in words:
                races.acquire(execution, word)

    def copy(
        self,
        execution: Execution,
        source: BufferElement,
        target: BufferElement,
        size: int,
        *,
        waits: bool,
        reads_later: bool,
    ) -> None:
        """Move bytes from memory to memory by the DMA engine of the program's PE.

        Args:
            execution: the program.
            source: where the bytes lie.
            target: where they come to lie.
            size: how many they are.
            waits: whether the program goes on only when they have come.
            reads_later: whether the source must stay as it is until they have.
        """
        clock = execution.observer
        assert isinstance(clock, ProgramClock), "a launch with peers runs in simulated time"
        if not size:
            return
        env, pe = self._env, clock.pe
        begin, end = source.address, target.address

        def start() -> Future:
            return env.start_copy(pe, begin, end, size)

        races: LaunchRaces | None = execution.launch.races
        if races is not None:
            if not waits:
                races.copy_begins(execution)
            races.touch(execution, source, size, is_store=False, by_copy=reads_later)
            races.touch(execution, target, size, is_store=True, by_copy=not waits)
        target.buffer.bytes_at(end, size)[:] = source.buffer.bytes_at(begin, size)
        execution.changed_memory()
        operation = Operation(
            "copy", "get" if waits or reads_later else "put", target.element.name,
            size // target.element.itemsize, (int(execution.programs[0]),), size_bytes=size,
            buffer=target.buffer.name, space=target.buffer.space, address=end,
        )  # fmt: skip
        token = clock.copy(operation, start)
        if waits:
            clock.wait_for(token)


def _access(kind: str, word: BufferElement, execution: Execution, count: int = 1) -> Operation:
    """A store or load of a word, or of several from it on."""
    size = count * word.element.itemsize
    return Operation(
        kind,
        "signal" if kind == "store" else "wait",
        word.element.name,
        count,
        (int(execution.programs[0]),),
        size_bytes=size,
        footprint=Footprint(size, np.zeros(1, np.int64)),
        buffer=word.buffer.name,
        space=word.buffer.space,
        address=word.address,
    )
