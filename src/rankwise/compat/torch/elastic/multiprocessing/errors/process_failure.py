"""What is known about failed processes: exit codes, and what they left in their error files.

`ChildFailedError` is the failures of a job as one exception, whose text is torchrun's report.

torch's timestamps are whole seconds, and the processes of a gang fail within milliseconds of each
other, so the earliest timestamp says little about who failed first. `timestamp` stays what torch
makes it; `failed_at_ns` is the finer time by which rankwise orders: the moment at which the error
file was written, which is the moment of failure.

`launch.error_file` reads the same files and shares nothing with this: it makes the best of any
content and never raises, while here a file that is not torch's must raise what it raises in torch.
"""

import json
import logging
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rankwise.base.errors import PicklableError
from rankwise.base.units import SECOND
from rankwise.drivers.real.stores.names import full_name_of

__all__ = ["ChildFailedError", "ProcessFailure"]

logger = logging.getLogger(__name__)

NOT_AVAILABLE = "<N/A>"
NO_MESSAGE = "<NONE>"
HOW_TO_GET_A_TRACEBACK = (
    "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
)


@dataclass
class ProcessFailure:
    """One failed process.

    Attributes:
        local_rank: its number on its node.
        pid: its process id.
        exitcode: its exit code, or minus the signal that killed it.
        error_file: where it left its exception, or `<N/A>` if it left none.
        error_file_data: the content of the error file.
        message: the exception as the error file tells it (text, or a mapping with `message` and
            `extraInfo`); else one sentence made from the exit code.
        timestamp: seconds since 1970 at which it failed.
        failed_at_ns: the same moment in nanoseconds, as exactly as it is known.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: str | dict[str, Any] = field(init=False)
    timestamp: int = field(init=False)
    failed_at_ns: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if os.path.isfile(self.error_file):
            self._read_error_file()
        else:
            self.error_file = NOT_AVAILABLE
            self.error_file_data = {"message": NO_MESSAGE}
            self.message = ""
            self.failed_at_ns = time.time_ns()
            self.timestamp = self.failed_at_ns // SECOND
        if not self.message:
            self.message = self._message_from_exit()

    @property
    def has_error_file(self) -> bool:
        """Whether the process left its exception behind."""
        return self.error_file != NOT_AVAILABLE

    def signal_name(self) -> str:
        """Name the signal that killed the process, or `<N/A>`."""
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Write the local time of the failure as `2026-11-20_12:13:14`."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")  # noqa: DTZ006  # for people

    def order(self) -> int:
        """Nanoseconds by which failures are ordered; true to `timestamp` if that was set."""
        if self.failed_at_ns // SECOND == self.timestamp:
            return self.failed_at_ns
        return self.timestamp * SECOND

    def _read_error_file(self) -> None:
        try:
            with open(self.error_file, encoding="utf-8") as file:
                self.error_file_data = json.load(file)
                written_ns = os.fstat(file.fileno()).st_mtime_ns
            self.message, self.timestamp = _message_and_timestamp(self.error_file_data)
        except Exception:
            logger.exception("%s is not an error file in torch's format", self.error_file)
            raise
        # A file copied from another launcher is younger than the failure that it tells of.
        whole = self.timestamp * SECOND
        was_written_then = whole <= written_ns < whole + 2 * SECOND
        self.failed_at_ns = min(written_ns, whole + SECOND - 1) if was_written_then else whole

    def _message_from_exit(self) -> str:
        if self.exitcode < 0:
            return f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
        self.error_file_data["errorTraits"] = {
            "category": "system_terminated_error",
            "retryability": "False",
        }
        return HOW_TO_GET_A_TRACEBACK


def _message_and_timestamp(content: dict[str, Any]) -> tuple[str | dict[str, Any], int]:
    """Read either form of error file; a missing field is a KeyError, as torch's readers expect."""
    message = content["message"]
    if isinstance(message, str):
        return message, int(content.get("timestamp", 0))
    return message, int(message["extraInfo"]["timestamp"])


WIDTH_MAX = 60


class ChildFailedError(PicklableError):
    """Processes of a job failed.

    Raised through `record`, it is not recorded itself: the first failure's error file is copied
    to the launcher's own, so that the root cause travels outwards.

    Attributes:
        name: what failed, usually the program.
        failures: by global rank; never empty.
    """

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        if not failures:
            raise AssertionError("ChildFailedError needs at least one failure")
        self.name = name
        self.failures = failures
        super().__init__(self.format_msg())

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Find the rank that failed first, and its failure; the first of equals."""
        return min(self.failures.items(), key=lambda item: item[1].order())

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Write the report: all other failures, then the root cause."""
        first_rank, _ = self.get_first_failure()
        title = f"{self.name} FAILED"
        host = full_name_of(socket.gethostname())
        blocks = {
            rank: _describe(index, rank, failure, host)
            for index, (rank, failure) in enumerate(self.failures.items())
        }
        widest = max(len(line) for block in blocks.values() for line in block.split("\n"))
        width = min(WIDTH_MAX, max(len(title), widest))
        border, section = boarder_delim * width, section_delim * width
        root = blocks.pop(first_rank)
        others = blocks.values() or ["  <NO_OTHER_FAILURES>"]
        return "\n".join(
            [
                "",
                border,
                title,
                section,
                "Failures:",
                *others,
                section,
                "Root Cause (first observed failure):",
                root,
                border,
            ]
        )


def _describe(index: int, rank: int, failure: ProcessFailure, host: str) -> str:
    name = failure.signal_name()
    signal_name = f" ({name})" if name != NOT_AVAILABLE else ""
    return "\n".join(
        [
            f"[{index}]:",
            f"  time      : {failure.timestamp_isoformat()}",
            f"  host      : {host}",
            f"  rank      : {rank} (local_rank: {failure.local_rank})",
            f"  exitcode  : {failure.exitcode} (pid: {failure.pid}) {signal_name}",
            f"  error_file: {failure.error_file}",
            f"  traceback : {_traceback(failure.message)}",
        ]
    )


def _traceback(message: str | dict[str, Any]) -> str:
    if isinstance(message, str):
        return message
    told = message.get("message", NOT_AVAILABLE)
    text: str = message.get("extraInfo", {}).get("py_callstack", told)
    return text.replace("\n", "\n  ")
