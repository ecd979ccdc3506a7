"""Those who read what ranks write, from another terminal: `rankwise logs`.

The answer to `{"ask": "logs"}` begins with how many `streams` there are, which may be none yet, and
one line for each: `rank`, `stream` (stdout, stderr), `attempt`, and what is known of it: `path` and
`size_bytes` where it goes to a file, else `data`, its last part, in base64. With `follow` there are
further lines with `data`: each chunk as it was read, until the run ends. Chunks are no lines: the
reader splits them, at no cost to the run.

A reader that takes nothing must not fill the agent's memory, nor hold up the ranks as a console
does: one that is too far behind is told so, and has the rest.
"""

import base64
import os
from typing import NamedTuple

from rankwise.base.units import Instant
from rankwise.launch.control.server import ControlRequest, Reply

UNSENT_BYTES_MAX = 8 << 20
"""How far a reader may be behind."""
_HISTORY_BYTES_MAX = 4 << 20
"""How much all streams together have to tell of what was."""
_HISTORY_BYTES_MIN = 1 << 10


class StreamName(NamedTuple):
    """Which stream."""

    rank: int
    attempt: int
    stream: str


class WrittenExtent(NamedTuple):
    """What is known of what was written to a stream: where it is, or its last part."""

    name: StreamName
    path: str
    tail: bytes


class LogReaders:
    """All who follow the streams of one run."""

    def __init__(self) -> None:
        self._readers: dict[Reply, int | None] = {}

    def serve(self, request: ControlRequest, reply: Reply, streams: list[WrittenExtent]) -> None:
        """Tell what was written so far, and from now on what is being written, if asked."""
        chosen = [each for each in streams if request.rank in (None, each.name.rank)]
        reply.send({"streams": len(chosen)})  # before the ranks are made there are none
        tail_bytes = max(_HISTORY_BYTES_MAX // max(len(chosen), 1), _HISTORY_BYTES_MIN)
        for name, path, tail in chosen:
            size = _size_of(path)
            if size is None:
                _send(reply, name, tail[-tail_bytes:])
            else:
                reply.send({**name._asdict(), "path": path, "size_bytes": size})
        if request.follow:
            self._readers[reply] = request.rank
        else:
            reply.finish()

    def tell(self, name: StreamName, chunk: bytes) -> None:
        """Pass a chunk on to those who follow its rank."""
        for reply, rank in list(self._readers.items()):
            if not reply.is_wanted:
                del self._readers[reply]
            elif reply.unsent_bytes > UNSENT_BYTES_MAX:
                reply.send({"error": "it reads more slowly than the ranks write"})
                reply.finish()
            elif rank in (None, name.rank):
                _send(reply, name, chunk)


class FollowedStream:
    """A sink that shows one stream to the readers of a run. Costs nothing while there are none."""

    is_congested = False

    def __init__(self, readers: LogReaders, name: StreamName) -> None:
        self._readers = readers
        self._name = name

    def take(self, chunk: bytes, now: Instant) -> None:  # noqa: ARG002  # a sink is told the time
        """Pass a chunk on."""
        self._readers.tell(self._name, chunk)

    def end(self, now: Instant) -> None:
        """Nothing: the end of the answer tells of the end of all streams."""


def _send(reply: Reply, name: StreamName, chunk: bytes) -> None:
    reply.send({**name._asdict(), "data": base64.b64encode(chunk).decode()})


def _size_of(path: str) -> int | None:
    """How much there is in a log file, which has no buffer; None if there is no file."""
    try:
        return os.stat(path).st_size if path else None
    except OSError:
        return None
