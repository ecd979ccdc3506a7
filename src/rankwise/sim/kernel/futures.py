"""Things to wait for: futures, processes, and combinations of them.

A `Future` happens at most once, with a value or with an exception. Its waiters are kept in a list
of *items* in the very form that the agenda takes, so that completing one is one `list.extend`,
however many wait. A `Process` is a generator that the simulator resumes, and at the same time the
future of its end.

A process reads what it was waiting for when it is resumed, not when the future is done. So a
waiting process needs no copy of the value, and cancelling one is to exchange what it waits for.

Waiters are resumed in the order in which they began to wait, one wave of the agenda after the
future was done and at the same instant: `succeed` never runs foreign code.
"""

from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from rankwise.base.errors import LocalProtocolError

try:  # it is for the compiler, and nothing else needs the package
    from mypy_extensions import mypyc_attr
except ImportError:

    def mypyc_attr(**_how: object) -> Callable[[type], type]:  # type: ignore[misc]
        """Leave a class as it is."""
        return lambda kind: kind


if TYPE_CHECKING:
    from rankwise.sim.kernel.simulator import Simulator

Steps: TypeAlias = Generator[Any, Any, Any]
"""What a process runs: it yields delays (int) and futures, and is sent the futures' values."""

AgendaItem: TypeAlias = "Process | tuple[Callable[..., object], tuple[Any, ...]]"

Wave: TypeAlias = "AgendaItem | list[AgendaItem]"
"""What happens at one instant."""


class Future:
    """Something that will happen at most once.

    Yielding it from a process waits for it; the yield has its value, or raises its exception.
    `name` is shown in deadlock reports, through `str`, so it may be an object that says more.
    """

    __slots__ = ("_failure", "_is_done", "_name", "_simulator", "_value", "_waiters")

    def __init__(self, simulator: "Simulator", name: object = "") -> None:
        self._simulator = simulator
        self._name = name
        self._is_done = False
        self._value: Any = None
        self._failure: BaseException | None = None
        self._waiters: list[AgendaItem] = []

    @property
    def name(self) -> object:
        """What deadlock reports call it."""
        return self._name

    @property
    def is_done(self) -> bool:
        """Whether it has happened."""
        return self._is_done

    def succeed(self, value: Any = None) -> None:
        """Let it happen now, and have those who wait go on with `value`."""
        if self._is_done:
            raise LocalProtocolError(f"{self} has already happened")
        self._is_done = True
        self._value = value
        if self._waiters:
            self._simulator._ready.extend(self._waiters)  # noqa: SLF001 (one module in two files)
            self._waiters.clear()

    def fail(self, exception: BaseException) -> None:
        """Let it happen as a failure: the exception is raised in all who wait for it, or will."""
        self._failure = exception
        try:
            self.succeed()
        except LocalProtocolError:
            self._failure = None
            raise

    @property
    def value(self) -> Any:
        """What it brought; raises its exception if it failed, and an error if it is not done."""
        if not self.is_done:
            raise LocalProtocolError(f"{self} has not happened yet")
        if self._failure is not None:
            raise self._failure
        return self._value

    @property
    def failure(self) -> BaseException | None:
        """The exception that it failed with."""
        return self._failure

    def add_callback(self, callback: "Callable[[Future], object]") -> None:
        """Have `callback(future)` called when it happens; soon, if it already has."""
        item = (callback, (self,))
        if self.is_done:
            self._simulator._ready.append(item)  # noqa: SLF001
        else:
            self._waiters.append(item)

    def __str__(self) -> str:
        return str(self.name) or type(self).__name__.lower()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {'done' if self.is_done else 'pending'}>"


