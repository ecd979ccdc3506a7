"""The communicator of this process, made from what the agent left in the environment.

Inside a worker that rankwise started, that is the node's segment, and among several nodes what
connects the ranks of all of them. Outside of any launcher it is a world of one rank, so that a
program can also be run alone. Under another launcher there is nothing to communicate over, and it
says so.
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
from rankwise.collectives.ordered_reductions import ReductionName
from rankwise.collectives.shared_memory import SharedMemoryTransport
from rankwise.collectives.transport import SolitaryTransport, Transport
from rankwise.drivers.real.segments import SEGMENT_VARIABLE, Segment
from rankwise.drivers.real.worker.call_ring import ring_of_process

KEY_VARIABLE = "RANKWISE_COLLECTIVES_KEY"
"""What the ranks of this round prove to each other; set where there are several nodes."""
LISTENER_VARIABLE = "RANKWISE_COLLECTIVES_FD"
"""The socket of rank 0 to which all connect first."""
TIMEOUT_VARIABLE = "RANKWISE_COLLECTIVE_TIMEOUT"
SIMULATED_VARIABLE = "RANKWISE_SIMULATED"
"""What simulated ranks find in their environment."""
RECORD_VARIABLE = "RANKWISE_RECORD"
"""The folder where a rank writes down what it does."""

ring_of_process()  # so that a rank which has made no call yet is known to have come to none

_default: Communicator | None = None
_making = threading.Lock()


def default_communicator() -> Communicator:
    """The communicator of this process, or simulated rank, made by the first call."""
    global _default  # noqa: PLW0603  # one process is one rank: this is its identity
    if SIMULATED_VARIABLE in os.environ:
        from rankwise.collectives.simulated import simulated_communicator  # noqa: PLC0415  # only there

        communicator = simulated_communicator(_read_timeout(os.environ))
        if communicator is not None:
            return communicator
    if _default is None:
        with _making:
            if _default is None:
                _default = communicator_from_environment(os.environ)
    return _default


def forget_communicator() -> None:
    """Let the next call make another one: this process is a rank of another world."""
    global _default  # noqa: PLW0603  # as above
    if SIMULATED_VARIABLE in os.environ:
        from rankwise.collectives.simulated import forget_simulated  # noqa: PLC0415  # only there

        forget_simulated()
        return
    _default = None


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
    rank = _read_integer(environment, "RANK")
    if KEY_VARIABLE in environment:
        transport = _over_nodes(segment, rank, world_size, environment)
        return Communicator(transport, timeout=timeout, ring=ring_of_process())
    if world_size != segment.worker_count:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but the segment joins the {segment.worker_count} "
            f"workers of this node only, and {KEY_VARIABLE} is not set"
        )
    transport = _maybe_recorded(SharedMemoryTransport(segment, rank, os.getpid()))
    return Communicator(transport, timeout=timeout, ring=ring_of_process())


def _over_nodes(
    segment: Segment, rank: int, world_size: int, environment: Mapping[str, str]
) -> Transport:
    """The transport of a rank that has peers on other nodes."""
    from rankwise.collectives.connecting import RankEndpoint  # noqa: PLC0415  # for several nodes
    from rankwise.collectives.nodes import NodesTransport  # noqa: PLC0415  # the same

    local_rank = _read_integer(environment, "RANKWISE_LOCAL_RANK")
    port = _read_integer(environment, "MASTER_PORT") + 1
    if rank == 0 and LISTENER_VARIABLE not in environment:
        raise ConfigError(
            f"the ranks of the nodes cannot be connected: port {port}, the one behind MASTER_PORT, "
            f"was not free on this node",
            hint="choose another --master-port, or none",
        )
    here = RankEndpoint(
        rank=rank,
        size=world_size,
        node=_read_integer(environment, "GROUP_RANK"),
        local_rank=local_rank,
        local_size=segment.worker_count,
        address=environment.get("MASTER_ADDR", ""),
        port=port,
        key=bytes.fromhex(environment[KEY_VARIABLE]),
        listener_fd=_read_integer(environment, LISTENER_VARIABLE) if rank == 0 else -1,
    )
    local = SharedMemoryTransport(segment, local_rank, os.getpid(), first_rank=rank - local_rank)
    return NodesTransport(local, here)


def _maybe_recorded(transport: Transport) -> Transport:
    """The transport itself, or one that records, if `rankwise diff` has started this program."""
    if RECORD_VARIABLE not in os.environ:
        return transport
    from rankwise.collectives.recorded import recorded  # noqa: PLC0415  # only there

    return recorded(transport)


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


def all_reduce(array: ArrayLike, op: ReductionName = "sum", out: Array | None = None) -> Array:
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


def reduce_scatter(array: ArrayLike, op: ReductionName = "sum", out: Array | None = None) -> Array:
    """Combine the arrays of all ranks, and give to rank r the r-th row of the result.

    Args:
        array: one row per rank, shape `(size, …)`; the same shape and dtype on all ranks.
        op: as for `all_reduce`.
        out: an array of the result's shape and dtype to fill and return.

    Returns:
        This rank's row, of shape `(…)`.

    Raises what `all_reduce` raises.
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

    Raises what `all_reduce` raises.
    """
    return default_communicator().all_gather(array, out)


def all_to_all(array: ArrayLike, out: Array | None = None) -> Array:
    """Give row r of the array to rank r; row r of the result is what rank r gave to this one.

    Args:
        array: one row per rank, shape `(size, …)`; the same shape and dtype on all ranks; any dtype
            that holds no Python objects.
        out: an array of the same shape and dtype to fill and return.

    Returns:
        An array of the same shape.

    Raises what `all_reduce` raises.
    """
    return default_communicator().all_to_all(array, out)


def broadcast(array: ArrayLike, root: int = 0, out: Array | None = None) -> Array:
    """Return the array of rank `root` on every rank.

    Args:
        array: what `numpy.asarray` takes, of the same shape and dtype on all ranks; only the
            root's values matter.
        root: the rank whose array it is.
        out: an array of the result's shape and dtype to fill and return, perhaps `array` itself.

    Returns:
        The root's array.

    Raises what `all_reduce` raises.
    """
    return default_communicator().broadcast(array, root, out)


def barrier(timeout: float | None = None) -> None:
    """Return when all ranks have called it.

    Args:
        timeout: seconds to wait, this time, instead of RANKWISE_COLLECTIVE_TIMEOUT (300 s).

    Raises what `all_reduce` raises.
    """
    default_communicator().barrier(timeout)
