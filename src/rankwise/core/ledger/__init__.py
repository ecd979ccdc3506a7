"""The ledger of collectives: who has come to which call, and so who keeps the others waiting."""

from rankwise.core.ledger.books import Book, Call, Fate, Group, Stage
from rankwise.core.ledger.verdicts import Verdict, Wait, find_verdict, waits_of
from rankwise.core.ledger.words import number_text, wait_in_words

__all__ = [
    "Book",
    "Call",
    "Fate",
    "Group",
    "Stage",
    "Verdict",
    "Wait",
    "find_verdict",
    "number_text",
    "wait_in_words",
    "waits_of",
]
