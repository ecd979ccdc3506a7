"""What errors of operations say, the same for all transports."""

from collections.abc import Iterable, Sequence

from rankwise.base.errors import CollectiveError, CollectiveTimeout, PeerDied
from rankwise.base.units import Duration, format_duration
from rankwise.core.matching import parties

NOTHING_YET = "has not come to any operation yet"


def last_in(call: str) -> str:
    """The last call of a rank that is known."""
    return f"was last in {call}"


def peers_died(
    doing: str, rank: int, fates: Iterable[tuple[int, str, str]], *, hint: str | None = None
) -> PeerDied:
    """Peers have ended: for each its rank, what became of it, and what it did last."""
    told = "; ".join(f"rank {peer} {fate}, it {last}" for peer, fate, last in fates)
    return PeerDied(f"{doing} cannot be completed on rank {rank}: {told}", hint=hint)


def peers_gave_up(
    doing: str, rank: int, reasons: Iterable[str], *, because_of_death: bool
) -> CollectiveError:
    """Peers have left an operation with an error."""
    kind = PeerDied if because_of_death else CollectiveError
    return kind(f"{doing} cannot be completed on rank {rank}: {'; '.join(reasons)}")


def timed_out(
    doing: str, rank: int, patience: Duration, missing: Iterable[tuple[int, str]]
) -> CollectiveTimeout:
    """Peers have not come: for each its rank, and what it did last."""
    told = "; ".join(f"rank {peer} is missing, it {last}" for peer, last in missing)
    return CollectiveTimeout(
        f"{doing} timed out on rank {rank} after {format_duration(patience)}: {told}"
    )


def mismatch(doings: Sequence[tuple[int, str]]) -> CollectiveError:
    """Ranks do different things: what each does, by ranks."""
    told = [
        f"rank {ranks[0]} is in {text}"
        if len(ranks) == 1
        else f"ranks {', '.join(map(str, ranks))} are in {text}"
        for text, ranks in parties(doings).items()
    ]
    return CollectiveError(
        "; ".join(told),
        hint="all ranks must call the same operations in the same order, with equal arguments",
    )
