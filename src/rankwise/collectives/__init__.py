"""Collective operations for numpy programs: `from rankwise import collectives`."""

from rankwise.collectives.communicator import Communicator
from rankwise.collectives.default import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    default_communicator,
    rank,
    reduce_scatter,
    size,
)
from rankwise.collectives.transport import Transport

__all__ = [
    "Communicator",
    "Transport",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "default_communicator",
    "rank",
    "reduce_scatter",
    "size",
]
