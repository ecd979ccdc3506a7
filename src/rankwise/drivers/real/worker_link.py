"""The agent's end of a worker: its process and pipes, and how far it has come.

`process_host.py` makes workers, reads the pipes and says what follows.
"""

import socket
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from rankwise.base.root_cause import SELF_INFLICTED_SIGNALS
from rankwise.base.units import Instant
from rankwise.drivers.real.logs.pump import StreamPump
from rankwise.drivers.real.logs.tail import Tail
from rankwise.drivers.real.report_pipe import Exiting, ReportPipe
from rankwise.drivers.real.worker_process import WorkerProcess

SIGTERM = 15


class WorkerPlan(msgspec.Struct, kw_only=True):
    """How to make one worker: the order for the guardian, and which pipes it gets.

    `descriptors` are inherited under the variables that name them (`RANKWISE_PAYLOAD_FD`, …) and
    stay the planner's property.
    """

    order: dict[str, Any]
    descriptors: Mapping[int | str, int]
    stream_count: int
    """How many streams the whole run has, which decides how large their pipes are."""
    reports: bool
    """Whether the program speaks on a report pipe: Python programs that rankwise boots."""
    returns: bool
    """Whether it sends a result: functions."""
    gives: Mapping[str, int] = {}
    """More descriptors, which are the worker's alone once it is made."""
    recovers: bool = False
    """Whether it may offer to be called again (`rankwise.recover`)."""


class CallPlan(msgspec.Struct):
    """In which world a worker that lives on is called again."""

    environment: dict[str, str | None]
    """Its variables; one that is None is not set in that world."""
    descriptors: dict[str, int]
    """What comes with the word, by the variables that name it; they stay the planner's property."""
    gives: dict[str, int]
    """The same, the worker's alone once it is told."""


class WorkerStream(msgspec.Struct):
    """One output stream of a worker."""

    pump: StreamPump
    tail: Tail
    is_over: bool = False


class WorkerPlanner(Protocol):
    """Knows what to run: the launch layer's part of making a worker."""

    def plan(self, local_rank: int, attempt: int) -> WorkerPlan:
        """Say how to make a worker.

        Raises:
            OSError: something that it needs, such as a file, could not be had.
            RankwiseError: the same, in words.
        """
        ...

    def make_pumps(
        self, local_rank: int, stdout_fd: int, stderr_fd: int
    ) -> tuple[WorkerStream, WorkerStream]:
        """Make the pumps that own the reading ends of a worker's output pipes."""
        ...

    def call_again(self, local_rank: int, attempt: int) -> CallPlan:
        """Say in which world a worker that lives on is called again.

        Raises:
            OSError: what its attempt shares could not be made.
        """
        ...

    def on_worker_over(self, local_rank: int) -> None:
        """Take notice that a worker of the latest attempt has ended."""
        ...


class WorkerLink(msgspec.Struct):
    """The agent's end of one worker of one attempt."""

    local_rank: int
    attempt: int
    number: int
    stdout: WorkerStream
    stderr: WorkerStream
    report_fd: int = -1
    result_fd: int = -1
    line: socket.socket | None = None
    pid: int | None = None
    process: WorkerProcess | None = None
    is_ready: bool = False
    recorder_thread: int = 0
    """The thread of ours in it that can be asked for what torch has recorded; 0 without one."""
    exiting: Exiting | None = None
    """That its program has ended with another code than 0, though its process may live on."""
    end_seen_at: Instant | None = None
    """When we saw by ourselves that its process had ended."""
    is_over: bool = False
    is_killed: bool = False
    """Whether it was sent SIGKILL."""
    was_stopped: bool = False
    """Whether SIGSTOP or a debugger had stopped it when it was first sent a signal."""
    is_signalled: bool = False
    exit_code: int | None = None
    has_raised: bool = False
    """Whether it has told of an exception; which one is in `RealProcessHost.errors`."""
    reports: ReportPipe = msgspec.field(default_factory=ReportPipe)
    result: bytearray = msgspec.field(default_factory=bytearray)

    @property
    def streams(self) -> tuple[WorkerStream, WorkerStream]:
        """Both output streams."""
        return self.stdout, self.stderr

    @property
    def has_died_in_silence(self) -> bool:
        """Whether it has failed, told of nothing, and was not told to stop either.

        By SIGABRT and SIGPIPE native code dies of a closed connection.
        """
        ours = (None, 0, -SIGTERM, *(-signum for signum in SELF_INFLICTED_SIGNALS))
        has_reported = self.has_raised or self.exiting is not None
        return self.exit_code not in ours and not has_reported and not self.is_killed

    @property
    def is_read(self) -> bool:
        """Whether every pipe has been read to its end."""
        return (
            self.report_fd < 0
            and self.result_fd < 0
            and self.stdout.is_over
            and self.stderr.is_over
        )
