"""What can be wrong with a value, an argument or a pointer that a chip worker is given."""

from rankwise.base.errors import ConfigError, TreeError, TreeValueError


class IndexOutOfRange(TreeValueError, IndexError):
    """There is no such tensor, scalar or worker."""


class UnknownName(TreeValueError, KeyError):
    """There is nothing of that name."""

    __str__ = ConfigError.__str__  # a KeyError shows its text quoted


class BadArguments(TreeValueError, TypeError):
    """A task's arguments do not fit the signature of what it calls; the message names which."""


class BadPointer(TreeError, ValueError):
    """An address that does not lie in memory of the one who is asked to use it."""


class InputWritten(TreeError):
    """A task of a worker with `check_inputs=True` has written to a tensor that is its INPUT."""


class DeviceMemoryExhausted(TreeError, MemoryError):
    """A chip has no room for what was to be placed in its memory."""
