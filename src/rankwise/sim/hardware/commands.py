"""What an engine can be asked to do, and the handles by which it is waited for.

Commands of one stream of one SIP are carried out in order; streams overlap. `after` adds handles
that have to be complete first, of any stream.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    from rankwise.sim.hardware.environment import KernelEnvironment
    from rankwise.sim.kernel import Future


class KernelExecutor(Protocol):
    """What carries out a kernel: one greenlet per program, on the PEs of the environment."""

    def run(
        self,
        env: "KernelEnvironment",
        kernel_fn: Callable[..., Any],
        kernel_args: Sequence[Any],
        num_programs: int,
    ) -> Generator[Any, Any, Any]:
        """Run all programs; yields delays and futures of `env.simulator`, returns when all end."""
        ...


class _Command(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What all commands have: the SIP, the stream, and what must come before."""

    sip: int
    stream: int = 0
    after: tuple["CommandHandle", ...] = ()
    name: str = ""


class MmuMap(_Command, frozen=True, kw_only=True, eq=False):
    """Let virtual addresses lie in a cube's HBM, at the channel next to PE `pe`; they read zero.

    With `places`, consecutive stretches lie in several: bytes, cube and PE of each; they add up to
    `size`. With `interleave`, they take turns instead, so many bytes each, and the bytes of a place
    are what it has in all.
    """

    address: int
    size: int
    cube: int = 0
    pe: int = 0
    places: tuple[tuple[int, int, int], ...] = ()
    interleave: int = 0


class MmuUnmap(_Command, frozen=True, kw_only=True, eq=False):
    """Give up the mapping that starts at an address."""

    address: int


class MemoryWrite(_Command, frozen=True, kw_only=True, eq=False):
    """Copy bytes from the host. Without data only time passes; `size` then says how much."""

    address: int
    data: Any = None
    size: int | None = None


class MemoryRead(_Command, frozen=True, kw_only=True, eq=False):
    """Copy bytes to the host; they are the handle's value, as an array of uint8."""

    address: int
    size: int


class Copy(_Command, frozen=True, kw_only=True, eq=False):
    """Copy bytes from an address of this SIP to one of `destination_sip`."""

    address: int
    destination_sip: int
    destination: int
    size: int


class KernelLaunch(_Command, frozen=True, kw_only=True, eq=False):
    """Run a kernel on PEs of the SIP; the handle's value is what the runner returns.

    Attributes:
        kernel_fn: what the runner takes for a kernel: a function, or a launch that is bound.
        pes: indexes of the PEs that programs are dealt to in turn; all of the SIP if None.
    """

    runner: Any
    kernel_fn: Any
    kernel_args: Sequence[Any] = ()
    num_programs: int = 1
    pes: tuple[int, ...] | None = None


class Run(_Command, frozen=True, kw_only=True, eq=False):
    """Run a process of the caller's own in the SIP's stream: `start(env)` makes its generator.

    Attributes:
        is_confined: whether it uses the engines of its own SIP alone; flows may leave it.
    """

    is_confined: bool = False
    start: Callable[["KernelEnvironment"], Generator[Any, Any, Any]]


Command: TypeAlias = MmuMap | MmuUnmap | MemoryWrite | MemoryRead | Copy | KernelLaunch | Run


class CommandHandle:
    """A command that was given to an engine.

    Attributes:
        number: counts the commands of the engine.
        issued_at, started_at, completed_at: instants in picoseconds; None while not yet reached.
        future: happens at its completion, with its value.
    """

    __slots__ = ("command", "completed_at", "future", "issued_at", "number", "started_at")

    def __init__(self, number: int, command: Command, issued_at: int, future: "Future") -> None:
        self.number = number
        self.command = command
        self.issued_at = issued_at
        self.started_at: int | None = None
        self.completed_at: int | None = None
        self.future = future

    @property
    def is_done(self) -> bool:
        """Whether it is complete, be it as a failure."""
        return self.future.is_done

    @property
    def value(self) -> Any:
        """What the command brought; raises what it failed with."""
        return self.future.value

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        kind = type(self.command).__name__
        return f"<Handle {self.number}: {self.command.name or kind} on sip{self.command.sip}>"
