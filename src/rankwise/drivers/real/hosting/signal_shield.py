"""Lets a program ignore signals for which it has handlers.

A scheduler that ends a job signals all of its processes, wherever they are: SLURM those of the
step, systemd those of the control group. A program that serves the others has to outlive them, but
it handles SIGTERM, and no disposition or mask that it inherits stays. A filter of the kernel does
(seccomp): it answers `rt_sigaction` for these signals with success, and nothing is done.
"""

import ctypes
import os
import signal
import struct
import subprocess
from collections.abc import Collection
from functools import partial

_SET_NO_NEW_PRIVILEGES = 38
"""Without it only root may set a filter; it keeps the program from becoming another user."""
_SET_SECCOMP, _MODE_FILTER = 22, 2
_ARCHITECTURES = {"x86_64": (0xC000003E, 13), "aarch64": (0xC00000B7, 134)}
"""Of `uname`: the kernel's number for it, and that of `rt_sigaction` there."""

# Instructions of the filter, and where in `struct seccomp_data` they look. To compare is to skip as
# many instructions as the second number says if it is equal, as the third says if not.
_LOAD, _COMPARE, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _SUCCEED = 0x7FFF0000, 0x00050000

_prctl = ctypes.CDLL(None, use_errno=True).prctl
_prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, *3 * (ctypes.c_void_p,))
"""Looked up before there are children: between fork and exec as little as possible is done."""


def ignore_for_good(signals: Collection[signal.Signals]) -> None:
    """Ignore signals in this process and in each program that it becomes or starts.

    Call it in a child, before exec.

    Raises:
        OSError: this kernel, or its kind of machine, does not do that. The signals are ignored
            until the program sets handlers.
    """
    for each in signals:
        signal.signal(each, signal.SIG_IGN)
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(f"no filter of system calls is known for {machine}")
    code = _filter(*_ARCHITECTURES[machine], signals)
    kept = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(kept))
    for option, value, pointer in (
        (_SET_NO_NEW_PRIVILEGES, 1, None),
        (_SET_SECCOMP, _MODE_FILTER, program),
    ):
        if _prctl(option, value, pointer, None, None) != 0:
            raise OSError(ctypes.get_errno(), f"the kernel refused prctl({option})")


def can_ignore_for_good() -> bool:
    """Whether this kernel, and what the process is confined by, lets programs be started so."""
    command = ["/bin/sh", "-c", ":"]
    try:
        subprocess.run(command, check=False, preexec_fn=partial(ignore_for_good, ()))
    except subprocess.SubprocessError:  # whatever was raised before exec
        return False
    return True


def _filter(architecture: int, rt_sigaction: int, signals: Collection[signal.Signals]) -> bytes:
    """A program for the kernel: success without a deed for these calls, all others as ever."""
    allow = len(signals) + 5
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_COMPARE, 0, allow - 2, architecture),
        (_LOAD, 0, 0, _NUMBER),
        (_COMPARE, 0, allow - 4, rt_sigaction),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
    ]
    # From the signal that is asked for, over the others and the way for all else.
    lines += [(_COMPARE, len(signals) - place, 0, each) for place, each in enumerate(signals)]
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _SUCCEED)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
