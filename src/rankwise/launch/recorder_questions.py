"""Asks the ranks of this node what torch's flight recorder has, and keeps their answers.

A question that follows another makes that void: answers carry the number of their question. A rank
that comes to its end, or destroys its groups, tells unasked: those are its last words.
"""

from collections.abc import Callable

from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.report_pipe import Recorded

_UNASKED = -1


class RecorderQuestions:
    """The questions of one attempt."""

    def __init__(self, host: RealProcessHost) -> None:
        self._host = host
        self._number = 0
        self._asked: frozenset[int] = frozenset()
        self._answers: dict[int, Recorded] = {}
        self._last_words: dict[int, Recorded] = {}
        self._on_answers: Callable[[], None] | None = None

    def ask(self, on_answers: Callable[[], None]) -> bool:
        """Ask all ranks that can be asked; whether there are any.

        `on_answers` is called once those that live have answered, unless another question follows.
        """
        self._number = (self._number + 1) % 256
        self._answers = {}
        self._on_answers = on_answers
        self._asked = self._host.ask_recorders(self._number)
        return bool(self._asked)

    def on_recorded(self, local_rank: int, recorded: Recorded) -> None:
        """A rank tells what its recorder has."""
        if recorded.ask == _UNASKED:
            self._last_words[local_rank] = recorded
        elif recorded.ask == self._number:
            self._answers[local_rank] = recorded
        over = {rank for rank, link in self._host.links.items() if link.is_over or link.error}
        if self._asked <= self._answers.keys() | over and self._on_answers is not None:
            on_answers, self._on_answers = self._on_answers, None
            on_answers()

    def told_by(self, local_rank: int, *, is_alive: bool) -> Recorded | None:
        """What is known of a rank: its answer, or its last words if it has come to its end."""
        last_words = None if is_alive else self._last_words.get(local_rank)
        return self._answers.get(local_rank) or last_words
