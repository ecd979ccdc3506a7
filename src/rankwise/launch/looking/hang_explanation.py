"""Why a run makes no progress, as it is told to people and compared from one look to the next."""

import msgspec

from rankwise.base.failure import BlameIdentity


class HangExplanation(msgspec.Struct, frozen=True):
    """Which ranks keep the others waiting, as far as one look can tell.

    Attributes:
        text: that, in a sentence: for people, and never compared.
        blame: what the calls of the ranks show.
        asleep: ranks that do nothing while others poll, where no call shows more.
        polling: these.
        stopped: ranks that are stopped by a signal.
    """

    text: str = ""
    blame: BlameIdentity | None = None
    asleep: tuple[int, ...] = ()
    polling: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether it explains nothing."""
        return self.agrees_with(HangExplanation())

    def agrees_with(self, other: "HangExplanation") -> bool:
        """Whether two looks have found the same."""
        return (self.blame, self.asleep, self.polling, self.stopped) == (
            other.blame,
            other.asleep,
            other.polling,
            other.stopped,
        )


class NodesAnswer(msgspec.Struct, frozen=True):
    """Answers of the nodes of a run to the question why it makes no progress.

    Attributes:
        explanation: of all nodes that have told; empty if they cannot tell.
        others: the other nodes, as people call them.
        silent: those of all nodes that have told nothing in time.
    """

    explanation: HangExplanation
    others: tuple[str, ...]
    silent: tuple[str, ...] = ()


def best_of(own: HangExplanation, told: NodesAnswer | None) -> HangExplanation:
    """What all nodes have found out together, or this one if they cannot tell."""
    return own if told is None or told.explanation.is_empty else told.explanation
