"""Every order in which programs over shared words can run: a small model checker.

A protocol over shared memory is only as good as its worst interleaving, which no test with real
processes will meet. So its *own code* runs here, on words that hand over to a scheduler before each
access: `Words` in place of a memoryview, `ModelledWord` in place of a futex, each program in a
greenlet. `explore` drives them through every schedule, depth first, by running the programs anew
for each.

Two schedules that lead to the same state are followed once. The state is the shared words, who
sleeps, and for each program what it has been answered so far, which decides all that it will do.

It finds: a state in which programs are left and all of them sleep (a lost wake-up, or a wait that
never ends), an exception that escapes a program, and what `check` says about an end. All come with
the schedule that leads there. A sleep never times out here: a program that relies on a time-out is
found asleep.

Memory is sequentially consistent here; real machines are not, and their fences are argued for in
the text of the modules.
"""

from collections.abc import Callable, Sequence
from typing import Any

import greenlet

_DISTINCT_MAX = 2_000_000


class InterleavingError(AssertionError):
    """A schedule after which something is wrong."""


class Interleaving:
    """The shared memory of one run, and the greenlets of its programs."""

    def __init__(self) -> None:
        self.memory: list[int] = []
        self.done: dict[int, Any] = {}
        self._scheduler = greenlet.getcurrent()
        self._fibers: list[greenlet.greenlet] = []
        self._index: dict[greenlet.greenlet, int] = {}
        self.asleep: dict[int, int] = {}
        self.dead: set[int] = set()
        self.answers: list[list[object]] = []
        self.story: list[str] = []
        self._quiet: set[int] = set()

    def words(self, count: int, quiet: Sequence[int] = ()) -> "Words":
        """New words, all zero.

        `quiet` are indexes of words before whose accesses no other program needs to run, because
        the order does not matter: it saves many states.
        """
        start = len(self.memory)
        self.memory.extend([0] * count)
        self._quiet.update(start + index for index in quiet)
        return Words(self, start, start + count)

    def word(self) -> "ModelledWord":
        """A new word to sleep on."""
        return ModelledWord(self, self.words(1).start)

    def begin(self, programs: Sequence[Callable[[], object]]) -> None:
        """Let every program run up to its first access."""
        for index, program in enumerate(programs):
            fiber = greenlet.greenlet(lambda i=index, run=program: self._finish(i, run()))
            self._fibers.append(fiber)
            self._index[fiber] = index
            self.answers.append([])
        for index in range(len(programs)):
            self._fibers[index].switch()

    def _finish(self, index: int, value: object) -> None:
        self.done[index] = value

    @property
    def ready(self) -> list[int]:
        """The programs that can take a step."""
        return [
            index
            for index in range(len(self._fibers))
            if index not in self.done and index not in self.asleep and index not in self.dead
        ]

    def step(self, index: int) -> None:
        """Let a program make the access before which it stands, and run up to its next."""
        self._fibers[index].switch()

    def access(self, what: str, do: Callable[[], Any], place: int | None = None) -> Any:
        """One access by the running program; other programs may run before it."""
        fiber = greenlet.getcurrent()
        index = self._index.get(fiber)
        if index is None:  # the code that sets the world up, or checks its end
            return do()
        if place not in self._quiet:
            self._scheduler.switch()
        answer = do()
        self.answers[index].append(answer)
        self.story.append(f"{index}: {what} -> {answer}")
        return answer

    def sleep_on(self, word: int, seen: int) -> None:
        """Fall asleep if the word still is as seen; one access, as the kernel makes it."""
        index = self._index[greenlet.getcurrent()]

        def fall_asleep() -> str:
            if self.memory[word] != seen:
                return "awake"
            self.asleep[index] = word
            return "asleep"

        if self.access(f"sleep on {word} while {seen}", fall_asleep) == "asleep":
            self._scheduler.switch()

    def wake_all(self, word: int) -> None:
        """Wake the programs that sleep on a word; part of an access."""
        for index in [index for index, bed in self.asleep.items() if bed == word]:
            del self.asleep[index]

    def kill(self, index: int) -> None:
        """End a program where it stands, unless it has ended; one access."""

        def die() -> bool:
            if index in self.done:
                return False
            self.dead.add(index)
            self.asleep.pop(index, None)
            return True

        self.access(f"kill {index}", die)

    def state(self) -> object:
        """All that decides what can still happen."""
        return (
            tuple(self.memory),
            tuple(sorted(self.asleep.items())),
            tuple(sorted(self.dead)),
            tuple(map(tuple, self.answers)),
        )

    def close(self) -> None:
        """Unwind the programs that have not ended."""
        for fiber in self._fibers:
            if not fiber.dead:
                fiber.throw(greenlet.GreenletExit)


