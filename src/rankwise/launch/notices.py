"""What rankwise itself says on stderr: a line of text for people, or an object for machines.

With `--log-format json` each notice is one line of JSON: `time` (UTC, RFC 3339), `event`, `run`,
`node` (this host's name), `message` (what people are told), and what belongs to the event: `round`,
`attempt`, `rank`, and so on. docs/files.md lists the events. What workers write stays as it is.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from rankwise.base.failure import Failure, Outcome
from rankwise.launch.job import Job
from rankwise.launch.log_layout import notice_stamp


class Say(Protocol):
    """Tells people or machines of something that has happened."""

    def __call__(self, message: str, event: str = "notice", **fields: Any) -> None:
        """Say a sentence; `fields` are for machines alone."""
        ...


def notice(job: Job, message: str, event: str = "notice", **fields: Any) -> str:
    """A notice of a run as it is written, with its newline."""
    if job.log_format != "json":
        return f"{notice_stamp(job.logs)}rankwise: {message}\n"
    return msgspec.json.encode(line_for_machines(job, message, event, **fields)).decode() + "\n"


def line_for_machines(job: Job, message: str, event: str, **fields: Any) -> dict[str, Any]:
    """A notice as an object; fields that are None are left out."""
    import socket  # noqa: PLC0415  # only for machines
    from datetime import UTC, datetime  # noqa: PLC0415  # the same

    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "event": event,
        "run": job.run_id,
        "node": socket.gethostname(),
        **{name: value for name, value in fields.items() if value is not None},
        "message": message,
    }


def fields_of(failure: Failure) -> dict[str, Any]:
    """A failure for machines."""
    error = failure.error
    return {
        "rank": failure.rank if failure.rank >= 0 else failure.local_rank,
        "attempt": failure.attempt,
        "cause": str(failure.cause),
        "host": failure.host or None,
        "pid": failure.pid,
        "exit_code": None if failure.exit is None else failure.exit.code,
        "error": None if error is None else f"{error.type}: {error.message}",
        "traceback": None if error is None else error.traceback,
        "logs": list(failure.log_paths) or None,
    }


def end_notices(job: Job, outcome: Outcome, message: str) -> Iterator[str]:
    """What became of a run: each failure, the root cause first, and the end."""
    from rankwise.launch.failure_report.words import one_line  # noqa: PLC0415  # rare

    for place, failure in enumerate(outcome.failures):
        yield notice(job, one_line(failure), "failure", root_cause=place == 0, **fields_of(failure))
    yield notice(
        job, message, "end", status=str(outcome.status), attempts=outcome.attempts,
        signal=outcome.stop_signal,
    )  # fmt: skip
