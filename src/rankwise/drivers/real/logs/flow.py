"""Pumps and console on the reactor: the streams run at the pace of the console.

A pump whose sinks are congested is not read until the console has caught up; its pipe fills, and
its worker waits. An outlet is watched only while bytes wait in it.

On a terminal, lines that have no end are shown after a pause of `QUIET`, and so between one and two
times that after the last word: one timer looks at intervals whether anything has come, since to
move one with every chunk would cost more than all else. While no line is unfinished there is no
timer.
"""

from collections.abc import Callable
from functools import partial

from rankwise.base.units import MILLISECOND, Duration, after
from rankwise.drivers.real.logs.console import Console, Outlet
from rankwise.drivers.real.logs.pump import StreamPump
from rankwise.drivers.real.reactor import Reactor
from rankwise.ports.clock import Clock

QUIET = Duration(200 * MILLISECOND)
"""How long a terminal was not written to when unfinished lines are shown there."""


class LogFlow:
    """Keeps the streams of all workers moving."""

    def __init__(self, reactor: Reactor, console: Console, clock: Clock) -> None:
        self._reactor = reactor
        self._clock = clock
        self._on_end: dict[StreamPump, Callable[[], None]] = {}
        self._held: dict[StreamPump, None] = {}
        self._noisy: set[Outlet] = set()
        """Outlets with unfinished lines, which are shown once their writers pause."""
        for outlet in console.outlets:
            outlet.on_blocked = partial(self._watch, outlet)
            outlet.on_unfinished = partial(self._await_quiet, outlet)

    def add(self, pump: StreamPump, on_end: Callable[[], None]) -> None:
        """Read the pump's stream until its end; then close it and call back."""
        self._on_end[pump] = on_end
        self._resume(pump)

    def drain(self, pump: StreamPump) -> None:
        """Read what a stream that has not been finished has to say at this moment."""
        pump.drain(self._clock.now())
        self._finish_if_ended(pump)

    def finish(self, pump: StreamPump) -> None:
        """End a stream that may have no end: what is in its pipe now is its last, no call back.

        Harmless for a stream that has ended.
        """
        if self._on_end.pop(pump, None) is not None:
            self._held.pop(pump, None)
            self._reactor.unwatch_readable(pump.fd)
            pump.end(self._clock.now())

    def _resume(self, pump: StreamPump) -> None:
        self._reactor.watch_readable(pump.fd, partial(self._read, pump))

    def _read(self, pump: StreamPump) -> None:
        if pump.is_congested:
            self._reactor.unwatch_readable(pump.fd)
            self._held[pump] = None
            return
        pump.on_readable(self._clock.now())
        self._finish_if_ended(pump)

    def _finish_if_ended(self, pump: StreamPump) -> None:
        if pump.is_ended:
            on_end = self._on_end[pump]
            self.finish(pump)
            on_end()

    def _await_quiet(self, outlet: Outlet) -> None:
        if outlet in self._noisy:
            return  # it is being looked at
        self._noisy.add(outlet)
        activity = outlet.activity

        def look() -> None:
            self._noisy.discard(outlet)
            if outlet.activity == activity:
                outlet.show_unfinished()
            elif outlet.unfinished:
                self._await_quiet(outlet)

        self._reactor.call_at(after(self._clock.now(), QUIET), look)

    def _watch(self, outlet: Outlet) -> None:
        self._reactor.watch_writable(outlet.fd, partial(self._write, outlet))

    def _write(self, outlet: Outlet) -> None:
        outlet.on_writable()
        if not outlet.wants_write:
            self._reactor.unwatch_writable(outlet.fd)
        if not outlet.is_congested:
            for pump in [pump for pump in self._held if not pump.is_congested]:
                del self._held[pump]
                self._resume(pump)
