"""Reads what processes that outlive a run write, and throws it away, until they have ended.

A program, started by the agent at its end as `python -I -S drain.py FD...`, with the reading ends
of their pipes. Without a reader their next word would kill them, and without space in the pipe it
would stop them.
"""

import os
import select
import sys

_CHUNK_BYTES = 1 << 16


def drain(pipes: list[int]) -> None:
    """Read all of them to their ends."""
    waiting = select.poll()
    for pipe in pipes:
        waiting.register(pipe, select.POLLIN)
    left = set(pipes)
    while left:
        for pipe, _ in waiting.poll():
            try:
                chunk = os.read(pipe, _CHUNK_BYTES)
            except BlockingIOError:
                continue  # the agent, which reads its last, was quicker; it must not block either
            if not chunk:
                waiting.unregister(pipe)
                left.discard(pipe)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # the agent waits for this one, and need not reap the other
    drain([int(word) for word in sys.argv[1:]])
