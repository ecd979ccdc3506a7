"""What the programs of a launch do, written down once and repeated as often as it is launched.

Where only time is simulated, the results of a program are never read: its operations follow from
its arguments alone. So they are recorded, program by program and outside of simulated time, and a
launch with equal arguments (the same kernel on the next rank, most of the time) repeats the
recording with its own addresses. Its effect in simulated time is the same, to the picosecond.

That holds for programs that do not look at each other, or at the time. A launch is not recorded
that uses atomics, volatile loads or messages between PEs, follows pointers that it finds in memory,
prints, turns pointers into numbers, reads integers where it also stores some, or does not seem to
end: its programs run as they are. A recording is kept under everything that a kernel can know: its
code, its arguments, and the globals that it mentions; a kernel that mentions a global which could
change unseen is recorded anew each time.
"""

from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from rankwise.sim.triton.constants import constexpr, plain
from rankwise.sim.triton.dtypes import dtype, dtype_named
from rankwise.sim.triton.execution import (
    ACTIVE,
    Execution,
    Launch,
    MustInterleave,
    Operation,
    leaves,
)
from rankwise.sim.triton.jit import JITFunction
from rankwise.sim.triton.memory import Buffer

_LONGEST = 10_000
"""Operations of one program; a longer one may have no end."""
_KEPT = 16
_OWN = "rankwise.sim.triton"


class RecordedOperation(NamedTuple):
    """An operation of a program.

    Attributes:
        operation: what it does; its address is that of the recorded launch.
        after: the steps whose results it reads, counted without pauses.
        parameter: the kernel's parameter whose memory it touches; empty if it touches none.
        offset: where in that memory, in bytes.
    """

    operation: Operation
    after: tuple[int, ...]
    parameter: str
    offset: int


Recording: TypeAlias = tuple[RecordedOperation | int | None, ...]
"""One program, step by step; None is a pause until all that came before has happened, a number one
until the first so many steps have."""


class _DependsOnOthers(BaseException):
    """The programs cannot be recorded one by one. Not an `Exception`: kernels must not catch it."""


class _Recorder:
    """The observer of a program that is being recorded; tokens are numbers of steps."""

    def __init__(self, parameters: Mapping[str, tuple[str, int]]) -> None:
        self._parameters = parameters
        self.steps: list[RecordedOperation | int | None] = []
        self.loaded: set[str] = set()
        self.stored: set[str] = set()
        self._count = 0

    def operation(self, operation: Operation) -> int | None:
        """Write a step down."""
        if operation.kind not in {"load", "store", "dot", "math"} or self._count >= _LONGEST:
            raise _DependsOnOthers
        parameter, offset = "", 0
        if operation.kind in {"load", "store"}:
            if not operation.size_bytes:
                return None
            if operation.buffer not in self._parameters:
                raise _DependsOnOthers
            parameter, start = self._parameters[operation.buffer]
            offset = operation.address - start
            if not dtype_named(operation.dtype).is_floating():
                (self.loaded if operation.kind == "load" else self.stored).add(parameter)
        after = tuple(dict.fromkeys(leaves(operation.after)))
        self.steps.append(RecordedOperation(operation, after, parameter, offset))
        self._count += 1
        return self._count - 1

    def settle(self) -> None:
        """Write a pause down."""
        if self.steps and self.steps[-1] is not None:
            self.steps.append(None)

    def mark(self) -> int:
        """How many steps there are."""
        return self._count

    def reach(self, mark: int) -> None:
        """Write a pause down until the first so many steps have happened."""
        self.steps.append(mark)


def recorded(
    launch: Launch,
    body: Callable[[], Any],
    numbers: Iterable[int],
    buffers: Mapping[str, Buffer],
) -> tuple[Recording, ...] | None:
    """Run the programs of a launch that computes nothing; None if they cannot be recorded.

    Args:
        launch: what it runs for; not to be used again.
        body: the kernel with its arguments.
        numbers: the programs that are recorded.
        buffers: the memory behind the kernel's parameters.
    """
    launch.channels = _refuse_messages
    launch.prints = _refuse_to_print
    launch.memory.elsewhere = _refuse_address
    parameters = {each.name: (name, each.address) for name, each in buffers.items()}
    recordings: list[Recording] = []
    loaded: set[str] = set()
    stored: set[str] = set()
    outer = ACTIVE.execution
    try:
        for number in numbers:
            recorder = _Recorder(parameters)
            ACTIVE.execution = execution = Execution(launch, np.array([number], np.int64))
            execution.observer = execution.pacing = recorder
            with np.errstate(all="ignore"):
                body()
            recordings.append(tuple(recorder.steps))
            loaded |= recorder.loaded
            stored |= recorder.stored
    except (MustInterleave, _DependsOnOthers):
        return None
    finally:
        ACTIVE.execution = outer
    return None if launch.knows_addresses or loaded & stored else tuple(recordings)


def _refuse_messages() -> NoReturn:
    """A program asks for the queues between PEs: messages depend on others."""
    raise _DependsOnOthers


def _refuse_to_print(_text: str) -> NoReturn:
    raise _DependsOnOthers


def _refuse_address(_address: int) -> NoReturn:
    """A pointer was found in memory: where it goes is no argument's."""
    raise _DependsOnOthers


class Recordings:
    """The recordings of a machine's launches, the latest ones."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Recording, ...] | None] = {}

    def find(
        self, key: Any, record: Callable[[], tuple[Recording, ...] | None]
    ) -> tuple[Recording, ...] | None:
        """The recording under a key, made if there is none; a key of None is never kept."""
        if key is None:
            return record()
        if key not in self._kept:
            found = record()
            if len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = found
        return self._kept[key]


class _Unknowable(Exception):
    """Something that a kernel knows may change without our seeing it."""


def key_of(
    function: JITFunction,
    given: Mapping[str, Any],
    grid: tuple[int, int, int],
    stages: int | None,
) -> Any:
    """All that decides what the programs of a launch do; None if that cannot be told."""
    try:
        arguments = tuple((name, _argument(value)) for name, value in given.items())
        return _known_to(function.fn, set()), arguments, grid, stages
    except _Unknowable:
        return None


def _argument(value: Any) -> Any:
    if isinstance(value, Buffer):
        return Buffer, value.dtype.name, value.flat.size, value.first
    return _value(value, set())


def _known_to(function: Callable[..., Any], seen: set[CodeType]) -> Any:
    """A function's code, and the values of what it mentions."""
    if not isinstance(function, FunctionType):
        raise _Unknowable
    code = function.__code__
    if code in seen:
        return code
    seen.add(code)
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    mentioned = [(name, cell.cell_contents) for name, cell in cells]
    mentioned += [
        (name, function.__globals__[name])
        for name in _names_in(code)
        if name in function.__globals__
    ]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return (
        code,
        tuple(_value(default, seen) for default in defaults),
        tuple((name, _value(value, seen)) for name, value in mentioned),
    )


def _names_in(code: CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _names_in(constant)
    return names


def _value(value: Any, seen: set[CodeType]) -> Any:
    if isinstance(value, constexpr):
        value = plain(value)
    if value is None or isinstance(value, bool | int | float | str | np.number | np.bool_):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(_value(each, seen) for each in value)
    if isinstance(value, dtype):
        return dtype, str(value)
    if isinstance(value, ModuleType | type | BuiltinFunctionType):
        return value.__name__
    if isinstance(value, JITFunction):
        return _known_to(value.fn, seen)
    if isinstance(value, FunctionType):
        is_own = (value.__module__ or "").startswith(_OWN)
        return value.__qualname__ if is_own else _known_to(value, seen)
    raise _Unknowable
