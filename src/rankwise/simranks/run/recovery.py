"""`rankwise.recover` in simulated ranks: the line to the agent without a process at its other end.

A rank does the same as in `launch.recovery`. Where a real rank has a thread that listens to a
socket, a simulated one is told by the scheduler thread, and takes the recall as it takes any
signal: when it waits next. In virtual time that is at once.
"""

from collections import deque
from collections.abc import Callable

from rankwise.base.units import Duration
from rankwise.core.gang.vocabulary import RecoveryMessage, RecoveryOrder
from rankwise.drivers.real.recall_line import AgentWord
from rankwise.launch.inside.recovery import RECALL_SIGNAL, ReceivedWord, RecoverableRank
from rankwise.simranks.world.gates import Gate
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.world import running_rank

_LINE, _RECOVERABLE = "line to the agent", "rankwise.recover"


class _Word(Gate):
    """The next word of the agent."""

    __slots__ = ()

    def describe(self) -> str:
        """Say what is waited for."""
        return "a world in which to be called again (rankwise.recover)"


class SimulatedLine:
    """A simulated rank's line to its agent; a `launch.recovery.Line`.

    Args:
        rank: whose it is.
        on_message: is told what the rank says, and how long it may take to leave its function.
    """

    def __init__(self, rank: Rank, on_message: Callable[[RecoveryMessage, Duration], None]) -> None:
        self._rank = rank
        self._on_recovery_message = on_message
        self._words: deque[ReceivedWord] = deque()
        self._next = _Word()
        self._note: Callable[[AgentWord], None] = _nobody_listens
        rank.own_state[_LINE] = self

    def listen(self, rank: RecoverableRank) -> None:
        """Let it know each word at once."""
        self._note = rank.note

    def say(self, word: RecoveryMessage, recall_timeout: Duration) -> None:
        """Say a word to the agent."""
        self._rank.is_between_worlds = word is RecoveryMessage.YIELDED
        self._on_recovery_message(word, recall_timeout)

    def next_word(self) -> ReceivedWord:
        """Wait for a word of the agent."""
        while not self._words:
            self._next = _Word()
            self._rank.scheduler.wait(self._next)
        return self._words.popleft()

    def release(self) -> None:
        """There are no connections here that garbage could hold open."""

    def tell(self, word: AgentWord) -> None:
        """For the agent: say a word to the rank."""
        self._note(word)
        self._words.append((word, []))
        self._next.open()
        if word.word is RecoveryOrder.RECALL:
            self._rank.signal(RECALL_SIGNAL)


def line_of(rank: Rank) -> SimulatedLine | None:
    """The line of a rank; None if it has none, since no restarts are left."""
    line: SimulatedLine | None = rank.own_state.get(_LINE)
    return line


def recoverable_rank() -> RecoverableRank | None:
    """The simulated rank that calls this, if it can be recovered."""
    rank = running_rank()
    line = None if rank is None else line_of(rank)
    if rank is None or line is None:
        return None
    found: RecoverableRank | None = rank.own_state.get(_RECOVERABLE)
    if found is None:
        found = rank.own_state[_RECOVERABLE] = RecoverableRank(line)
    return found


def _nobody_listens(_word: AgentWord) -> None:
    """The rank has not called `recover` yet."""
