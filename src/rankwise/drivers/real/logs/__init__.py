"""Workers' output on its way: from pipes to log files and to the console."""

from rankwise.drivers.real.logs.channel import ConsoleChannel, DuplicateFilter
from rankwise.drivers.real.logs.console import Console, Outlet
from rankwise.drivers.real.logs.file import DiskComplaints, LogFile
from rankwise.drivers.real.logs.flow import LogFlow
from rankwise.drivers.real.logs.lines import Lines, LineSplitter
from rankwise.drivers.real.logs.pump import StreamPump, open_stream_pipe
from rankwise.drivers.real.logs.sink import Sink
from rankwise.drivers.real.logs.tail import Tail
from rankwise.drivers.real.logs.terminal import colour_is_wanted, colour_of, harmless

__all__ = [
    "Console",
    "ConsoleChannel",
    "DiskComplaints",
    "DuplicateFilter",
    "LineSplitter",
    "Lines",
    "LogFile",
    "LogFlow",
    "Outlet",
    "Sink",
    "StreamPump",
    "Tail",
    "colour_is_wanted",
    "colour_of",
    "harmless",
    "open_stream_pipe",
]
