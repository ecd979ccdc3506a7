"""The standard streams of a command, when its process ends."""

import os
import sys
from typing import TextIO


def flush_standard_streams() -> None:
    """Write what has been printed, and drop what cannot be written.

    For `atexit`: an interpreter flushes once more after that, and if it fails there it replaces the
    exit code by 120.
    """
    for stream in (sys.stdout, sys.stderr):
        # A replacement of a stream may know less than a stream.
        if stream is None or getattr(stream, "closed", False):
            continue
        try:
            stream.flush()
        except OSError:
            give_up(stream)


def give_up(stream: TextIO) -> None:
    """Write to nowhere from now on, what is in the stream's buffer included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
