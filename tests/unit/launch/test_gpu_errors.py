"""What reports tell of a GPU's memory and of errors that come late, from torch's own words."""

import pytest

from rankwise.base.failure import ErrorRecord, Failure, FailureCause
from rankwise.base.units import Instant
from rankwise.launch.telling.failure_report.gpu_errors import memory_lines
from rankwise.launch.telling.failure_report.hints import hint_for

# As CUDACachingAllocator.cpp of torch 2.13 writes it.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has a total capacity of 79.11 GiB of "
    "which 2.50 GiB is free. Process 4711 has 500.00 MiB memory in use. Process 99 has 1.00 GiB "
    "memory in use. Including non-PyTorch memory, this process has 75.12 GiB memory in use. Of the "
    "allocated memory 66.00 GiB is allocated by PyTorch, and 8.20 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
LATE = (
    "CUDA error: device-side assert triggered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)


def record(message: str, tensors: str = "") -> ErrorRecord:
    return ErrorRecord(
        type="torch.AcceleratorError", message=message, traceback="",
        raised_at=Instant(0), wall_ns=0, tensors=tensors,
    )  # fmt: skip


def failed(message: str) -> Failure:
    return Failure(
        local_rank=0, attempt=0, cause=FailureCause.RAISED, at=Instant(0), error=record(message)
    )


def test_memory_is_told_by_its_holders_with_their_ranks() -> None:
    tensors = "parameters 30 GiB, other tensors 36 GiB"

    assert memory_lines(record(OUT_OF_MEMORY, tensors), {4711: 2}) == (
        "20.00 GiB more wanted; GPU 3 has 2.50 GiB free of 79.11 GiB",
        "this rank holds 75.12 GiB: 66.00 GiB in tensors, 8.20 GiB reserved and unused",
        "parameters 30 GiB, other tensors 36 GiB",
        "rank 2 holds 500.00 MiB",
        "process 99 holds 1.00 GiB",
    )


@pytest.mark.parametrize("message", ["", "CUDA error: out of memory", "out of memory"])
def test_other_errors_have_no_lines_of_memory(message: str) -> None:
    assert memory_lines(record(message), {}) == ()


def test_asynchronous_error_is_told_with_the_variable_that_makes_it_synchronous() -> None:
    assert "CUDA_LAUNCH_BLOCKING=1" in hint_for(failed(LATE))
    assert "CUDA_LAUNCH_BLOCKING" not in hint_for(failed(OUT_OF_MEMORY))
    assert "expandable_segments" in hint_for(failed(OUT_OF_MEMORY))
