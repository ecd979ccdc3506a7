"""Journals in words."""

from rankwise.base.units import SECOND, Duration
from rankwise.core.agent.vocabulary import FinishRun
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.drivers.virtual.gang_simulator import GangSimulator
from rankwise.drivers.virtual.story import read_journal, story
from rankwise.drivers.virtual.worker_behaviour import Exits, WorkerProgram


def test_alike_facts_of_one_instant_share_a_line() -> None:
    run = GangSimulator().run(GangSpec(size=5), [[WorkerProgram(after=Duration(SECOND))] * 5])

    assert story(run.journal).splitlines() == [
        "    0.000000 s  < started",
        "    0.000000 s  > spawn workers 0-4, attempt 0",
        "    0.000200 s  < workers 0-4 spawned, attempt 0",
        "    1.000200 s  < workers 0-4 exited: exit code 0",
        "    1.000200 s  > sweep, attempt 0",
        "    1.001400 s  < swept, attempt 0",
        "    1.001400 s  > finish: succeeded, attempts 1",
    ]


def test_a_journal_is_read_back_as_it_was_written() -> None:
    run = GangSimulator().run(GangSpec(size=1), [[WorkerProgram(ending=Exits(2))]])

    entries = read_journal(run.journal)

    assert isinstance(entries[-1].effect, FinishRun)
    assert entries[-1].effect.as_outcome() == run.outcome


def test_nothing_has_no_story() -> None:
    assert story(b"") == ""