@mypyc_attr(free_list_len=1)  # compiled, the memory of the last timer serves for the next
class Timer(Future):
    """A future that happens by itself when its instant comes; `Simulator.timer` makes it.

    It is on no agenda; the processes that wait for it are. Of the fields of a future it has the
    simulator alone: what never changes costs nothing to make. So who may have a timer in his hands
    asks the properties.
    """

    __slots__ = ("due",)

    due: int

    def __init__(self) -> None:
        """Set nothing: who makes it sets the simulator and the instant."""

    @property
    def name(self) -> str:
        """What reports call it."""
        return "timer"

    @property
    def is_done(self) -> bool:
        """Whether its instant has come."""
        return self.due <= self._simulator.now

    @property
    def value(self) -> None:
        """Nothing; an error if its instant has not come."""
        if not self.is_done:
            raise LocalProtocolError(f"{self} has not happened yet")

    @property
    def failure(self) -> None:
        """Nothing: it never fails."""
        return

    def succeed(self, _value: Any = None) -> None:
        """Refuse: it happens by itself."""
        raise LocalProtocolError("a timer happens by itself", hint="make a future, and end it")

    def fail(self, exception: BaseException) -> None:
        """Refuse: it happens by itself."""
        self.succeed(exception)

    def add_callback(self, callback: "Callable[[Future], object]") -> None:
        """Have `callback(future)` called when it happens; soon, if it already has."""
        self._simulator.call_at(max(self.due, self._simulator.now), callback, self)


if __file__.endswith(".py"):  # with a constructor in Python, waiting for a timer takes a tenth more
    Timer.__init__ = object.__init__  # type: ignore[method-assign]


class Process(Future):
    """A generator that runs in simulated time, and the future of its end.

    Its value is what the generator returns. An exception that leaves the generator is raised in
    those who wait for the process; if none does, it leaves `Simulator.run`.
    """

    __slots__ = ("_generator", "_locate", "_send", "_since", "_waits_for")

    def __init__(
        self,
        simulator: "Simulator",
        generator: Steps,
        name: object = "",
        *,
        locate: Callable[[], str] | None = None,
    ) -> None:
        super().__init__(simulator, name)
        self._generator = generator
        self._send = generator.send
        self._waits_for: Future | None = None
        self._since = simulator.now
        self._locate = locate

    @property
    def waits_for(self) -> Future | None:
        """The future that it waits for; None while it is running or only letting time pass."""
        return None if self._is_done else self._waits_for

    def cancel(self, exception: BaseException) -> None:
        """Raise `exception` where the process waits, at this instant. Nothing if it has ended."""
        if self._is_done:
            return
        waited_for = self._waits_for
        refusal = Future(self._simulator, "cancellation")
        refusal._is_done, refusal._failure = True, exception  # noqa: SLF001
        self._waits_for = refusal
        if waited_for is not None and not waited_for.is_done:
            waited_for._waiters.remove(self)  # noqa: SLF001
            self._simulator._ready.append(self)  # noqa: SLF001
        elif waited_for is None:
            self._simulator._hasten(self)  # noqa: SLF001


class AllOf(Future):
    """Happens when all of its parts have, or with the first failure among them."""

    __slots__ = ("_missing", "_parts")

    def __init__(self, simulator: "Simulator", parts: list[Future]) -> None:
        super().__init__(simulator)
        self._parts = parts
        self._missing = 0
        for part in parts:
            if not part.is_done:
                self._missing += 1
                part.add_callback(self._on_part)
            elif part.failure is not None and not self.is_done:
                self.fail(part.failure)
        if not self._missing and not self.is_done:
            self.succeed([part.value for part in parts])

    def _on_part(self, part: Future) -> None:
        self._missing -= 1
        if self.is_done:
            return
        if part.failure is not None:
            self.fail(part.failure)
        elif not self._missing:
            self.succeed([each.value for each in self._parts])

    def __str__(self) -> str:
        pending = [str(part) for part in self._parts if not part.is_done]
        shown = ", ".join(pending[:3]) + (", ..." if len(pending) > 3 else "")
        return f"{len(pending)} of {len(self._parts)}: {shown}"


class EndOfMany(Future):
    """The end of several things that need not have begun; deadlock reports tell it last."""

    __slots__ = ()


def all_of(futures: Iterable[Future]) -> Future:
    """Happen when all of `futures` have, with the list of their values, in the given order.

    The first failure among them is its failure; the others run on.
    """
    parts = list(futures)
    if not parts:
        raise LocalProtocolError("all_of needs at least one future; skip the wait instead")
    return AllOf(parts[0]._simulator, parts)  # noqa: SLF001
