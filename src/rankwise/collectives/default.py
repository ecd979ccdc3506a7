"""The communicator of this process, made from what the agent left in the environment.

Inside a worker that rankwise started, that is the node's segment. Outside of any launcher it is a
world of one rank, so that a program can also be run alone. Under somebody else's launcher there is
nothing to communicate over, and it says so.
"""

import os
import threading
from collections.abc import Mapping

from numpy.typing import ArrayLike

from rankwise.base.errors import ConfigError
from rankwise.base.units import Duration
from rankwise.collectives.communicator import (
    DEFAULT_TIMEOUT,
    Array,
    Communicator,
    patience_from_seconds,
)
from rankwise.collectives.shared_memory import SharedMemoryTransport
from rankwise.collectives.transport import SolitaryTransport
from rankwise.drivers.real.segments import Segment

SEGMENT_VARIABLE = "RANKWISE_SEGMENT_FD"
TIMEOUT_VARIABLE = "RANKWISE_COLLECTIVE_TIMEOUT"

_default: Communicator | None = None
_making = threading.Lock()


def default_communicator() -> Communicator:
    """The communicator of this process, made by the first call."""
    global _default  # noqa: PLW0603  # one process is one rank: this is its identity
    if _default is None:
        with _making:
            if _default is None:
                _default = communicator_from_environment(os.environ)
    return _default


def communicator_from_environment(environment: Mapping[str, str]) -> Communicator:
    """Make the communicator that these variables describe."""
    timeout = _read_timeout(environment)
    if SEGMENT_VARIABLE not in environment:
        if "WORLD_SIZE" in environment:
            raise ConfigError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']!r}, but {SEGMENT_VARIABLE} is not set: "
                f"rankwise did not start this process, so it cannot reach the other ranks",
                hint="start the program with `rankwise run`, or unset WORLD_SIZE to run it alone",
            )
        return Communicator(SolitaryTransport(), timeout=timeout)
    segment = Segment.attach(_read_integer(environment, SEGMENT_VARIABLE))
    world_size = _read_integer(environment, "WORLD_SIZE")
    if world_size != segment.worker_count:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but the segment joins the {segment.worker_count} "
            f"workers of this node only: collectives do not reach other nodes yet"
        )
    rank = _read_integer(environment, "RANK")
    transport = SharedMemoryTransport(segment, rank, os.getpid())
    return Communicator(transport, timeout=timeout)


def _read_integer(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None or not text.strip().isdecimal():
        given = "is not set" if text is None else f"is {text!r}"
        raise ConfigError(f"{name} {given}, expected a whole number as rankwise sets it")
    return int(text)


def _read_timeout(environment: Mapping[str, str]) -> Duration:
    text = environment.get(TIMEOUT_VARIABLE)
    if not text:
        return DEFAULT_TIMEOUT
    return patience_from_seconds(text, TIMEOUT_VARIABLE)


def rank() -> int:
    """This process's number among all ranks, from 0."""
    return default_communicator().rank


def size() -> int:
    """How many ranks there are."""
    return default_communicator().size


def all_reduce(array: ArrayLike, op: str = "sum", out: Array | None = None) -> Array:
    """Combine the arrays of all ranks element by element; every rank gets the result.

    Args:
        array: what `numpy.asarray` takes, of the same shape and dtype on all ranks.
        op: sum, mean, max, min or prod, in the arrays' own dtype: integers wrap around, booleans
            are or-ed by sum and and-ed by prod, mean is for floats only.
        out: an array of the result's shape and dtype to fill and return, perhaps `array` itself.

    Returns:
        An array of the same shape and dtype, equal to the bit on all ranks.

    Raises:
        PeerDied: a rank has ended, so it will never come.
        CollectiveTimeout: a rank has not come within RANKWISE_COLLECTIVE_TIMEOUT (300 s).
        CollectiveError: ranks called different things, or one gave up. After any of these three
            every further operation raises it.
        ConfigError: an argument cannot be used; nothing has happened yet.
    """
    return default_communicator().all_reduce(array, op, out)


def reduce_scatter(array: ArrayLike, op: str = "sum", out: Array | None = None) -> Array:
    """Combine the arrays of all ranks, and give to rank r the r-th row of the result.

    Args:
        array: one row per rank, shape `(size, …)`; the same shape and dtype on all ranks.
        op: sum, mean, max, min or prod, in the arrays' own dtype: integers wrap around, booleans
            are or-ed by sum and and-ed by prod, mean is for floats only.
        out: an array of the result's shape and dtype to fill and return.

    Returns:
        This rank's row, of shape `(…)`.

    Raises:
        PeerDied: a rank has ended, so it will never come.
        CollectiveTimeout: a rank has not come within RANKWISE_COLLECTIVE_TIMEOUT (300 s).
        CollectiveError: ranks called different things, or one gave up. After any of these three
            every further operation raises it.
        ConfigError: an argument cannot be used; nothing has happened yet.
    """
    return default_communicator().reduce_scatter(array, op, out)


def all_gather(array: ArrayLike, out: Array | None = None) -> Array:
    """Stack the arrays of all ranks; every rank gets the result.

    Args:
        array: what `numpy.asarray` takes, of the same shape and dtype on all ranks; any dtype
            that holds no Python objects.
        out: an array of the result's shape and dtype to fill and return.

    Returns:
        An array of shape `(size, …)` whose row r is rank r's.

    Raises:
        PeerDied: a rank has ended, so it will never come.
        CollectiveTimeout: a rank has not come within RANKWISE_COLLECTIVE_TIMEOUT (300 s).
        CollectiveError: ranks called different things, or one gave up. After any of these three
            every further operation raises it.
        ConfigError: an argument cannot be used; nothing has happened yet.
    """
    return default_communicator().all_gather(array, out)


def broadcast(array: ArrayLike, root: int = 0, out: Array | None = None) -> Array:
    """Return the array of rank `root` on every rank.

    Args:
        array: what `numpy.asarray` takes, of the same shape and dtype on all ranks; only the
            root's values matter.
        root: the rank whose array it is.
        out: an array of the result's shape and dtype to fill and return, perhaps `array` itself.

    Returns:
        The root's array.

    Raises:
        PeerDied: a rank has ended, so it will never come.
        CollectiveTimeout: a rank has not come within RANKWISE_COLLECTIVE_TIMEOUT (300 s).
        CollectiveError: ranks called different things, or one gave up. After any of these three
            every further operation raises it.
        ConfigError: an argument cannot be used; nothing has happened yet.
    """
    return default_communicator().broadcast(array, root, out)


def barrier(timeout: float | None = None) -> None:
    """Return when all ranks have called it.

    Args:
        timeout: seconds to wait, this time, instead of RANKWISE_COLLECTIVE_TIMEOUT (300 s).

    Raises:
        PeerDied: a rank has ended, so it will never come.
        CollectiveTimeout: a rank has not come in time.
        CollectiveError: ranks called different things, or one gave up. After any of these three
            every further operation raises it.
        ConfigError: `timeout` cannot be used; nothing has happened yet.
    """
    default_communicator().barrier(timeout)
