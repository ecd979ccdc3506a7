"""The options that say to which CPUs workers are bound, as torch's `torch.numa.binding` has them.

Objects of torch's own classes are taken everywhere too; these are for programs without torch.
"""

from dataclasses import dataclass
from enum import Enum

__all__ = ["AffinityMode", "NumaOptions"]


class AffinityMode(str, Enum):  # noqa: UP042  # str() of a member is torch's, with the class name
    """What a worker shares with its device, or has to itself."""

    NODE = "node"
    SOCKET = "socket"
    EXCLUSIVE = "exclusive"
    CORE_COMPLEX = "core-complex"


@dataclass(frozen=True)
class NumaOptions:
    """How workers are bound.

    Attributes:
        affinity_mode: see `AffinityMode`.
        should_fall_back_if_binding_fails: whether workers are left unbound then.
    """

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False
