"""What a running kernel function is running for: a group of programs in lockstep.

A kernel function is called once for a whole group of programs. Every value has a leading program
axis, so one numpy operation does the work of all of them. Programs that decide differently, at an
`if` or a loop bound, cannot go on together: the group ends with `GroupSplit`, what it has stored is
taken back, and each part starts again on its own. Programs that wait for one another cannot run in
lockstep at all: the group ends with `MustInterleave`, and every program gets a greenlet.

So that taking back is rare and cheap, a group keeps its stores to itself until it ends or reads
from a buffer that it has written.

Exactly one execution is active in the process at a time; the code that switches greenlets sets it.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from rankwise.base.errors import LocalProtocolError, SimulationError
from rankwise.sim.hardware.footprint import Footprint
from rankwise.sim.triton.dtypes import Array, dtype
from rankwise.sim.triton.poll_limits import TRIES, ObservedWord, state_of
from rankwise.sim.triton.wait_addresses import AwaitedChange, BufferElement, ProgramName

if TYPE_CHECKING:
    from rankwise.sim.triton.access_trace import AccessTrace
    from rankwise.sim.triton.memory import AccessTarget, Buffer, LaunchMemory, PreparedStore
    from rankwise.sim.triton.peers import LaunchPeers
    from rankwise.sim.triton.queues import ProgramQueues
    from rankwise.sim.triton.races import LaunchRaces
    from rankwise.sim.triton.tensor import tensor


class KernelError(SimulationError):
    """An error in a kernel; the message names kernel, line and program."""


class OutOfBounds(KernelError, IndexError):
    """A load or store outside its buffer."""


class KernelTypeError(KernelError, TypeError):
    """An operation was given types or shapes that it is not defined for."""


class KernelValueError(KernelError, ValueError):
    """An operation was given a value that it is not defined for."""


class DeviceAssertion(KernelError, AssertionError):
    """A `device_assert` or `static_assert` of the kernel did not hold."""


class DataRace(KernelError):
    """Two programs of a launch used the same element, unordered, and one of them wrote it."""


class Unsupported(KernelError, NotImplementedError):
    """A name of the language that is not emulated."""


class GroupSplit(BaseException):
    """Programs of the group decided differently.

    Not an `Exception`: kernels must not catch it.

    Attributes:
        parts: positions in the group, one array per way of going on.
    """

    def __init__(self, parts: list[Array]) -> None:
        super().__init__(parts)
        self.parts = parts


class InTurn(GroupSplit):
    """Programs of the group want the same word of memory; the parts go one after the other."""


class MustInterleave(BaseException):
    """The kernel's programs may wait for one another."""


class Operation(msgspec.Struct, frozen=True):
    """One operation of a kernel, as an observer is told of it.

    Sizes are those of one program. `programs` is who did it: in lockstep, several at once.

    Attributes:
        kind: `load`, `store`, `dot`, `math`, `atomic`, `send` or `receive`.
        name: the operation itself: `add`, `exp`, `sum`.
        dtype: the name of the type of what was moved or calculated.
        elements: how many elements the result has (or, for a reduction, its operand).
        size_bytes: bytes loaded or stored; 0 for calculations.
        footprint: which bytes those are; None for calculations.
        shape: `(m, n, k)` of a dot, with the batch multiplied into `m`.
        buffer: the buffer's name for an access to memory.
        space: the memory that the buffer lies in.
        address: the lowest byte that an access to memory touches.
        programs: linear program ids.
        after: tokens of the operations whose results this one reads.
        changes_memory: whether a store or an atomic has left anything different.
    """

    kind: str
    name: str
    dtype: str
    elements: int
    programs: tuple[int, ...]
    size_bytes: int = 0
    footprint: Footprint | None = None
    shape: tuple[int, int, int] | None = None
    buffer: str = ""
    space: str = ""
    address: int = 0
    after: tuple[Any, ...] = ()
    changes_memory: bool = True


class Observer(Protocol):
    """Is told of every operation, in the order in which they are carried out."""

    def operation(self, operation: Operation) -> Any:
        """Take note; what is returned becomes the token of the operation's result."""
        ...

    def settle(self) -> None:
        """Wait until everything noted so far has happened: the programs are about to meet."""
        ...


class Pacing(Protocol):
    """Lets a program run ahead of its operations no further than it wants to."""

    def mark(self) -> int:
        """A name for all operations so far."""
        ...

    def reach(self, mark: int) -> None:
        """Wait until all operations before a mark are done."""
        ...


