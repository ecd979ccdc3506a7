"""What each stream of a rank goes through: its tail, its log file, the console.

One set of sinks for every rank, whether its bytes come from a pipe or from a thread that simulates
it. How the bytes get here, and what makes their writer wait, is the caller's.
"""

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from rankwise.base.units import Instant
from rankwise.drivers.real.logs.channel import ConsoleChannel, DuplicateFilter
from rankwise.drivers.real.logs.console import Console, Outlet
from rankwise.drivers.real.logs.file import DiskComplaints, LogFile
from rankwise.drivers.real.logs.tail import Tail
from rankwise.drivers.real.logs.terminal import colour_is_wanted, colour_of
from rankwise.launch.run.job import LogPlan, Streams
from rankwise.launch.run.log_layout import Destinations, console_streams, line_prefix

if TYPE_CHECKING:
    from rankwise.drivers.real.logs.pump import Sink


class StreamSinks(NamedTuple):
    """The sinks of one stream of one rank; None where the plan wants none."""

    tail: Tail
    log_file: LogFile | None
    channel: ConsoleChannel | None

    def all(self) -> "list[Sink]":
        """Those that exist, in the order in which they take a chunk."""
        return [sink for sink in self if sink is not None]


class RankSinks:
    """Makes the sinks of an attempt's ranks.

    Args:
        plan: which stream goes where.
        role: what prefixes call the ranks.
        console: takes what is shown.
        complaints: is told of disks that are full.
    """

    def __init__(
        self, plan: LogPlan, role: str, console: Console, complaints: DiskComplaints
    ) -> None:
        self._plan = plan
        self._role = role
        self._console = console
        self._complaints = complaints
        self._colours = colour_is_wanted(os.environ, is_terminal=console.stdout.is_terminal)
        self._destinations = Destinations()
        self._filters: dict[Streams, DuplicateFilter] = {}
        self._exit = ExitStack()

    def begin_attempt(self, destinations: Destinations) -> None:
        """Write to the files of an attempt from now on."""
        self.end_attempt()
        self._destinations = destinations
        self._add_filter(Streams.OUT, self._plan.stdout_filters, destinations.filtered_stdout)
        self._add_filter(Streams.ERR, self._plan.stderr_filters, destinations.filtered_stderr)

    def continue_with(self, destinations: Destinations) -> None:
        """Write the streams that are made from now on to other files; filters stay as they are."""
        self._destinations = destinations

    def end_attempt(self) -> None:
        """Close the files of the filters. Those of streams end with their streams."""
        self._filters = {}
        self._exit.close()

    def make(
        self, rank: int, local_rank: int, stream: Streams, *, directory: int | None = None
    ) -> StreamSinks:
        """Make the sinks of one stream, and open its log file.

        Args:
            rank: whose stream it is.
            local_rank: its number on its node, by which the plan chooses.
            stream: which of the two.
            directory: the number under which the destinations have its file, if not `local_rank`.
        """
        files, number = self._destinations, local_rank if directory is None else directory
        path = (files.stdouts if stream is Streams.OUT else files.stderrs).get(number)
        is_shown = stream in console_streams(self._plan, local_rank)
        return StreamSinks(
            Tail(),
            LogFile(path, self._complaints, self._plan.file_bytes_max) if path else None,
            self._channel(rank, local_rank, stream) if is_shown else None,
        )

    def outlet(self, stream: Streams) -> Outlet:
        """Where the console shows a stream."""
        return self._console.stdout if stream is Streams.OUT else self._console.stderr

    def _add_filter(self, stream: Streams, needles: tuple[str, ...], path: str) -> None:
        if needles and path:
            log_file = LogFile(path, self._complaints)
            self._exit.callback(log_file.end, Instant(0))
            self._filters[stream] = DuplicateFilter(needles, log_file)

    def _channel(self, rank: int, local_rank: int, stream: Streams) -> ConsoleChannel:
        outlet = self.outlet(stream)
        prefix = line_prefix(
            self._plan, role=self._role, local_rank=local_rank, rank=rank, stream=stream
        )
        return ConsoleChannel(
            outlet,
            prefix=prefix,
            colour=colour_of(local_rank) if self._colours and outlet.is_terminal else b"",
            duplicates=self._filters.get(stream),
        )
