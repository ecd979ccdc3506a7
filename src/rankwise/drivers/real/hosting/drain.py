"""Reads what processes that outlive a run write, and throws it away, until they have ended.

The guardian lets them be (`--keep-children`). Their output came through pipes that the agent reads.
When it ends, this program, started as `python -I -S drain.py FD...`, reads on: without a reader
their next word would kill them, and without space in the pipe it would stop them.
"""

import os
import select
import sys

_CHUNK_BYTES = 1 << 16


def discard_output(pipes: list[int]) -> None:
    """For the agent: have these read until their last writer is gone, even without this process."""
    if pipes:
        import subprocess  # noqa: PLC0415  # not for the program

        words = [sys.executable, "-I", "-S", __file__, *map(str, pipes)]
        none = subprocess.DEVNULL
        subprocess.run(
            words, pass_fds=pipes, stdin=none, stdout=none, stderr=none, cwd="/",
            start_new_session=True, check=False,
        )  # fmt: skip


def _drain(pipes: list[int]) -> None:
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
    _drain([int(word) for word in sys.argv[1:]])
