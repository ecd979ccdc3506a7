"""Shows another command line of this process than the one that it was started with.

For a fork that stands for an interpreter of its own: `ps`, `pkill -f train.py` and reports of what
a rank has left running find the words that they would find there. Only automatic fork servers load
this module, before they fork.
"""

import ctypes
import mmap
import os
import struct

_SET_MEMORY_MAP = (35, 14)
"""PR_SET_MM, PR_SET_MM_MAP: needs no capability, but a kernel with CONFIG_CHECKPOINT_RESTORE."""
_NO_FILE = -1
_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_void_p
_shown: list[mmap.mmap] = []
"""Where the kernel reads: never given back."""


def show_command_line(words: list[str]) -> None:
    """Let /proc/PID/cmdline have these words; where the kernel cannot, it stays as it is."""
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    # The kernel shows anonymous private memory only.
    memory = mmap.mmap(-1, len(text), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(text)
    try:
        with open("/proc/self/stat", "rb") as file:  # as proc(5) numbers its fields, from 1
            fields = [b"", b"", b"", *file.read().rpartition(b")")[2].split()]
    except OSError:
        return
    code, data, heap_start = fields[26:28], fields[45:47], fields[47]
    stack_start, environment = fields[28], fields[50:52]
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    known = [int(each) for each in (*code, *data, heap_start)]
    rest = [int(each) for each in environment]
    layout = (*known, _libc.sbrk(0), int(stack_start), start, start + len(text), *rest)
    packed = struct.pack("=11QQIi", *layout, 0, 0, _NO_FILE)
    if _libc.prctl(*_SET_MEMORY_MAP, ctypes.c_char_p(packed), len(packed), 0) == 0:
        _shown.append(memory)