class Launch:
    """What all executions of one kernel launch share.

    Attributes:
        may_spin_wait: whether its programs may wait in a loop without bound for memory to change.
        tries: how many equal looks in a row count as waiting (`looks`).
        stages: how many turns of a loop may be under way; as many as fit elsewhere if None.
        channels: gives the queues to other processing elements, which are made when a kernel
            first asks for them; None where there are none.
        peers: gives other ranks' memory and signals (`peers.LaunchPeers`), likewise.
        knows_addresses: whether a program has seen a pointer as a number.
        trace: where its access trace is written down, if it is to be compared with another's.
        changes: how often memory has changed, wherever that is noted.
    """

    def __init__(
        self,
        name: str,
        grid: tuple[int, int, int],
        memory: "LaunchMemory",
        *,
        observer: Observer | None = None,
        races: "LaunchRaces | None" = None,
    ) -> None:
        self.name = name
        self.grid = grid
        self.memory = memory
        self.observer = observer
        self.races = races
        self.computes = True
        self.prints: Callable[[str], object] = print
        self.largest_block = 1
        self.channels: Callable[[], ProgramQueues] | None = None
        self.peers: Callable[[], LaunchPeers] | None = None
        self.may_spin_wait = False
        self.tries = TRIES
        self.stages: int | None = None
        self.knows_addresses = False
        self.access_trace: AccessTrace | None = None
        self.changes: Callable[[], int] = lambda: memory.changes

    def saw_block(self, elements: int) -> None:
        """Note how large a block is: how many programs go in lockstep is chosen by the largest."""
        self.largest_block = max(self.largest_block, elements)


