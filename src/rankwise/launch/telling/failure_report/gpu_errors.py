"""What torch says when a GPU has no more memory, in a field of a report.

torch tells it in a sentence alone, so the sentence is read (ADR 0089).
"""

import re
from collections.abc import Mapping

from rankwise.base.failure import ErrorRecord

_SIZE = r"([\d.]+ [KMGT]?i?B)"
_WANTED = re.compile(rf"CUDA out of memory\. Tried to allocate {_SIZE}")
_FREE = re.compile(rf"GPU (\d+) has a total capacity of {_SIZE} of which {_SIZE} is free")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_ALLOCATED = re.compile(rf"allocated memory {_SIZE} is allocated by PyTorch")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")


def memory_lines(error: ErrorRecord, ranks: Mapping[int, int]) -> tuple[str, ...]:
    """What an out-of-memory error of torch tells: what was wanted, what is free, who holds it.

    Args:
        error: of any kind; others have no lines.
        ranks: the ranks of processes, to name those that torch numbers.
    """
    wanted = _WANTED.search(error.message)
    if wanted is None:
        return ()
    lines = [f"{wanted[1]} more wanted"]
    if (free := _FREE.search(error.message)) is not None:
        lines[0] += f"; GPU {free[1]} has {free[3]} free of {free[2]}"
    if (own := _OWN.search(error.message)) is not None:
        line = f"this rank holds {own[1]}"
        details = []
        if (allocated := _ALLOCATED.search(error.message)) is not None:
            details.append(f"{allocated[1]} in tensors")
        if (unused := _UNUSED.search(error.message)) is not None:
            details.append(f"{unused[1]} reserved and unused")
        lines.append(f"{line}: {', '.join(details)}" if details else line)
    if error.tensors:
        lines.append(error.tensors)
    for pid, size in _OTHERS.findall(error.message):
        rank = ranks.get(int(pid))
        lines.append(f"{f'process {pid}' if rank is None else f'rank {rank}'} holds {size}")
    return tuple(lines)
