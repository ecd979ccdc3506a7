"""What each signal to the process of a run does to that run; docs/signals.md has the table."""

from collections.abc import Mapping
from enum import StrEnum
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2

from rankwise.drivers.real.hosting.ending_signals import ENDING_SIGNALS
from rankwise.launch.run.job import Job

USER_SIGNALS = (SIGUSR1, SIGUSR2)
_STOP_SIGNALS = (SIGHUP, SIGINT, SIGQUIT, SIGTERM)


class SignalEffect(StrEnum):
    """What a signal to the process of a run does."""

    STOPS = "stops"
    """It stops the run, and ranks are sent the same one."""
    STOPS_AS_SIGTERM = "stops as SIGTERM"
    PASSED_ON = "passed on"
    """The ranks that catch it are sent it."""
    OUTLIVED = "outlived"


STOPPING = (SignalEffect.STOPS, SignalEffect.STOPS_AS_SIGTERM)


def effects_of(job: Job) -> Mapping[int, SignalEffect]:
    """What the signals do that a run of this job catches, by number; the others do as by default.

    One of the usual four that `job.signals` leaves out is left to do what it does to any program.
    """
    effects = dict.fromkeys(job.signals, SignalEffect.STOPS)
    if not job.heeds_all_signals:
        return effects
    for number in job.passed_signals:
        effects.setdefault(number, SignalEffect.PASSED_ON)
    for number in USER_SIGNALS:
        effects.setdefault(number, SignalEffect.OUTLIVED)
    for number in ENDING_SIGNALS:
        if number not in _STOP_SIGNALS:
            effects.setdefault(number, SignalEffect.STOPS_AS_SIGTERM)
    return effects