class Execution:
    """One call of a kernel function, for the programs `programs` (linear ids, ascending)."""

    def __init__(
        self,
        launch: Launch,
        programs: Array,
        *,
        wait: Callable[[object], None] | None = None,
        name: str | None = None,
    ) -> None:
        self.launch = launch
        self.programs = programs
        self.size = len(programs)
        self.observer = launch.observer
        self.pacing: Pacing | None = None
        self.wait = wait
        self._name = name
        self._program_ids: dict[int, Array] = {}
        self._looks: dict[tuple[Any, ...], ObservedWord] = {}
        self.work = self.reads = 0
        self.deferred: list[PreparedStore] = []
        self._undo: list[Callable[[], None]] = []

    @property
    def interleaves(self) -> bool:
        """Whether this is one program among others that run at the same time."""
        return self.wait is not None

    @property
    def may_wait(self) -> bool:
        """Whether it matters what the programs see when they look at memory again."""
        return self.wait is not None or self.launch.may_spin_wait

    def program_id(self, axis: int) -> Array:
        """The programs' positions in the grid along an axis."""
        found = self._program_ids.get(axis)
        if found is None:
            width, height, _depth = self.launch.grid
            divisor = (1, width, width * height)[axis]
            found = (self.programs // divisor % self.launch.grid[axis]).astype(np.int32)
            self._program_ids[axis] = found
        return found

    def coordinates(self, position: int) -> tuple[int, int, int]:
        """The program id, in three parts, of the program at a position of the group."""
        x, y, z = (int(self.program_id(axis)[position]) for axis in range(3))
        return x, y, z

    def name_of(self, position: int) -> object:
        """What messages call the program at a position of the group, as text when it is wanted."""
        return self._name or ProgramName(int(self.programs[position]), self.launch.grid)

    def store(self, store: "PreparedStore") -> bool:
        """Make a store, now or when it matters; whether it changes anything, as far as is known."""
        if not self.interleaves:
            self.changed_memory()
            self.deferred.append(store)
            return True
        changes = store.changes()
        if changes:
            self.changed_memory()
            store.make()
        return changes

    def changed_memory(self) -> None:
        """Note that the program has changed memory, for those who wait for that."""
        self.work += 1
        self.launch.memory.changes += 1

    def uses(self, target: "AccessTarget", pointer: "tensor", mask: "tensor | None") -> None:
        """Tell those who look at which programs use which memory of an access that begins."""
        launch = self.launch
        if launch.races is not None:
            launch.races.on_access(self, target, pointer, mask)
        if launch.access_trace is not None:
            launch.access_trace.uses(self, target, pointer, mask)

    def before_reading(self, buffer: "Buffer") -> None:
        """See to it that what the group has stored in a buffer is there."""
        self.reads += 1
        if self.deferred and any(store.buffer.region == buffer.region for store in self.deferred):
            self.flush()

    def flush(self) -> None:
        """Make the deferred stores, and remember how to take them back."""
        for store in self.deferred:
            self._undo.append(store.make_and_remember())
        self.deferred.clear()

    def remember(self, undo: Callable[[], None]) -> None:
        """Keep what takes back a change that was made directly."""
        self._undo.append(undo)

    def finish(self) -> None:
        """Make what is left to store; the group's work is final."""
        for store in self.deferred:
            store.make()
        self.deferred.clear()

    def take_back(self) -> None:
        """Undo every store that was made, the latest first, and forget the others."""
        self.deferred.clear()
        while self._undo:
            self._undo.pop()()

    def probe(self, buffer: "Buffer", element: dtype, index: Array, value: Array) -> None:
        """Note that a program looked at memory in a way in which programs wait.

        Seeing the same at the same place again may mean that it waits (`looks`): others go on
        first. A group in lockstep has no others, so it ends if it does wait.
        """
        if self.wait is None and not self.launch.may_spin_wait:
            return
        frames = list(kernel_frames())
        where = frames[0].f_code, frames[0].f_lasti, buffer.address, index.tobytes()
        before = self._looks.get(where)
        look = ObservedWord(
            value.tobytes(), state_of(frames), self.work, self.launch.changes(), self.reads
        ).after(
            before, value.size // self.size, self.launch.tries, counts=self.launch.may_spin_wait
        )
        self._looks[where] = look
        if before is None or before.seen != look.seen:
            return
        is_certain = look.tries >= self.launch.tries
        if self.wait is None:
            if is_certain:
                raise MustInterleave
            return
        word = BufferElement(buffer, element, int(index.reshape(-1)[0]))
        if (
            self.observer is not None
            and word.bits != element.encode(value.reshape(-1)[:1]).tobytes()
        ):
            return  # it has changed while the look at it took its time
        self.wait(AwaitedChange(word, self.launch.memory.setters, is_certain=is_certain))

    def decide(self, values: Array) -> Any:
        """The one value that all programs of the group have; else the group ends here."""
        first = deciding(values)[0]
        if len(values) == 1 or (values == first).all():
            return first
        raise GroupSplit(parts_by(values))

    def note(self, operation: Operation) -> Any:
        """Tell the observer; only called when there is one."""
        assert self.observer is not None
        return self.observer.operation(operation)


def deciding(values: Array) -> Array:
    """Values that what a program does may follow from: its access trace is told of them."""
    execution = ACTIVE.execution
    if execution is not None and execution.launch.access_trace is not None:
        execution.launch.access_trace.decided(values)
    return values


def parts_by(values: Array) -> list[Array]:
    """Positions grouped by their value, in the order in which the values appear first."""
    _unique, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return [np.flatnonzero(inverse == which) for which in np.argsort(first, kind="stable")]


class _Active:
    """The execution that is running."""

    execution: Execution | None = None


ACTIVE = _Active()
KERNEL_CODE: set[CodeType] = set()
"""Code of kernel functions: how a kernel's frames are told from ours."""


def active() -> Execution:
    """The execution that is running; an error outside a kernel."""
    execution = ACTIVE.execution
    if execution is None:
        raise LocalProtocolError(
            "an operation of the kernel language was used outside a kernel",
            hint="call it from a function that is launched with kernel[grid](...)",
        )
    return execution


def kernel_frames() -> Iterable[FrameType]:
    """The frames of kernel code on the stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (there is no other way to the caller)
    while frame is not None:
        if frame.f_code in KERNEL_CODE:
            yield frame
        frame = frame.f_back


def place(line: str = "") -> str:
    """Where in the kernel we are, or where that line is: `kernel "add" (vector.py:12)`."""
    name = ACTIVE.execution.launch.name if ACTIVE.execution is not None else "?"
    line = line or line_of_kernel()
    return f'kernel "{name}" ({line})' if line else f'kernel "{name}"'


def line_of_kernel() -> str:
    """The line of the kernel that is being carried out: `vector.py:12`."""
    for frame in kernel_frames():
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


def program_text(position: int) -> str:
    """The program at a position of the group, in words."""
    return f"program {active().coordinates(position)}"


def tokens_of(operands: Iterable[Any]) -> tuple[Any, ...]:
    """The tokens of the operations that gave these operands, without repetition."""
    tokens: list[Any] = []
    for operand in operands:
        token = getattr(operand, "token", None)
        if token is not None and not any(token is known for known in tokens):
            tokens.append(token)
    return tuple(tokens)


def leaves(tokens: tuple[Any, ...]) -> list[Any]:
    """What tokens consist of: a sum that has grown in a loop has one in another, as often."""
    found: list[Any] = []
    known: set[int] = set()
    left = list(reversed(tokens))
    while left:
        token = left.pop()
        if id(token) in known:
            continue
        known.add(id(token))
        if isinstance(token, tuple):
            left.extend(reversed(token))
        else:
            found.append(token)
    return found


def note_math(name: str, result: Any, operands: Sequence[Any], elements: int | None = None) -> None:
    """Tell the observer of a calculation on blocks.

    Work on single numbers, or on addresses that follow a pattern, is free: an accelerator's scalar
    core and address generators do it on the side.
    """
    execution = active()
    tokens = tokens_of(operands)
    if result.shape == () and elements is None:
        result.token = tokens[0] if len(tokens) == 1 else tokens or None
        return
    result.token = execution.note(
        Operation(
            "math",
            name,
            "int64" if result.dtype.is_ptr() else result.dtype.name,  # addresses are numbers
            result.numel if elements is None else elements,
            tuple(map(int, execution.programs)),
            after=tokens,
        )
    )
