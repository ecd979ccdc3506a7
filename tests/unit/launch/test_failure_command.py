"""The command of `--on-failure`: what is heard while a run waits for it."""

import signal

from rankwise.core.gang.vocabulary import GangSpec
from rankwise.launch.run.job import Job, Script
from rankwise.launch.telling.failure_command import FailureCommand


def test_signals_are_heard_before_the_last_command_begins() -> None:
    command = FailureCommand(Job(program=Script("a.py"), gang=GangSpec(size=1), run_id="x"), "true")
    before = signal.getsignal(signal.SIGTERM)
    then: list[object] = []

    command.wait(begin=lambda: then.append(signal.getsignal(signal.SIGTERM)))

    assert then != [before]
    assert signal.getsignal(signal.SIGTERM) == before
