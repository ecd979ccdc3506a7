"""What is known about one failed process: its exit code, and what it left in its error file.

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
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rankwise.base.units import SECOND

__all__ = ["ProcessFailure"]

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
        """Nanoseconds by which failures are ordered; true to `timestamp` if somebody set it."""
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
