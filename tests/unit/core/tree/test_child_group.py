"""What the group orders, one fact at a time."""

import pytest

from rankwise.base.errors import LocalProtocolError
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.tree.child_group import (
    CameUp,
    ChildEnded,
    ChildGroup,
    ChildGroupEffect,
    ChildGroupPhase,
    ChildGroupSpec,
    ChildGroupStimulus,
    ChildLost,
    ChildReady,
    ChildRefused,
    ChildReplaced,
    ForkServerEnded,
    GroupClosed,
    GroupCloseRequested,
    GroupLost,
    KillChild,
    Release,
    Spawn,
    StartFailed,
    StartRequested,
)

KILLED = "was killed by SIGKILL"


def group_of(*stages: int, replaceable: bool = False) -> ChildGroup:
    return ChildGroup(
        ChildGroupSpec(
            names=tuple(f"child {index}" for index in range(len(stages))),
            stages=stages,
            replaceable=(replaceable,) * len(stages),
            start_patience=Duration(10 * SECOND),
            close_patience=Duration(5 * SECOND),
            kill_patience=Duration(1 * SECOND),
        )
    )


def tell(group: ChildGroup, *stimuli: ChildGroupStimulus, now: int = 0) -> list[ChildGroupEffect]:
    return [effect for stimulus in stimuli for effect in group.handle(stimulus, Instant(now))]


def ended_well(child: int) -> ChildEnded:
    return ChildEnded(child, "ended with exit code 0", is_well=True)


def group_that_is_up(*stages: int, replaceable: bool = False) -> ChildGroup:
    group = group_of(*stages, replaceable=replaceable)
    tell(group, StartRequested(), *(ChildReady(index) for index in range(len(stages))))
    return group


def test_a_group_is_up_when_all_are_ready() -> None:
    group = group_of(0, 1)

    assert tell(group, StartRequested()) == [Spawn(0), Spawn(1)]
    assert tell(group, ChildReady(1)) == []
    assert tell(group, ChildReady(0)) == [CameUp()]
    assert group.next_deadline is None


def test_a_group_of_nobody_is_up_at_once() -> None:
    assert tell(group_of(), StartRequested(), GroupCloseRequested()) == [
        CameUp(),
        GroupClosed((), ()),
    ]


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        (
            ChildRefused(1, "ValueError: no"),
            StartFailed(1, "ValueError: no", refused=True, survivors=()),
        ),
        (ChildEnded(1, KILLED), StartFailed(1, KILLED, refused=False, survivors=())),
    ],
)
def test_the_first_fault_ends_all_and_is_told_when_they_are_gone(
    fault: ChildGroupStimulus, failure: StartFailed
) -> None:
    group = group_of(0, 0, 0)
    tell(group, StartRequested(), ChildReady(0))

    killed = tell(group, fault)
    assert KillChild(0) in killed
    assert KillChild(2) in killed
    assert tell(group, ChildRefused(2, "KeyError: later"), ChildEnded(2, KILLED)) == []
    told = tell(group, ChildEnded(0, KILLED), ChildEnded(1, "ended with exit code 1"))

    assert told == [failure]
    assert group.phase is ChildGroupPhase.IDLE
    assert tell(group, StartRequested()) == [Spawn(0), Spawn(1), Spawn(2)]


def test_a_child_that_is_late_is_named() -> None:
    group = group_of(0, 0)
    tell(group, StartRequested(), ChildReady(0))

    assert group.tick(Instant(10 * SECOND - 1)) == []
    assert group.tick(Instant(10 * SECOND)) == [KillChild(0), KillChild(1)]
    tell(group, ChildEnded(0, KILLED))

    assert tell(group, ChildEnded(1, KILLED)) == [
        StartFailed(1, "was not ready within 10 s", refused=False, survivors=())
    ]


def test_a_child_that_not_even_killing_ends_is_given_up() -> None:
    group = group_of(0)
    tell(group, StartRequested(), ChildRefused(0, "no"))

    assert group.tick(Instant(1 * SECOND)) == [StartFailed(0, "no", refused=True, survivors=(0,))]


def test_a_replaceable_child_gets_a_successor() -> None:
    group = group_that_is_up(0, replaceable=True)

    assert tell(group, ChildEnded(0, KILLED)) == [ChildLost(0, KILLED, successor=True), Spawn(0)]
    assert tell(group, ChildReady(0)) == [ChildReplaced(0)]


def test_a_successor_that_never_gets_ready_gets_none() -> None:
    group = group_that_is_up(0, replaceable=True)
    tell(group, ChildEnded(0, KILLED), ChildRefused(0, "no"))

    assert tell(group, ChildEnded(0, KILLED)) == [ChildLost(0, KILLED, successor=False)]


def test_closing_goes_by_stage() -> None:
    group = group_that_is_up(1, 0, 2, 0)

    assert tell(group, GroupCloseRequested()) == [Release(1), Release(3)]
    assert tell(group, ended_well(1)) == []
    assert tell(group, ended_well(3)) == [Release(0)]
    assert tell(group, ended_well(0)) == [Release(2)]
    assert tell(group, ended_well(2)) == [GroupClosed((), ())]


def test_a_bad_end_while_it_is_closed_is_told_of_a_child_that_nobody_replaces() -> None:
    lasting, replaceable = group_that_is_up(0, 0), group_that_is_up(0, 0, replaceable=True)
    for group in (lasting, replaceable):
        tell(group, GroupCloseRequested())

    assert tell(lasting, ChildEnded(1, KILLED)) == [ChildLost(1, KILLED, successor=False)]
    assert tell(lasting, ended_well(0)) == [GroupClosed((), ())]
    assert tell(replaceable, ChildEnded(1, KILLED)) == []


def test_who_is_left_when_the_fork_server_ends_is_lost_also_while_it_is_closed() -> None:
    up, closing = group_that_is_up(0, 0), group_that_is_up(0, 0, 1)
    tell(closing, GroupCloseRequested(), ended_well(0))

    assert tell(up, ForkServerEnded()) == [GroupLost((0, 1))]
    assert tell(closing, ForkServerEnded()) == [GroupLost((1, 2)), GroupClosed((), ())]


def test_what_does_not_end_in_time_is_killed_and_named() -> None:
    group = group_that_is_up(0, 1)
    tell(group, GroupCloseRequested())

    assert group.tick(Instant(5 * SECOND)) == [KillChild(0), KillChild(1)]
    assert tell(group, ChildEnded(0, KILLED)) == []
    assert tell(group, ChildEnded(1, KILLED)) == [GroupClosed((0, 1), ())]


def test_without_the_fork_server_nobody_comes_up() -> None:
    starting = group_of(0)
    tell(starting, StartRequested())

    (failed,) = tell(starting, ForkServerEnded())
    assert isinstance(failed, StartFailed)
    assert failed.child is None


def test_a_group_that_is_up_cannot_be_started() -> None:
    with pytest.raises(LocalProtocolError, match="while it is up"):
        tell(group_that_is_up(0), StartRequested())