class Words:
    """Words that are loaded and stored whole, like a memoryview cast to "Q"."""

    def __init__(self, world: Interleaving, start: int, stop: int) -> None:
        self._world = world
        self.start = start
        self._stop = stop

    def __getitem__(self, key: Any) -> Any:
        memory = self._world.memory
        if isinstance(key, slice):
            start, stop, _ = key.indices(self._stop - self.start)
            return Words(self._world, self.start + start, self.start + stop)
        place = self.start + key
        return self._world.access(f"load {place}", lambda: memory[place], place)

    def __setitem__(self, key: int, value: int) -> None:
        memory, place = self._world.memory, self.start + key
        self._world.access(
            f"store {value} at {place}", lambda: memory.__setitem__(place, value), place
        )

    def tolist(self) -> list[int]:
        """Load each, one access at a time."""
        return [self[index] for index in range(self._stop - self.start)]

    def release(self) -> None:
        """As a memoryview has it."""


class ModelledWord:
    """A futex word: what `rankwise.drivers.real.futex.FutexWord` offers."""

    RING_BIT = 20

    def __init__(self, world: Interleaving, place: int) -> None:
        self._world = world
        self._place = place

    @staticmethod
    def now() -> int:
        """Time does not change."""
        return 0

    @staticmethod
    def deadline_after(patience: int) -> int:
        """When a sleep would end."""
        return patience

    def look(self) -> int:
        """Load it."""
        value: int = self._world.access(
            f"look at {self._place}", lambda: self._world.memory[self._place]
        )
        return value

    def fence(self) -> None:
        """Nothing: this memory is sequentially consistent."""

    def add(self) -> None:
        """Count it up."""
        self._world.access(f"add to {self._place}", lambda: self._add(1))

    def add_and_wake(self) -> None:
        """Count it up and wake its sleepers, in one access."""
        self._world.access(f"add to {self._place}, wake", lambda: self._add(1, wake=True))

    def ring(self) -> None:
        """Change the bits above the count and wake its sleepers, in one access."""
        self._world.access(f"ring {self._place}", lambda: self._add(1 << self.RING_BIT, wake=True))

    def wake(self) -> None:
        """Wake its sleepers."""
        self._world.access(f"wake {self._place}", lambda: self._world.wake_all(self._place))

    def sleep(self, seen: int, deadline: int) -> None:
        """Sleep while it is as seen; the deadline never comes."""
        del deadline
        self._world.sleep_on(self._place, seen)

    def release(self) -> None:
        """As a futex word has it."""

    def _add(self, amount: int, *, wake: bool = False) -> None:
        memory = self._world.memory
        memory[self._place] = (memory[self._place] + amount) % (1 << 32)
        if wake:
            self._world.wake_all(self._place)


Setup = Callable[[Interleaving], Sequence[Callable[[], object]]]


def explore(
    setup: Setup,
    check: Callable[[Interleaving], None] | None = None,
    *,
    states_max: int = _DISTINCT_MAX,
) -> int:
    """Run the programs that `setup` makes in every order; how many states there were.

    `setup` makes the words in the world that it is given, and the programs. `check` raises
    AssertionError if a world in which no program is left to run is wrong; `world.done` has what
    each program returned, by its index.

    Raises:
        InterleavingError: a program sleeps for ever or raised, `check` failed, or there are more
            than `states_max` states. It cites the schedule.
    """
    seen: set[object] = set()
    pending: list[tuple[int, ...]] = [()]
    while pending:
        schedule = pending.pop()
        world = Interleaving()
        try:
            world.begin(setup(world))
            for index in schedule:
                world.step(index)
            pending += _follow(world, schedule, seen, check)
        except Exception as error:
            raise InterleavingError(
                "\n  ".join([f"{type(error).__name__}: {error}, after", *world.story])
            ) from error
        finally:
            world.close()
        if len(seen) > states_max:
            raise InterleavingError(f"more than {states_max} states")
    return len(seen)


def _follow(
    world: Interleaving,
    schedule: tuple[int, ...],
    seen: set[object],
    check: Callable[[Interleaving], None] | None,
) -> list[tuple[int, ...]]:
    """Go on with one program at a time until nothing is new; the schedules left for later."""
    others: list[tuple[int, ...]] = []
    while (state := world.state()) not in seen:
        seen.add(state)
        ready = world.ready
        if not ready:
            _check_end(world, check)
            break
        others += [(*schedule, index) for index in ready[1:]]
        world.step(ready[0])
        schedule = (*schedule, ready[0])
    return others


def _check_end(world: Interleaving, check: Callable[[Interleaving], None] | None) -> None:
    if world.asleep:
        sleepers = ", ".join(f"{index} on {word}" for index, word in sorted(world.asleep.items()))
        raise AssertionError(f"no program is left to wake {sleepers}")
    if check is not None:
        check(world)
