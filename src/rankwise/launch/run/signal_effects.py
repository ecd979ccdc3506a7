"""What each signal to the process of a run does to that run; docs/signals.md has the table."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2

from rankwise.drivers.real.hosting.ending_signals import ENDING_SIGNALS

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


def effects_of(
    stopping: Iterable[int], passed: Iterable[int], *, heeds_all: bool
) -> Mapping[int, SignalEffect]:
    """What the signals do that a run catches, by number; the others do as by default.

    Args:
        stopping: those that stop it. One of the usual four that is not among them is left to do
            what it does to any program.
        passed: those that ranks are sent which catch them, if the run heeds all.
        heeds_all: see `Job.heeds_all_signals`.
    """
    effects = dict.fromkeys(stopping, SignalEffect.STOPS)
    if not heeds_all:
        return effects
    for number in passed:
        effects.setdefault(number, SignalEffect.PASSED_ON)
    for number in USER_SIGNALS:
        effects.setdefault(number, SignalEffect.OUTLIVED)
    for number in ENDING_SIGNALS:
        if number not in _STOP_SIGNALS:
            effects.setdefault(number, SignalEffect.STOPS_AS_SIGTERM)
    return effects
