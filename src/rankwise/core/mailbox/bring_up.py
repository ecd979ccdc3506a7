"""A chip's way up and down: the order of steps, when the world is told, what is undone.

Theory of operation
===================

```
IDLE ─Began→ RISING ─last step taken→ UP ─EndRequested→ FALLING → DOWN
               └── a step failed: publish, then undo ───────┘
```

- Steps are taken one after the other, in the order of `steps_of`: the device, the communicator, its
  windows, the buffers in them, the inputs from the host.
- The first failure is published at once, before anything is undone: undoing may take long, and the
  parent shall not wait for it. Success is published once, after the last step.
- What was done is undone in the reverse order, each step even if the one before could not be
  undone. Outputs are stored to the host only on the way down from UP: a chip that never came up
  has none. The reasons of steps that could not be undone are collected.
- A request to end that comes twice changes nothing the second time.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from rankwise.base.errors import LocalProtocolError


class StepKind(StrEnum):
    """What is done on the way up; undone under the same name."""

    SET_DEVICE = "set_device"
    JOIN_COMMUNICATOR = "comm_init"
    ALLOCATE_WINDOWS = "comm_alloc_windows"
    PLACE_BUFFERS = "place_buffers"
    LOAD_INPUT = "load_from_host"
    STORE_OUTPUT = "store_to_host"
    """Nothing on the way up; on the way down, the copy to the host."""


class Step(msgspec.Struct, frozen=True):
    """One step; `name` is the buffer that it is about, if it is about one."""

    kind: StepKind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of {self.name!r}" if self.name else str(self.kind)


def steps_of(
    *, has_communicator: bool, inputs: Sequence[str] = (), outputs: Sequence[str] = ()
) -> tuple[Step, ...]:
    """The steps of a chip, in their order; `inputs` and `outputs` are buffers."""
    steps = [Step(StepKind.SET_DEVICE)]
    if has_communicator:
        steps += [
            Step(StepKind.JOIN_COMMUNICATOR),
            Step(StepKind.ALLOCATE_WINDOWS),
            Step(StepKind.PLACE_BUFFERS),
        ]
        steps += [Step(StepKind.LOAD_INPUT, name) for name in inputs]
        steps += [Step(StepKind.STORE_OUTPUT, name) for name in outputs]
    return tuple(steps)


class Began(msgspec.Struct, frozen=True, tag=True):
    """The chip shall come up by these steps."""

    steps: tuple[Step, ...]


class StepTaken(msgspec.Struct, frozen=True, tag=True):
    """The step that was ordered last is done."""


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """The step that was ordered last could not be done; `reason` is "<Type>: <text>"."""

    reason: str


class EndRequested(msgspec.Struct, frozen=True, tag=True):
    """The chip shall come down."""


Stimulus = Began | StepTaken | StepFailed | EndRequested


class TakeStep(msgspec.Struct, frozen=True, tag=True):
    """Do a step; answer `StepTaken` or `StepFailed`."""

    step: Step


class UndoStep(msgspec.Struct, frozen=True, tag=True):
    """Undo a step that was done; answer `StepTaken` or `StepFailed`."""

    step: Step


class PublishSuccess(msgspec.Struct, frozen=True, tag=True):
    """Tell the parent that the chip is up."""


class PublishError(msgspec.Struct, frozen=True, tag=True):
    """Tell the parent why it is not; do it before anything else."""

    reason: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The chip is down; `problems` are the reasons of what could not be undone."""

    problems: tuple[str, ...]


Effect = TakeStep | UndoStep | PublishSuccess | PublishError | Finish


class Phase(StrEnum):
    """Where on its way a chip is."""

    IDLE = "idle"
    RISING = "rising"
    UP = "up"
    FALLING = "falling"
    DOWN = "down"


class BringUp:
    """One chip's way up and down."""

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self._ahead: list[Step] = []
        self._done: list[Step] = []
        self._current: Step | None = None
        self._was_up = False
        self._problems: list[str] = []

    def handle(self, stimulus: Stimulus) -> list[Effect]:
        """Take in a fact; return what is to be done, in this order."""
        match stimulus:
            case Began(steps=steps):
                return self._on_began(steps)
            case StepTaken():
                return self._on_taken()
            case StepFailed(reason=reason):
                return self._on_failed(reason)
            case EndRequested():
                return self._on_end()

    def _on_began(self, steps: tuple[Step, ...]) -> list[Effect]:
        if self.phase is not Phase.IDLE:
            raise LocalProtocolError(f"this chip is {self.phase} and cannot be brought up again")
        self.phase = Phase.RISING
        self._ahead = list(steps)
        return self._rise()

    def _rise(self) -> list[Effect]:
        if self._ahead:
            self._current = self._ahead.pop(0)
            return [TakeStep(self._current)]
        self._current = None
        self.phase = Phase.UP
        self._was_up = True
        return [PublishSuccess()]

    def _fall(self) -> list[Effect]:
        self.phase = Phase.FALLING
        while self._done:
            step = self._done.pop()
            if step.kind is StepKind.STORE_OUTPUT and not self._was_up:
                continue
            self._current = step
            return [UndoStep(step)]
        self._current = None
        self.phase = Phase.DOWN
        return [Finish(tuple(self._problems))]

    def _on_taken(self) -> list[Effect]:
        step = self._expected("was taken")
        if self.phase is Phase.RISING:
            self._done.append(step)
            return self._rise()
        return self._fall()

    def _on_failed(self, reason: str) -> list[Effect]:
        step = self._expected("failed")
        if self.phase is Phase.RISING:
            return [PublishError(reason), *self._fall()]
        self._problems.append(f"{step}: {reason}")
        return self._fall()

    def _on_end(self) -> list[Effect]:
        match self.phase:
            case Phase.UP:
                return self._fall()
            case Phase.IDLE:
                self.phase = Phase.DOWN
                return [Finish(())]
            case Phase.RISING:
                raise LocalProtocolError("this chip is told to end while it takes a step")
            case Phase.FALLING | Phase.DOWN:
                return []

    def _expected(self, what: str) -> Step:
        if self._current is None:
            raise LocalProtocolError(f"a step {what}, but this chip is {self.phase}")
        return self._current
