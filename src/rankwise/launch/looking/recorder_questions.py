"""Asks the ranks of this node what torch's flight recorder has, and keeps their answers.

Answers carry the number of their question, and a question that follows another makes the answers to
that void: the later ones serve both. No question waits for longer than `ANSWER_PATIENCE`, since a
rank that holds the interpreter in C cannot answer. A rank that comes to its end, or destroys its
groups, tells unasked: those are its last words. Of one that was ended without any, as by the limit
of a section, the answer before is kept.
"""

from collections.abc import Callable

from rankwise.base.units import MILLISECOND, Duration, after
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.reactor import Reactor, ReactorTimer
from rankwise.drivers.real.report_pipe import Recorded
from rankwise.ports.clock import Clock

ANSWER_PATIENCE = Duration(500 * MILLISECOND)
_UNASKED = -1


class RecorderQuestions:
    """The questions of one attempt."""

    def __init__(self, host: RealProcessHost, reactor: Reactor, clock: Clock) -> None:
        self._host = host
        self._reactor = reactor
        self._clock = clock
        self._number = 0
        self._asked: frozenset[int] = frozenset()
        self._answers: dict[int, Recorded] = {}
        self._last_words: dict[int, Recorded] = {}
        self._last_answers: dict[int, Recorded] = {}
        """The latest to earlier questions."""
        self._waiting: list[ReactorTimer] = []

    def ask(self, on_answers: Callable[[], None]) -> bool:
        """Ask all ranks that can be asked; whether there are any.

        `on_answers` is called once: when those that live have answered, or patience is over.
        """
        self._number = (self._number + 1) % 256
        self._last_answers |= self._answers
        self._answers = {}
        self._asked = self._host.ask_recorders(self._number)
        if self._asked:
            patience_ends_at = after(self._clock.now(), ANSWER_PATIENCE)
            self._waiting.append(self._reactor.call_at(patience_ends_at, on_answers))
        return bool(self._asked)

    def on_recorded(self, local_rank: int, recorded: Recorded) -> None:
        """A rank tells what its recorder has."""
        if recorded.ask == _UNASKED:
            self._last_words[local_rank] = recorded
        elif recorded.ask == self._number:
            self._answers[local_rank] = recorded
        if not self.awaits_answers:
            waiting, self._waiting = self._waiting, []
            for timer in waiting:
                timer.fire()

    @property
    def awaits_answers(self) -> bool:
        """Whether ranks that live have not answered the latest question."""
        return not self._asked <= self._answers.keys() | self._over

    @property
    def _over(self) -> set[int]:
        return {rank for rank, link in self._host.links.items() if link.is_over or link.has_raised}

    def answer_of(self, local_rank: int, *, is_alive: bool) -> Recorded | None:
        """What is known of a rank: its answer, but its last words if it has come to its end.

        One that is over may still be taken for alive, as it waits for others by its last answer.
        """
        answer = self._answers.get(local_rank)
        if not is_alive:
            return self._last_words.get(local_rank, answer)
        last = self._last_answers.get(local_rank) if local_rank in self._over else None
        return answer or last
