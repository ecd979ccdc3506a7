"""A process that sees ranks end tells the others: a set of pidfds, and the regions they belong to.

A pidfd becomes readable when its process ends, so watching costs nothing until then. Three ways:

- A caller with a selector of its own registers `fileno()`, and calls `look` when it is readable.
- A caller with nothing else to do calls `wait`.
- Ranks that have no common parent watch each other: `start_thread` waits in a thread that ends
  with the process. A process with threads must not be forked, so this is for ranks that do not.

The watch does not reap: a process stays its parent's to wait for.
"""

import os
import select
import threading
from collections.abc import Mapping
from typing import Self

from rankwise.base.errors import WindowError
from rankwise.drivers.real.windows.region import WindowRegion


class PeerWatch:
    """Marks the ranks of a region dead when their processes end."""

    def __init__(self, region: WindowRegion, pids: Mapping[int, int]) -> None:
        """Watch `pids`, by rank; one that is already gone is marked at once."""
        self._region = region
        self._epoll = select.epoll()
        self._stop_reader, self._stop_writer = os.pipe()
        self._ranks: dict[int, int] = {}
        self._pids = dict(pids)
        self._thread: threading.Thread | None = None
        for rank, pid in sorted(pids.items()):
            self._begin(rank, pid)

    def _begin(self, rank: int, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._region.mark_dead(rank, f"process {pid}")
            return
        except OSError as error:
            self.close()
            raise WindowError(
                f"cannot watch process {pid}, rank {rank} of {self._region.name!r}: "
                f"{error.strerror}",
                hint="raise the limit of open files (ulimit -n)",
            ) from error
        self._ranks[pidfd] = rank
        self._epoll.register(pidfd, select.EPOLLIN)

    @property
    def living(self) -> list[int]:
        """The ranks that have not been seen to end."""
        return sorted(self._ranks.values())

    def fileno(self) -> int:
        """Readable when `look` has something to see."""
        return self._epoll.fileno()

    def look(self) -> list[int]:
        """Mark those that have ended since the last look; their ranks. Does not wait."""
        return self._mark(0.0)

    def wait(self) -> list[int]:
        """Wait until at least one ends or `close` is called, and mark who has; their ranks."""
        return self._mark(None) if self._ranks else []

    def start_thread(self) -> None:
        """Keep waiting in a thread, until all have ended or the watch is closed."""
        self._epoll.register(self._stop_reader, select.EPOLLIN)
        self._thread = threading.Thread(
            target=self._keep_waiting, name="rankwise-peer-watch", daemon=True
        )
        self._thread.start()

    def _keep_waiting(self) -> None:
        while self._ranks:
            if not self.wait():
                return

    def _mark(self, timeout: float | None) -> list[int]:
        ended = []
        for fd, _ in self._epoll.poll(timeout):
            rank = self._ranks.pop(fd, None)
            if rank is None:
                continue
            self._epoll.unregister(fd)
            os.close(fd)
            self._region.mark_dead(rank, f"process {self._pids[rank]}")
            ended.append(rank)
        return sorted(ended)

    def close(self) -> None:
        """Stop watching. Twice is once."""
        if self._epoll.closed:
            return
        os.close(self._stop_writer)
        if self._thread is not None:
            self._thread.join()
        for pidfd in self._ranks:
            os.close(pidfd)
        self._ranks.clear()
        os.close(self._stop_reader)
        self._epoll.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
