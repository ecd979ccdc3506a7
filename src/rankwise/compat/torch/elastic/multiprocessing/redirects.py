"""Redirects a standard stream of the running process to a file, at the level of descriptors.

Prints of Python, writes of C code and output of child processes all end in the file, because
descriptor 1 or 2 itself is exchanged. Three buffers lie on the way (Python's, C's, and a Python
stream that has another descriptor, as under a test runner), so both are flushed before the exchange
and before it is undone.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextlib import redirect_stderr as _swap_stderr
from contextlib import redirect_stdout as _swap_stdout
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctypes import CDLL

__all__ = ["get_libc", "redirect", "redirect_stderr", "redirect_stdout"]

_DESCRIPTORS = {"stdout": 1, "stderr": 2}


def get_libc() -> "CDLL":
    """Load the C library of this process."""
    import ctypes  # noqa: PLC0415  # not before something is redirected

    return ctypes.CDLL(None)


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """Send `std` to a file, which is emptied first, for the time of a `with` block.

    Args:
        std: `"stdout"` or `"stderr"`.
        to_file: the file's path.

    Raises:
        ValueError: `std` is neither.
        OSError: the file cannot be opened.
    """
    if std not in _DESCRIPTORS:
        raise ValueError(f"unknown standard stream {std!r}, expected 'stdout' or 'stderr'")
    with ExitStack() as stack:
        target = stack.enter_context(open(to_file, "wb", buffering=0))
        _flush(std)
        for descriptor in _descriptors_of(std):
            _exchange(stack, descriptor, target.fileno())
        if _descriptor_of_python_stream(std) is None:
            swap = _swap_stdout if std == "stdout" else _swap_stderr
            text = stack.enter_context(open(to_file, "a", buffering=1))
            stack.enter_context(swap(text))
        # Last in, first out: what is buffered belongs to the file.
        stack.callback(_flush, std)
        yield


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")


def _exchange(stack: ExitStack, descriptor: int, target: int) -> None:
    """Make `descriptor` mean `target` until `stack` closes."""
    original = os.dup(descriptor)
    stack.callback(os.close, original)
    stack.callback(os.dup2, original, descriptor)
    os.dup2(target, descriptor)


def _descriptors_of(std: str) -> set[int]:
    """The stream's own number, and the one that Python writes to if that is another."""
    numbers = {_DESCRIPTORS[std]}
    python_descriptor = _descriptor_of_python_stream(std)
    if python_descriptor is not None:
        numbers.add(python_descriptor)
    return numbers


def _descriptor_of_python_stream(std: str) -> int | None:
    stream: Any = getattr(sys, std)
    try:
        number: int = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None  # no stream, one in memory, or a closed one
    return number


def _flush(std: str) -> None:
    stream = getattr(sys, std)
    if stream is not None and not getattr(stream, "closed", False):
        stream.flush()
    get_libc().fflush(None)
