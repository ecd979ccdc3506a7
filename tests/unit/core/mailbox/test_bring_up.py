import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import LocalProtocolError
from rankwise.core.mailbox.bring_up import (
    Began,
    BringUp,
    Effect,
    EndRequested,
    Finish,
    Phase,
    PublishError,
    PublishSuccess,
    Step,
    StepFailed,
    StepKind,
    StepTaken,
    Stimulus,
    TakeStep,
    UndoStep,
    steps_of,
)

STEPS = steps_of(has_communicator=True, inputs=["x", "y"], outputs=["z"])


def run(
    machine: BringUp, stimulus: Stimulus, failing: frozenset[Step] = frozenset()
) -> list[Effect]:
    """Everything that is ordered, where only these steps fail, on the way up and down."""
    ordered: list[Effect] = []
    pending = machine.handle(stimulus)
    while pending:
        effect = pending.pop(0)
        ordered.append(effect)
        match effect:
            case TakeStep(step=step) | UndoStep(step=step):
                failed = step in failing
                answer = StepFailed(f"ValueError: no {step}") if failed else StepTaken()
                pending += machine.handle(answer)
            case _:
                pass
    return ordered


def test_steps_have_the_order_in_which_each_needs_the_one_before() -> None:
    assert [str(step) for step in STEPS] == [
        "set_device",
        "comm_init",
        "comm_alloc_windows",
        "place_buffers",
        "load_from_host of 'x'",
        "load_from_host of 'y'",
        "store_to_host of 'z'",
    ]
    assert steps_of(has_communicator=False) == (Step(StepKind.SET_DEVICE),)


def test_a_chip_is_published_once_after_its_last_step() -> None:
    machine = BringUp()

    ordered = run(machine, Began(STEPS))

    assert ordered == [*map(TakeStep, STEPS), PublishSuccess()]
    assert machine.phase is Phase.UP


def test_a_chip_comes_down_in_the_reverse_order_and_stores_its_outputs_first() -> None:
    machine = BringUp()
    run(machine, Began(STEPS))

    ordered = run(machine, EndRequested())

    assert ordered == [*map(UndoStep, reversed(STEPS)), Finish(())]
    assert machine.phase is Phase.DOWN
    assert machine.handle(EndRequested()) == []


@pytest.mark.parametrize("place", range(len(STEPS)))
def test_the_first_failure_is_published_before_what_was_done_is_undone(place: int) -> None:
    machine = BringUp()
    broken = STEPS[place]

    ordered = run(machine, Began(STEPS), frozenset({broken}))

    undone = [step for step in reversed(STEPS[:place]) if step.kind is not StepKind.STORE_OUTPUT]
    assert ordered == [
        *map(TakeStep, STEPS[: place + 1]),
        PublishError(f"ValueError: no {broken}"),
        *map(UndoStep, undone),
        Finish(()),
    ]


@given(st.sets(st.sampled_from(STEPS)))
def test_a_step_that_cannot_be_undone_keeps_no_other_from_being_undone(failing: set[Step]) -> None:
    machine = BringUp()
    run(machine, Began(STEPS))

    ordered = run(machine, EndRequested(), frozenset(failing))

    assert ordered[:-1] == list(map(UndoStep, reversed(STEPS)))
    problems = tuple(
        f"{step}: ValueError: no {step}" for step in reversed(STEPS) if step in failing
    )
    assert ordered[-1] == Finish(problems)


@given(st.sets(st.sampled_from(STEPS)))
def test_everything_that_was_taken_is_undone_once_and_nothing_else(failing: set[Step]) -> None:
    machine = BringUp()

    ordered = run(machine, Began(STEPS), frozenset(failing))
    if machine.phase is Phase.UP:
        ordered += run(machine, EndRequested(), frozenset(failing))

    taken = [e.step for e in ordered if isinstance(e, TakeStep) and e.step not in failing]
    undone = [e.step for e in ordered if isinstance(e, UndoStep)]
    assert undone == [
        step for step in reversed(taken) if not failing or step.kind is not StepKind.STORE_OUTPUT
    ]
    published = [e for e in ordered if isinstance(e, PublishSuccess | PublishError)]
    assert len(published) == 1
    assert isinstance(published[0], PublishError) == bool(failing)


def test_a_chip_that_was_never_brought_up_is_down_at_once() -> None:
    assert BringUp().handle(EndRequested()) == [Finish(())]


def test_a_chip_cannot_be_brought_up_twice() -> None:
    machine = BringUp()
    run(machine, Began(STEPS))

    with pytest.raises(LocalProtocolError, match="is up and cannot be brought up again"):
        machine.handle(Began(STEPS))


def test_an_answer_that_nobody_waits_for_breaks_the_rules() -> None:
    with pytest.raises(LocalProtocolError, match="a step was taken, but this chip is idle"):
        BringUp().handle(StepTaken())


def test_a_chip_cannot_be_told_to_end_in_the_middle_of_a_step() -> None:
    machine = BringUp()
    machine.handle(Began(STEPS))

    with pytest.raises(LocalProtocolError, match="while it takes a step"):
        machine.handle(EndRequested())
