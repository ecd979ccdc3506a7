"""Holds in words, for `rankwise replay`."""

from rankwise.base.units import format_duration
from rankwise.base.wording import ranks_in_words
from rankwise.core.watch.vocabulary import HoldReason, HoldStep, NoteHold

_REASONS = {
    HoldReason.ERROR: "{rank} raised an exception that may be another rank's doing",
    HoldReason.LIMIT: "a time limit ended {rank}, which may have waited for another rank",
    HoldReason.ABORT: "{rank} aborted in a collective call in which ranks disagree",
    HoldReason.LATENESS: "all ranks of this node had succeeded, and some may have been late",
    HoldReason.STOP: "the signal that ended {rank} may have been sent to the whole run",
}
_AWAITED = {
    HoldStep.STRAGGLING: "waited for ranks that were late to the call",
    HoldStep.ASKING_RANKS: "asked the ranks for their calls",
    HoldStep.ASKING_NODES: "asked the other nodes",
}


def hold_in_words(note: NoteHold, first_rank: int) -> str:
    """One line: which exits were held back, for how long, why, and the result.

    Args:
        note: what the watch noted.
        first_rank: the job's rank of the node's first worker.
    """
    rank = f"rank {first_rank + note.local_rank}"
    exits = ", ".join(
        f"of rank {first_rank + each.local_rank} for {format_duration(each.held)}"
        for each in note.exits
    )
    held = f"held back the exit{'s' if len(note.exits) > 1 else ''} {exits}"
    awaited = ", ".join(_AWAITED[step] for step in note.awaited if step in _AWAITED)
    parts = (_REASONS[note.reason].format(rank=rank), awaited, _result(note, rank))
    return f"{held}: {'; '.join(filter(None, parts))}"


def _result(note: NoteHold, rank: str) -> str:
    if note.reason is HoldReason.STOP:
        was_stopped = f"a stop followed, so {rank} was stopped"
        return was_stopped if note.is_stop else f"no stop followed, so {rank} has failed"
    if note.is_stop:
        return "the ranks were stopped meanwhile"
    if note.reason is HoldReason.LATENESS:
        return ""
    return f"blamed {ranks_in_words(note.accused)}" if note.accused else "blamed no other rank"
