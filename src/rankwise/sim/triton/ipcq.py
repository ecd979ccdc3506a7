"""Messages between processing elements, from inside a kernel: `tl.send` and `tl.recv`.

The queues themselves belong to whoever launches: under `KernelRunner` they are the modelled IPCQs
of the processing elements, with slots and credits; an ordinary launch has none.
"""

from typing import Any, Protocol

import numpy as np

from rankwise.sim.triton.arithmetic import in_type
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.dtypes import Array, dtype
from rankwise.sim.triton.execution import (
    Execution,
    KernelValueError,
    MustInterleave,
    Unsupported,
    active,
    place,
)
from rankwise.sim.triton.promotion import to_tensor
from rankwise.sim.triton.tensor import plain_shape, tensor


class Channels(Protocol):
    """Queues to and from other processing elements, by direction or by number of the peer."""

    def send(self, execution: Execution, peer: Any, block: tensor) -> None:
        """Put a block into the queue to a peer; wait while no slot is free."""
        ...

    def receive(
        self, execution: Execution, peer: Any, shape: tuple[int, ...], type_: dtype
    ) -> tuple[Array, Any]:
        """Take the next block from a peer; wait until there is one. The block, and its token."""
        ...


def _channels(name: str) -> tuple[Execution, Channels]:
    execution = active()
    if execution.launch.channels is None:
        raise Unsupported(
            f"{place()}: tl.{name} needs queues between processing elements, and an ordinary "
            "launch has none",
            hint="run the kernel through KernelRunner, on a simulated machine",
        )
    if not execution.interleaves:
        raise MustInterleave
    return execution, execution.launch.channels


def send(peer: Any, value: Any) -> None:
    """Send a block to a peer: a program's number, or a direction that the machine knows."""
    execution, channels = _channels("send")
    channels.send(execution, _peer_of(peer), to_tensor(value))


def recv(peer: Any, shape: Any, dtype: Any) -> tensor:
    """Receive the next block from a peer; it has to have this shape and type."""
    execution, channels = _channels("recv")
    size, type_ = plain_shape((plain(shape),)), plain(dtype)
    data, token = channels.receive(execution, _peer_of(peer), size, type_)
    if data.shape[1:] != size:
        raise KernelValueError(
            f"{place()}: a block of shape {list(data.shape[1:])} came from {peer!r}, not "
            f"{list(size)}"
        )
    return tensor(np.asarray(data, type_.compute), type_, size, token=token)


def _peer_of(peer: Any) -> Any:
    peer = plain(peer)
    return int(in_type(peer, peer.dtype)) if isinstance(peer, tensor) else peer
