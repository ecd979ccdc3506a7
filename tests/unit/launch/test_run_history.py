"""What is remembered of the attempts before the last one."""

from typing import TYPE_CHECKING, cast

from rankwise.base.failure import EarlierAttempt, ExitStatus, Failure, FailureCause
from rankwise.base.units import Duration, Instant
from rankwise.core.agent.vocabulary import AnnounceRestart, AnnounceRound
from rankwise.core.rendezvous.vocabulary import World
from rankwise.launch.run.run_history import RunHistory

if TYPE_CHECKING:
    from rankwise.launch.telling.failure_command import FailureCommand


class Recorded:
    """Stands for the user's command: what it would be told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[Failure, ...]]] = []

    def start(self, event: str, failures: tuple[Failure, ...], **_fields: object) -> None:
        self.told.append((event, failures))


def failed(rank: int, cause: FailureCause = FailureCause.EXITED) -> Failure:
    return Failure(
        local_rank=rank, rank=rank, attempt=0, cause=cause, at=Instant(0), exit=ExitStatus(7)
    )


def round_after(why: str) -> AnnounceRound:
    return AnnounceRound(
        World(
            round=3, node_rank=0, members=("a", "b"), first_rank=0, slots=1, size=2,
            master_address="a", master_port=1, why=why,
        )
    )  # fmt: skip


def history_with(command: Recorded) -> RunHistory:
    return RunHistory(lambda: 5, cast("FailureCommand", command))


def test_a_restart_is_remembered_and_told() -> None:
    command = Recorded()
    history = history_with(command)

    history.note(AnnounceRestart(0, 1, Duration(0), (failed(2),)))

    assert history.earlier == (EarlierAttempt(0, 5, "rank 2 exited with code 7"),)
    assert command.told == [("restart", (failed(2),))]


def test_among_several_nodes_the_one_whose_ranks_failed_tells_it_once() -> None:
    command = Recorded()
    history = history_with(command)

    history.on_failures((failed(1), failed(0, FailureCause.STOPPED)))
    assert command.told == []  # it may have been the end
    history.note(round_after("rank 1 on b failed"))
    history.note(round_after("node c came"))

    assert [each.why for each in history.earlier] == ["rank 1 on b failed", "node c came"]
    assert command.told == [("restart", (failed(1),))]


def test_the_first_round_follows_no_attempt() -> None:
    history = history_with(Recorded())

    history.note(round_after(""))

    assert history.earlier == ()
