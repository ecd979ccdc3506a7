"""Messages between processing elements, from inside a kernel: `tl.send` and `tl.recv`.

The queues themselves belong to the launcher (`queues`): under `KernelRunner` they are the modelled
IPCQs of the processing elements, with slots and credits; an ordinary launch has none.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from rankwise.sim.triton.arithmetic import in_type
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.execution import (
    Execution,
    KernelTypeError,
    KernelValueError,
    MustInterleave,
    Unsupported,
    active,
    place,
)
from rankwise.sim.triton.tensor import plain_shape, tensor, to_tensor

if TYPE_CHECKING:
    from rankwise.sim.triton.queues import ProgramQueues


def _channels(name: str) -> tuple[Execution, "ProgramQueues"]:
    execution = active()
    channels = execution.launch.channels
    if channels is None:
        raise Unsupported(
            f"{place()}: tl.{name} needs queues between processing elements, and an ordinary "
            "launch has none",
            hint="run the kernel through KernelRunner, on a simulated machine",
        )
    if not execution.interleaves:
        raise MustInterleave
    return execution, channels()


def send(peer: Any, value: Any, mask: Any = None, sem: Any = "release") -> None:
    """Send a block to a peer: a program's number, or (SIP, PE); in a collective, a rank.

    The program goes on at once. The block leaves when it has been calculated, when everything that
    the program has stored before is in memory (not with `sem="relaxed"`), and when the queue has a
    free slot. With a mask only what it lets through is moved; the rest of the block means nothing
    to the receiver.
    """
    if plain(sem) not in {"release", "relaxed"}:
        raise KernelValueError(f"{place()}: send has sem={sem!r}: it is 'release' or 'relaxed'")
    execution, channels = _channels("send")
    block, mask = to_tensor(value), plain(mask)
    if mask is True:
        mask = None
    elif mask is not None:
        mask = to_tensor(mask)
        if mask.shape != block.shape or not mask.dtype.is_bool():
            raise KernelTypeError(
                f"{place()}: send of a block of shape {list(block.shape)} has a mask of shape "
                f"{list(mask.shape)} {mask.dtype}: it must be int1 of the same shape"
            )
    channels.send(execution, _peer_of(peer), block, mask, releases=plain(sem) == "release")


def recv(peer: Any, shape: Any, dtype: Any) -> tensor:
    """Receive the next block from a peer; it has to have this shape and type.

    The program waits until it has arrived.
    """
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
