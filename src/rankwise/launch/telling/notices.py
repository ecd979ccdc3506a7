"""What rankwise itself says on stderr: a line of text for people, or an object for machines.

With `--log-format json` each notice is one line of JSON: `time` (UTC, RFC 3339), `event`, `run`,
`node` (this host's name, and of several nodes its id), `message` (what people are told), and what
belongs to the event: `round`, `attempt`, `rank`, and so on. docs/files.md lists the events. Output
of workers stays as it is.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from rankwise.base.failure import NO_RANK, Failure, Outcome, OutcomeStatus, Stood
from rankwise.launch.run.job import Job
from rankwise.launch.run.log_layout import notice_stamp


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
        "node": socket.gethostname() + _own_id(job),
        **{name: value for name, value in fields.items() if value is not None},
        "message": message,
    }


def _own_id(job: Job) -> str:
    """What tells agents on one host apart: said in any case, as another one may come later."""
    cluster = job.cluster
    return "" if cluster is None or cluster.is_alone else f"/{cluster.node_id}"


def fields_of(failure: Failure) -> dict[str, Any]:
    """A failure for machines."""
    error = failure.error
    rank = failure.rank if failure.rank >= 0 else failure.local_rank
    text = "" if error is None else f"{error.type}: {error.message}"
    if rank == NO_RANK:
        text = failure.detail
    return {
        "rank": None if rank == NO_RANK else rank,
        "attempt": failure.attempt,
        "cause": str(failure.cause),
        "accused": list(failure.accused) or None,
        "host": failure.host or None,
        "pid": failure.pid,
        "exit_code": None if failure.exit is None else failure.exit.code,
        "error": text or None,
        "traceback": None if error is None else error.traceback,
        "logs": list(failure.log_paths) or None,
    }


def end_notices(job: Job, outcome: Outcome, message: str) -> Iterator[str]:
    """What became of a run: each failure, the root cause first, and the end."""
    from rankwise.launch.telling.failure_report.sentences import one_line  # noqa: PLC0415  # rare

    has_failed = outcome.status is OutcomeStatus.FAILED
    for failure in outcome.failures:
        is_root = has_failed and failure.is_as_much_to_blame_as(outcome.failures[0])
        yield notice(job, one_line(failure), "failure", root_cause=is_root, **fields_of(failure))
    stood = [_fields_of_stood(each) for each in outcome.stood]
    yield notice(
        job, message, "end", status=str(outcome.status), starts=outcome.attempts,
        restarts=max(0, outcome.attempts - 1), signal=outcome.stop_signal, stood=stood or None,
    )  # fmt: skip


def _fields_of_stood(stood: Stood) -> dict[str, Any]:
    from rankwise.launch.telling.failure_report.stacks import innermost_frames  # noqa: PLC0415  # rare

    frames = innermost_frames(stood.stacks)
    return {"rank": stood.rank, "waits_for": stood.waits_for, "frames": frames}
