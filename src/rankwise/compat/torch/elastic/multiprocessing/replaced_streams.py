"""Workers' output for a `sys.stdout` that is not descriptor 1: a notebook's, or a test's.

Usually the console is descriptors 1 and 2. Where the program has put another object in their place,
a pipe takes the descriptor's place for this run, and a thread writes what comes out of it to the
object. The thread ends when the run has closed its end of the pipe, and `close` ours.
"""

import codecs
import os
import sys
import threading
from contextlib import suppress
from typing import TextIO

_CHUNK_BYTES = 1 << 16
_PATIENCE_S = 10.0
"""How long `close` waits; a run that not even SIGKILL has ended keeps its end of the pipe."""


class ReplacedStreams:
    """Stands for standard output and standard error from now on, as they are now.

    Attributes:
        console_fds: what to write to: descriptors 1 and 2, or pipes to what has replaced them.
    """

    def __init__(self) -> None:
        self._pipes: list[_PipeToStream] = []
        self.console_fds = self._fd_of(sys.stdout, 1), self._fd_of(sys.stderr, 2)

    def close(self) -> None:
        """Wait until everything has been written. Harmless the second time."""
        pipes, self._pipes = self._pipes, []
        for pipe in pipes:
            pipe.close()

    def _fd_of(self, stream: TextIO | None, fd: int) -> int:
        if stream is None or _is_descriptor(stream, fd):
            return fd
        pipe = _PipeToStream(stream)
        self._pipes.append(pipe)
        return pipe.fd


class _PipeToStream:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        reading_fd, self.fd = os.pipe()
        self._thread = threading.Thread(
            target=self._copy, args=(reading_fd,), name="rankwise-stream", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        os.close(self.fd)
        self._thread.join(_PATIENCE_S)

    def _copy(self, fd: int) -> None:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        while chunk := os.read(fd, _CHUNK_BYTES):
            # Writes to a closed stream are dropped: its owner does not want it.
            with suppress(ValueError, OSError):
                self._stream.write(decode(chunk))
                self._stream.flush()
        os.close(fd)


def _is_descriptor(stream: TextIO, fd: int) -> bool:
    try:
        return os.path.sameopenfile(stream.fileno(), fd)
    except (AttributeError, OSError, ValueError):
        return False
