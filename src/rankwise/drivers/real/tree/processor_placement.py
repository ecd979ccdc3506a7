"""On which processors a worker and its children run, if that is asked for.

Where the kernel puts two processes that take turns is its own choice, and waking a processor that
sleeps takes several times as long as the turn itself. Beside its parent, on the same processor, a
child begins as soon as the parent waits. It costs what the two could have done at the same time.
The thread stays there between runs too: to move it takes longer than a small task.
"""

import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path

_PROCESSORS = Path("/sys/devices/system/cpu")
_before: dict[int, set[int]] = {}
"""Where threads that are kept somewhere might run before, by their kernel's numbers."""
_keepers: dict[int, int] = {}
"""How many keep them."""


class Home:
    """The processor of a worker's thread, which it keeps until `leave`.

    Attributes:
        processor: its number.
        neighbours: those that share the last cache with it, itself included.
    """

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        allowed = _before.setdefault(self._thread, os.sched_getaffinity(0))
        _keepers[self._thread] = _keepers.get(self._thread, 0) + 1
        self.processor = ctypes.CDLL(None).sched_getcpu()
        if self.processor not in allowed:  # it is not told, or has just been forbidden
            self.processor = min(allowed)
        together = _sharing_the_last_cache(self.processor) & allowed
        self.neighbours = tuple(sorted(together or allowed))
        _let_run(self._thread, {self.processor})

    def leave(self) -> None:
        """Let the thread run where it might before, unless another worker keeps it."""
        _keepers[self._thread] -= 1
        if not _keepers[self._thread]:
            del _keepers[self._thread]
            _let_run(self._thread, _before.pop(self._thread))


def _let_run(thread: int, processors: set[int]) -> None:
    with suppress(OSError):  # it has ended, or the processors were taken away from this process
        os.sched_setaffinity(thread, processors)


def _sharing_the_last_cache(processor: int) -> frozenset[int]:
    """None where the system does not tell, as in some containers."""
    found: dict[int, frozenset[int]] = {}
    for cache in (_PROCESSORS / f"cpu{processor}" / "cache").glob("index*"):
        with suppress(OSError, ValueError):
            level = int((cache / "level").read_text())
            found[level] = processors_of((cache / "shared_cpu_list").read_text())
    return found[max(found)] if found else frozenset()


def processors_of(listed: str) -> frozenset[int]:
    """The numbers in a list as Linux writes it: `0-3,8`."""
    numbers: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
