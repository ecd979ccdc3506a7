"""Memory that arrays travel in: a memfd for each, whose descriptor goes to the other process.

The kernel keeps the memory while a descriptor or a mapping of it is left, in whatever process, and
not longer: nothing has a name, and nothing is left behind by SIGKILL.

A mapping keeps no descriptor open, unlike one of Python's `mmap` before 3.13: a program that holds
two thousand arrays would run out of files. So the C library is called directly.

Arrays of `new_shared` are mapped by all processes that they are sent to. Each of these keeps the
descriptor, to send the array, or a part of it, on without a copy.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from enum import IntEnum
from pickle import PickleBuffer
from typing import Any

SHARE_BYTES_MIN = 1 << 20
"""What is smaller travels in the pickle: to map it would take longer than to copy it."""
_WRITE_BYTES_MAX = 1 << 30
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class MappingMode(IntEnum):
    """What a receiver may do with an array's memory."""

    READ = 0
    PRIVATE = 1
    """Write; no other process sees it. Pages are copied when they are first written."""
    SHARED = 2
    """Write, and all see it."""


_PROTECTION = {
    MappingMode.READ: (mmap.PROT_READ, mmap.MAP_SHARED),
    MappingMode.PRIVATE: (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE),
    MappingMode.SHARED: (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED),
}

_shared: dict[int, tuple[int, int]] = {}
"""Mappings whose memory can be sent as it is: by their first address, the end and descriptor."""


def new_shared(size_bytes: int) -> "memoryview":
    """Zeroed memory that reaches other processes without a copy; it goes with the last view."""
    fd = os.memfd_create("rankwise-pool", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, max(size_bytes, 1))
        return _mapped_and_kept(fd, 0, size_bytes, MappingMode.SHARED)
    except BaseException:
        os.close(fd)
        raise


def written(buffer: PickleBuffer) -> tuple[int, int]:
    """A new descriptor of memory that has a copy of a buffer, and its size."""
    fd = os.memfd_create("rankwise-pool", os.MFD_CLOEXEC)
    try:
        with buffer.raw() as whole:
            size_bytes = whole.nbytes
            # Not through a mapping: the kernel need neither zero the pages nor fault them in.
            rest = whole
            while rest:
                rest = rest[os.write(fd, rest[:_WRITE_BYTES_MAX]) :]
    except BaseException:
        os.close(fd)
        raise
    return fd, size_bytes


def found_shared(buffer: PickleBuffer) -> tuple[int, int, int] | None:
    """Where a buffer lies, if in memory of `new_shared`: its descriptor, offset and size."""
    if not _shared:
        return None
    with buffer.raw() as whole:
        address = _address_of(whole)
        for start, (end, fd) in [*_shared.items()]:
            if start <= address and address + whole.nbytes <= end:
                return fd, address - start, whole.nbytes
    return None


def map_received(
    fd: int, offset: int, size_bytes: int, mapping: MappingMode, *, is_shared: bool
) -> "memoryview":
    """Map what has come and take over its descriptor; with `is_shared` it can be sent on."""
    if is_shared:
        try:
            return _mapped_and_kept(fd, offset, size_bytes, mapping)
        except BaseException:
            os.close(fd)
            raise
    try:
        if not size_bytes:
            return memoryview(b"")
        owner = _mapped(fd, size_bytes, mapping)
        weakref.finalize(owner, _libc.munmap, ctypes.addressof(owner), size_bytes).atexit = False
        return _view_of(owner, mapping)
    finally:
        os.close(fd)


def _mapped_and_kept(fd: int, offset: int, size_bytes: int, mapping: MappingMode) -> "memoryview":
    # All that is before, too, so that offsets are those of the descriptor.
    length = max(offset + size_bytes, 1)
    owner = _mapped(fd, length, mapping)
    start = ctypes.addressof(owner)
    _shared[start] = start + length, fd
    weakref.finalize(owner, _release_shared, start, length, fd).atexit = False
    return _view_of(owner, mapping)[offset : offset + size_bytes]


def _release_shared(start: int, length: int, fd: int) -> None:
    del _shared[start]  # before another mapping may get the address
    _libc.munmap(start, length)
    os.close(fd)


def _mapped(fd: int, length: int, mapping: MappingMode) -> Any:
    protection, flags = _PROTECTION[mapping]
    address = _libc.mmap(None, length, protection, flags, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {length} bytes: {os.strerror(number)}")
    return (ctypes.c_char * length).from_address(address)


def _view_of(owner: Any, mapping: MappingMode) -> "memoryview":
    view = memoryview(owner).cast("B")
    return view.toreadonly() if mapping is MappingMode.READ else view


def _address_of(view: "memoryview") -> int:
    interface = getattr(view.obj, "__array_interface__", None)
    if interface is not None:  # read-only memory is found in no other way
        return int(interface["data"][0])
    return 0 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


class Buffers:
    """Collects the buffers of a pickle that travel beside it; the callback of a pickler.

    Attributes:
        found: these buffers, in their order.
    """

    def __init__(self) -> None:
        self.found: list[PickleBuffer] = []
        self._private: list[PickleBuffer] = []

    def __call__(self, buffer: PickleBuffer) -> bool:
        """Take a buffer; whether it is to travel in the pickle instead."""
        with buffer.raw() as whole:
            is_small = whole.nbytes < SHARE_BYTES_MIN and not (_shared and found_shared(buffer))
            if is_small or len(self.found) >= BUFFERS_MAX:
                return True
        self.found.append(buffer)
        return False

    def mark_private(self, buffer: PickleBuffer) -> None:
        """Have the receiver write into a copy of its own: a tensor cannot be read-only."""
        self._private.append(buffer)

    def described(self) -> Iterator[tuple[PickleBuffer, bool]]:
        """The buffers, each with whether it is private."""
        private = {id(buffer) for buffer in self._private}
        for buffer in self.found:
            yield buffer, id(buffer) in private


BUFFERS_MAX = 200
"""In one message: the kernel lets 253 descriptors travel together."""
