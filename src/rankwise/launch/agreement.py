"""How the ranks of a node are brought to one step at which all of them stop.

The ranks that count their steps (`rankwise.should_stop`) are asked to stand, and a thread waits for
them: nothing but a futex tells when they do. Who has asked decides the step afterwards, at once if
there is one node, else with the others. The words are described in `drivers.real.stop_words`.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

from rankwise.drivers.real.stop_words import StopWords


class Agreement:
    """The ranks of this node on their way to a step at which all of the job stop.

    Args:
        words: in the ranks' segment; released by `close`.
        alive: the local ranks that have not ended.
        on_stood: is told, in a thread of its own, the largest step at which they stand.
    """

    def __init__(
        self, words: StopWords, *, alive: set[int], on_stood: Callable[[int], None]
    ) -> None:
        self.words = words
        self._alive = alive
        self._on_stood = on_stood
        self._lock = threading.Lock()
        self._is_over = False
        self._steppers = {rank for rank in alive if words.uses_steps(rank)}
        words.ask()
        self._thread = threading.Thread(target=self._watch, name="rankwise-stop", daemon=True)
        self._thread.start()

    def concerns(self, local_rank: int) -> bool:
        """Whether a rank counts its steps, so that it will stand."""
        return local_rank in self._steppers

    def on_over(self, local_rank: int) -> None:
        """A rank has ended: no rank waits for it any more."""
        with self._lock:
            self._alive.discard(local_rank)
        self.words.wake_waiter()

    def close(self) -> None:
        """End the thread."""
        self._is_over = True
        with suppress(OSError):  # the segment is gone, and so are its sleepers
            self.words.wake_waiter()
        self._thread.join()
        self.words.release()

    def _watch(self) -> None:
        seen = self.words.wait_standing(-1)
        while not self._is_over:
            with self._lock:
                step = self.words.standing_step(self._alive & self._steppers)
            if step is not None:
                self._on_stood(step)
                return
            seen = self.words.wait_standing(seen)
