"""Memory of the host that buffers of a chip are loaded from and stored to."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from mmap import mmap
from typing import Any

import numpy as np

from rankwise.base.errors import TreeValueError
from rankwise.workers.bootstrap import HostBufferStaging
from rankwise.workers.errors import UnknownName

StagingSource = Callable[[str], Any]
"""From a name to memory: anything that has the buffer protocol."""


def memory_with(array: Any) -> mmap:
    """Memory that processes which are forked from now on share, with what the array holds."""
    array = np.ascontiguousarray(array)
    memory = mmap(-1, max(1, array.nbytes))
    np.frombuffer(memory, array.dtype, array.size)[...] = array.reshape(-1)
    return memory


def array_staged(memory: Mapping[str, Any], name: str, dtype: Any) -> Any:
    """What lies in the staged memory of a name, as a flat array.

    Raises:
        UnknownName: nothing was staged under this name.
    """
    if name not in memory:
        raise UnknownName(
            f"nothing was staged as {name!r}",
            hint=f"staged are: {', '.join(memory) or 'none'}",
        )
    return np.frombuffer(memory[name], dtype)


def posix_shared_memory(name: str) -> mmap:
    """The POSIX shared memory of a name, mapped; its maker has to remove it.

    Raises:
        UnknownName: there is none.
    """
    # Not multiprocessing's SharedMemory: a process that only looks would remove it at its end.
    path = os.path.join("/dev/shm", name.removeprefix("/"))  # noqa: S108, PTH118  # where they lie
    if not name or "/" in name.removeprefix("/"):
        raise UnknownName(f"{name!r} is not a name of shared memory")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise UnknownName(
            f"there is no shared memory {name!r}: {error.strerror}",
            hint="give the name that stage() returned, or that of a multiprocessing SharedMemory",
        ) from error
    try:
        return mmap(fd, 0)
    finally:
        os.close(fd)


@contextmanager
def staged(source: StagingSource, staging: HostBufferStaging) -> Iterator[int]:
    """The address of staged memory, which stays mapped meanwhile.

    Raises:
        ConfigError: it has fewer bytes than it should.
    """
    memory = source(staging.shm_name)
    view = np.frombuffer(memory, np.uint8)
    try:
        if view.size < staging.size:
            raise TreeValueError(
                f"the staging {staging.shm_name!r} of buffer {staging.name!r} has {view.size} "
                f"bytes, expected {staging.size}"
            )
        yield int(view.ctypes.data)
    finally:
        del view
        if isinstance(memory, mmap):
            memory.close()
