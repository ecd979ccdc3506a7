"""Set two process attributes for which Python has no function.

The calls go through `_ctypes`, the core of `ctypes`, because the import of `ctypes` itself would
take a third of the guardian's start-up. Every `ctypes` function ends in `call_function`.
"""

import _ctypes
import os

TYPE_CHECKING = False  # `typing` would cost a third of the guardian's start-up
if TYPE_CHECKING:
    from typing import Any

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36
_SIGKILL = 9
_SIGCONT = 18

_call_function = _ctypes.call_function
_THIS_PROCESS: "Any" = None
_PRCTL = _ctypes.dlsym(_ctypes.dlopen(_THIS_PROCESS, os.RTLD_NOW), "prctl")
"""Address of the C library's prctl(2)."""


def adopt_orphans() -> None:
    """Become the new parent of every descendant whose own parent dies."""
    _set(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, which has forked it, ends.

    Ends this process at once if the parent has ended before the request took effect.
    """
    _set(_SET_PARENT_DEATH_SIGNAL, _SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + _SIGKILL)


def continue_with_parent_s_end() -> None:
    """Let the kernel wake this process up, if it is stopped, when its parent ends."""
    _set(_SET_PARENT_DEATH_SIGNAL, _SIGCONT)


def _set(option: int, value: int) -> None:
    if _call_function(_PRCTL, (option, value, 0, 0, 0)) != 0:
        raise OSError(f"the kernel refused prctl({option}, {value})")
