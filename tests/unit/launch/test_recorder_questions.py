"""Questions to the recorders: nobody waits for ever, and what is told of the dead is the latest."""

import os
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.reactor import Reactor
from rankwise.drivers.real.report_pipe import Recorded
from rankwise.drivers.real.worker.bootstrap import Reporter
from rankwise.launch.looking.recorder_questions import RecorderQuestions

if TYPE_CHECKING:
    from rankwise.drivers.real.process_host import RealProcessHost


class TwoRanks:
    """The part of a host that questions need."""

    def __init__(self) -> None:
        self.links: dict[int, Any] = {
            rank: SimpleNamespace(is_over=False, has_raised=False) for rank in range(2)
        }

    def ask_recorders(self, _: int) -> frozenset[int]:
        return frozenset(self.links)


def test_who_cannot_answer_is_not_waited_for() -> None:
    clock, told = SystemClock(), []
    with Reactor(clock) as reactor:
        questions = RecorderQuestions(cast("RealProcessHost", TwoRanks()), reactor, clock)
        questions.ask(lambda: told.append("first"))
        questions.ask(lambda: told.append("second"))
        questions.on_recorded(0, Recorded(ask=2, groups=()))
        assert told == []
        while len(told) < 2:
            reactor.run_once()

    assert told == ["first", "second"]
    assert questions.answer_of(0, is_alive=True) is not None
    assert questions.answer_of(1, is_alive=True) is None


def test_last_words_are_later_than_an_answer() -> None:
    clock = SystemClock()
    with Reactor(clock) as reactor:
        questions = RecorderQuestions(cast("RealProcessHost", TwoRanks()), reactor, clock)
        questions.ask(lambda: None)
        answer, last_words = Recorded(ask=1, groups=()), Recorded(ask=-1, groups=())
        questions.on_recorded(0, answer)
        questions.on_recorded(0, last_words)

    assert questions.answer_of(0, is_alive=True) is answer
    assert questions.answer_of(0, is_alive=False) is last_words


def test_of_a_rank_that_ended_without_a_word_its_last_answer_is_known() -> None:
    clock, host = SystemClock(), TwoRanks()
    with Reactor(clock) as reactor:
        questions = RecorderQuestions(cast("RealProcessHost", host), reactor, clock)
        answers = [Recorded(ask=1, groups=()) for _ in range(2)]
        questions.ask(lambda: None)
        for rank, answer in enumerate(answers):
            questions.on_recorded(rank, answer)
        questions.ask(lambda: None)
        host.links[0].is_over = True

    assert questions.answer_of(0, is_alive=True) is answers[0]
    assert questions.answer_of(1, is_alive=True) is None, "it may have gone on since"


def test_of_questions_that_have_queued_the_last_is_answered() -> None:
    agent, worker = socket.socketpair()
    with agent, worker:
        agent.sendall(bytes([1, 2, 3]))
        agent.shutdown(socket.SHUT_WR)
        Reporter(os.dup(worker.fileno())).answer_for_recorder(lambda: "[]")
        heard = b""
        while b'"recorded"' not in heard:
            heard += agent.recv(4096)

    assert b'"ask": 3,' in heard
    assert heard.count(b'"recorded"') == 1
