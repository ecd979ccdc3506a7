"""The failures of a job's processes as one exception, whose text is torchrun's report."""

import socket
from typing import Any

from rankwise.base.errors import PicklableError
from rankwise.compat.torch.elastic.multiprocessing.errors.process_failure import (
    NOT_AVAILABLE,
    ProcessFailure,
)
from rankwise.drivers.real.stores.names import full_name_of

__all__ = ["ChildFailedError"]

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
        blocks = {
            rank: _describe(index, rank, failure)
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


def _describe(index: int, rank: int, failure: ProcessFailure) -> str:
    name = failure.signal_name()
    signal_name = f" ({name})" if name != NOT_AVAILABLE else ""
    return "\n".join(
        [
            f"[{index}]:",
            f"  time      : {failure.timestamp_isoformat()}",
            f"  host      : {full_name_of(socket.gethostname())}",
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
