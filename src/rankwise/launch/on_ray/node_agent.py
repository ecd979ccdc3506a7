"""The actor of one bundle: runs `rankwise run` on its node, and returns its output in lines.

`run` is a stream of items, made in one thread of the actor: `("began", host)`, then
`("stdout" | "stderr", bytes)`, and last `("ended", code)`. `signal` runs in another thread.
"""

import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

Item = tuple[str, str | bytes | int]

_READ_AT_ONCE = 1 << 16
_LINE_MAX = 1 << 20
"""A line that is longer is handed out in pieces."""


class NodeAgent:
    """One agent, on whichever node Ray has put this actor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._early_signals: list[int] = []

    def run(
        self, words: Sequence[str], environment: Mapping[str, str], directory: str
    ) -> Iterator[Item]:
        """Run an agent to its end.

        Args:
            words: of `rankwise run`.
            environment: variables in addition to this process's.
            directory: where to run, if this node has it.
        """
        command = [sys.executable, "-m", "rankwise.launch.on_ray.agent_process", str(os.getpid())]
        process = subprocess.Popen(
            [*command, "run", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            cwd=directory if os.path.isdir(directory) else None,
            bufsize=0,
            process_group=0,
        )
        with self._lock:
            self._process = process
            for signal in self._early_signals:
                process.send_signal(signal)
        yield "began", socket.gethostname()
        assert process.stdout is not None, "asked for above"
        assert process.stderr is not None, "the same"
        yield from _lines_of({"stdout": process.stdout, "stderr": process.stderr})
        code = process.wait()
        yield "ended", code if code >= 0 else 128 - code

    def signal(self, signal: int) -> None:
        """Pass a signal on to the agent."""
        with self._lock:
            if self._process is None:
                self._early_signals.append(signal)
            else:
                self._process.send_signal(signal)  # does nothing once it has been waited for


def _lines_of(streams: Mapping[str, IO[bytes]]) -> Iterator[Item]:
    """Whole lines as they come, until both streams have ended."""
    rests = dict.fromkeys(streams, b"")
    with selectors.DefaultSelector() as selector:
        for name, stream in streams.items():
            selector.register(stream, selectors.EVENT_READ, name)
        while selector.get_map():
            for key, _ in selector.select():
                name = key.data
                data = os.read(key.fd, _READ_AT_ONCE)
                if not data:
                    selector.unregister(key.fileobj)
                lines, newline, rest = (rests[name] + data).rpartition(b"\n")
                if not data or len(rest) > _LINE_MAX:
                    lines, newline, rest = lines + newline + rest, b"", b""
                rests[name] = rest
                if lines or newline:
                    yield name, lines + newline
