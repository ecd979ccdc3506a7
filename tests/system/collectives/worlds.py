"""Ranks that share a segment and do as a test tells them."""

import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec

from rankwise.drivers.real.segments import LEDGER_PHASES, LEDGER_WORDS, Segment
from rankwise.workers.domains import DomainSpec, create_domain

HOST_PROGRAM = Path(__file__).with_name("world_host.py")
PATIENCE_S = 110  # a machine under load may take half of that for 8 ranks and all dtypes


class World:
    """Some ranks; `function(communicator, *arguments)` is what they are told."""

    def __init__(self, size: int, *, buffer_bytes: int = 1 << 16, phases_passed: int = 0) -> None:
        self.size = size
        self.segment = Segment.create(size, buffer_bytes=buffer_bytes)
        self._pretend(phases_passed)
        self._start(self.segment.fd)

    def _start(self, fd: int, *options: str) -> None:
        pairs = [socket.socketpair() for _ in range(self.size)]
        fds = (fd, *(far.fileno() for _, far in pairs))
        self._host = subprocess.Popen(
            [sys.executable, str(HOST_PROGRAM), *options, *map(str, fds)],
            pass_fds=fds,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._channels = []
        for near, far in pairs:
            far.close()
            near.settimeout(PATIENCE_S)
            self._channels.append(near.makefile("rwb"))
            near.close()
        # Later, nobody shall be blamed for processes that are only now being forked.
        self.run(_nothing)

    def _pretend(self, phases_passed: int) -> None:
        layout, fd = self.segment.layout, self.segment.fd
        words = [(layout.arrivals, "=I", phases_passed * self.size % (1 << 32))]
        words += [
            (layout.ledgers + 8 * (LEDGER_WORDS * rank + LEDGER_PHASES), "=Q", phases_passed)
            for rank in range(self.size)
        ]
        for offset, code, value in words:
            os.pwrite(fd, struct.pack(code, value), offset)

    def tell(self, rank: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Let a rank begin."""
        # The ranks cannot import test modules, so what is defined there travels as it is.
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        frame = cloudpickle.dumps((function, arguments))
        self._channels[rank].write(struct.pack("=I", len(frame)) + frame)
        self._channels[rank].flush()

    def hear(self, rank: int) -> Any:
        """The value that the rank's function returned, or the exception that it raised."""
        (length,) = struct.unpack("=I", self._channels[rank].read(4))
        _, value = pickle.loads(self._channels[rank].read(length))
        return value

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Tell all ranks, and hear them all."""
        for rank in range(self.size):
            self.tell(rank, function, *arguments)
        return [self.hear(rank) for rank in range(self.size)]

    def wait_for_end_of(self, rank: int) -> int:
        """The exit code of the next rank that ends, which must be this one."""
        assert self._host.stdout is not None
        ended, code = self._host.stdout.readline().split()
        assert int(ended) == rank
        return int(code)

    def close(self) -> None:
        """Let all ranks end, and wait for it."""
        for channel in self._channels:
            channel.close()
        self._host.wait(PATIENCE_S)
        assert self._host.stdout is not None
        self._host.stdout.close()
        self._close_memory()

    def _close_memory(self) -> None:
        self.segment.close()


class WindowWorld(World):
    """Ranks of a domain; `function(member, *arguments)` is what they are told."""

    def __init__(self, spec: DomainSpec) -> None:
        self.size = spec.size
        self.region = create_domain(spec)
        assert self.region.fd is not None
        self._start(self.region.fd, f"--domain={msgspec.json.encode(spec).decode()}")

    def _close_memory(self) -> None:
        self.region.close()


def _nothing(communicator: object) -> None:
    pass
