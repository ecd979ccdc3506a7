"""A rank whose device is full: torch's own error, with who wanted how much, and who holds it."""

from rankwise.base.errors import DEVICE_FULL_EXIT_CODE
from rankwise.simranks.prediction.clocks import RankClock
from rankwise.simranks.prediction.device_memory import DeviceFull
from rankwise.simranks.prediction.summary import gibibytes, held_in_words


def out_of_memory(full: DeviceFull, clock: RankClock, kind: type[Exception]) -> Exception:
    """The error of a rank, of torch's type."""
    limit = clock.memory.limit or 0
    taker = "" if full.taker is None else f", in {full.taker}"
    sizes = f"{gibibytes(full.wanted)} of {gibibytes(limit)} GiB"
    lines = [f"out of memory on rank {clock.number}: {sizes}{taker}"]
    if full.in_pieces:
        lines.append(
            f"  {gibibytes(full.in_pieces)} GiB are free in pieces that are too small; "
            "PYTORCH_ALLOC_CONF=expandable_segments:True joins them"
        )
    records = clock.memory.holder_records
    if records is not None:
        lines += [f"  {row}" for row in held_in_words(records.present())]
    error = kind("\n".join(lines))
    error.rankwise_exit_code = DEVICE_FULL_EXIT_CODE  # type: ignore[attr-defined]  # what the bottom of the process looks for
    return error
