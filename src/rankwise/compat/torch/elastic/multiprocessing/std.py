"""Which of a worker's two output streams, in torchrun's notation."""

import re
from collections.abc import Mapping
from enum import IntFlag
from typing import Union

__all__ = ["Std", "to_map"]

_ONE_FOR_ALL = re.compile(r"[0123]")
_BY_RANK = re.compile(r"([0-9]+:[0123],)*[0-9]+:[0123]")


class Std(IntFlag):
    """A choice of standard streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Union["Std", dict[int, "Std"]]:
        """Read `"3"` (all local ranks) or `"0:1,12:3"` (single ones).

        Raises:
            ValueError: the text is anything else.
        """
        # Not `launch.log_layout.parse_streams`: that refuses a rank which is named twice, and torch
        # takes its last choice; and this module is imported where launch must not be.
        if _ONE_FOR_ALL.fullmatch(vm):
            return cls(int(vm))
        if not _BY_RANK.fullmatch(vm):
            raise ValueError(
                f"{vm!r} is not a choice of streams, expected one of 0, 1, 2, 3 or a list such as "
                "0:1,12:3 (local rank:streams)"
            )
        pairs = (part.split(":") for part in vm.split(","))
        return {int(local_rank): cls(int(streams)) for local_rank, streams in pairs}


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """Spell a choice out for every local rank; one that a mapping leaves out gets `Std.NONE`."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}
