"""Communication inside kernels: the memory and the signals of peers.

The names are those of Triton-distributed's `language` (`rank`, `symm_at`, `wait`, `notify`, ...)
and of NVSHMEM's device functions (`put`, `putmem_signal_block`, `signal_wait_until`, ...). A
pointer to symmetric memory becomes a pointer to a peer's with `symm_at`. Loads, stores and atomics
use it like any other pointer.

Every signal is a release: earlier stores of its program are in memory when it arrives. Every wait
is an acquire: later loads of the program see memory as of the end of the wait. Scopes and semantics
in calls are checked, and have no other effect.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from rankwise.sim.triton.access import element_of
from rankwise.sim.triton.arithmetic import in_type
from rankwise.sim.triton.constants import constexpr, plain
from rankwise.sim.triton.dtypes import int32
from rankwise.sim.triton.execution import (
    Execution,
    KernelTypeError,
    KernelValueError,
    MustInterleave,
    Unsupported,
    active,
    place,
)
from rankwise.sim.triton.peers import Condition, LaunchPeers
from rankwise.sim.triton.refusals import refusing
from rankwise.sim.triton.tensor import scalar, tensor
from rankwise.sim.triton.wait_addresses import BufferElement

_COMPARISONS: dict[int, tuple[str, Callable[[Any, Any], Any]]] = {
    0: ("==", operator.eq),
    1: ("!=", operator.ne),
    2: (">", operator.gt),
    3: (">=", operator.ge),
    4: ("<", operator.lt),
    5: ("<=", operator.le),
}
CMP_EQ, CMP_NE, CMP_GT, CMP_GE, CMP_LT, CMP_LE = (constexpr(number) for number in range(6))
"""How `signal_wait_until` compares, numbered as in torch's NVSHMEM module."""
SIGNAL_SET, SIGNAL_ADD = constexpr(0), constexpr(5)
"""What `signal_op` does to the word."""
NVSHMEM_CMP_EQ, NVSHMEM_CMP_NE, NVSHMEM_CMP_GT = CMP_EQ, CMP_NE, CMP_GT
NVSHMEM_CMP_GE, NVSHMEM_CMP_LT, NVSHMEM_CMP_LE = CMP_GE, CMP_LT, CMP_LE
NVSHMEM_SIGNAL_SET, NVSHMEM_SIGNAL_ADD = SIGNAL_SET, SIGNAL_ADD

_CHANGES: dict[Any, Callable[[Any, Any], Any]] = {
    "set": lambda _old, new: new,
    "add": operator.add,
}
_CHANGES[0], _CHANGES[5] = _CHANGES["set"], _CHANGES["add"]


def rank(axis: Any = -1) -> tensor:
    """The rank whose launch this is."""
    del axis
    return scalar(_peers("rank")[1].rank, int32)


def num_ranks(axis: Any = -1) -> tensor:
    """How many ranks there are."""
    del axis
    return scalar(_peers("num_ranks")[1].size, int32)


def symm_at(ptr: Any, rank: Any) -> tensor:
    """The pointer to a peer's memory that corresponds to one here; `rank` counts in the group."""
    execution, peers = _peers("symm_at")
    element_of(ptr)
    whose = _number(rank, "symm_at")
    if ptr.buffer is not None:
        return tensor(
            None if ptr.affine is not None else ptr.data, ptr.dtype, ptr.shape,
            affine=ptr.affine, box=ptr.box, buffer=peers.twin(ptr.buffer, whose), token=ptr.token,
        )  # fmt: skip
    word = _word_at(execution, ptr, "symm_at")
    there = peers.twin(word.buffer, whose)
    return tensor(
        ptr.data + (there.address - word.buffer.address), ptr.dtype, ptr.shape, token=ptr.token
    )


def notify(
    ptr: Any, rank: Any, signal: Any = 1, sig_op: Any = "set", comm_scope: Any = "inter_node"
) -> None:
    """Set a signal at a peer, or add to it, after all that this program has stored before."""
    if plain(comm_scope) not in {"gpu", "intra_node", "inter_node"}:
        raise KernelValueError(
            f"{place()}: notify has comm_scope={comm_scope!r}: it is 'gpu', 'intra_node' or"
            " 'inter_node'"
        )
    _signal("notify", ptr, rank, signal, sig_op)


def wait(
    barrierPtrs: Any,  # noqa: N803  # Triton-distributed's name
    numBarriers: Any,  # noqa: N803
    scope: Any = "gpu",
    semantic: Any = "acquire",
    waitValue: Any = 1,  # noqa: N803
) -> tensor:
    """Wait until consecutive signals all have a value; the result is for `consume_token`."""
    if plain(scope) not in {"gpu", "sys"}:
        raise KernelValueError(f"{place()}: wait has scope={scope!r}: it is 'gpu' or 'sys'")
    if plain(semantic) not in {"acquire", "acq_rel"}:
        raise KernelValueError(
            f"{place()}: wait has semantic={semantic!r}: it is 'acquire' or 'acq_rel'",
            hint="what is loaded after a wait that does not acquire may be older than the signal",
        )
    _wait("wait", barrierPtrs, 0, waitValue, _number(numBarriers, "wait"))
    return scalar(0, int32)


def consume_token(value: Any, token: Any) -> Any:
    """A value that is only used after the wait that gave the token; here waits order all."""
    del token
    return value


def my_pe() -> tensor:
    """NVSHMEM's name of `rank`."""
    return rank()


def n_pes() -> tensor:
    """NVSHMEM's name of `num_ranks`."""
    return num_ranks()


def remote_ptr(local_ptr: Any, pe: Any) -> tensor:
    """NVSHMEM's name of `symm_at`."""
    return symm_at(local_ptr, pe)


def signal_op(sig_addr: Any, signal: Any, sig_op: Any, pe: Any) -> None:
    """Set a signal at a peer, or add to it, after all that this program has stored before."""
    _signal("signal_op", sig_addr, pe, signal, sig_op)


def signal_wait_until(signal: Any, cmp: Any, cmp_val: Any) -> None:
    """Wait until a signal here compares as it should: `CMP_EQ`, `CMP_GE`, ..."""
    _wait("signal_wait_until", signal, _number(cmp, "signal_wait_until"), cmp_val, 1)


wait_until = signal_wait_until


def put(dest: Any, source: Any, nelems: Any, pe: Any) -> None:
    """Copy elements from here to a peer; complete after `quiet`, or at a signal that follows."""
    _copy("put", source, symm_at(dest, pe), _bytes_of("put", dest, source, nelems), waits=False)


def get(dest: Any, source: Any, nelems: Any, pe: Any) -> None:
    """Copy elements from a peer to here, and wait until they have come."""
    _copy("get", symm_at(source, pe), dest, _bytes_of("get", dest, source, nelems), waits=True)


def get_nbi(dest: Any, source: Any, nelems: Any, pe: Any) -> None:
    """Begin to copy elements from a peer to here; they have come after `quiet`."""
    size = _bytes_of("get_nbi", dest, source, nelems)
    _copy("get_nbi", symm_at(source, pe), dest, size, waits=False, reads_later=True)


def putmem_block(dest: Any, source: Any, size: Any, pe: Any) -> None:
    """Copy bytes from here to a peer; complete after `quiet`, or at a signal that follows."""
    _copy("putmem_block", source, symm_at(dest, pe), _number(size, "putmem_block"), waits=False)


def getmem_block(dest: Any, source: Any, size: Any, pe: Any) -> None:
    """Copy bytes from a peer to here, and wait until they have come."""
    _copy("getmem_block", symm_at(source, pe), dest, _number(size, "getmem_block"), waits=True)


def putmem_signal_block(
    dst: Any, src: Any, size_bytes: Any, signal: Any, sig_val: Any, sig_op: Any, pe: Any
) -> None:
    """Copy bytes from here to a peer, and set a signal there when they have come."""
    putmem_block(dst, src, size_bytes, pe)
    _signal("putmem_signal_block", signal, pe, sig_val, sig_op)


def getmem_nbi_block(dest: Any, source: Any, size: Any, pe: Any) -> None:
    """Begin to copy bytes from a peer to here; they have come after `quiet`."""
    size = _number(size, "getmem_nbi_block")
    _copy("getmem_nbi_block", symm_at(source, pe), dest, size, waits=False, reads_later=True)


# A program is one thread here, and no put waits: what threads share a call, and whether it blocks,
# is only in its name.
putmem_warp = putmem_nbi_block = putmem_nbi_warp = putmem_block
putmem_signal_warp = putmem_signal_nbi_block = putmem_signal_nbi_warp = putmem_signal_block
getmem_warp, getmem_nbi_warp = getmem_block, getmem_nbi_block


def fence() -> None:
    """Let everything that this program has put come before what it puts from now on."""
    quiet()


def quiet() -> None:
    """Wait until everything that this program has put or got is in memory."""
    execution = _peers("quiet")[0]
    assert execution.observer is not None, "a launch with peers runs in simulated time"
    execution.observer.settle()
    if execution.launch.races is not None:
        execution.launch.races.copies_are_done(execution)


__getattr__ = refusing(
    "rankwise.sim.triton.distributed",
    {
        **{
            name + of: "make a barrier of signals: notify every peer, and wait for all"
            for name in ("barrier_all", "sync_all")
            for of in ("", "_block", "_warp")
        },
        "remote_mc_ptr": "there are no multicast addresses: store to each peer through symm_at",
        **dict.fromkeys(
            ("simt_exec_region", "ld_vector", "st_vector", "zeros_vector"),
            "a program is one thread: write it with blocks",
        ),
    },
)


def _peers(name: str) -> tuple[Execution, LaunchPeers]:
    execution = active()
    if not execution.interleaves:
        raise MustInterleave
    peers = execution.launch.peers
    if peers is None:
        raise Unsupported(
            f"{place()}: {name} needs ranks on a simulated machine: this launch has none",
            hint="launch it from a rank of RuntimeContext; an autotuner tries it without peers",
        )
    return execution, peers()


def _number(value: Any, name: str) -> int:
    value = plain(value)
    if isinstance(value, tensor):
        if value.shape or not value.dtype.is_int():
            raise KernelTypeError(f"{place()}: {name} takes one whole number, not {value!r}")
        return int(in_type(value, value.dtype))
    if not isinstance(value, int | np.integer):
        raise KernelTypeError(f"{place()}: {name} takes one whole number, not {value!r}")
    return int(value)


def _word_at(execution: Execution, pointer: Any, name: str, index: int = 0) -> BufferElement:
    """The element that a pointer points to."""
    element = element_of(pointer)
    if pointer.shape:
        raise KernelTypeError(
            f"{place()}: {name} takes one pointer, not a block of shape {list(pointer.shape)}"
        )
    at = int(pointer.data[0])
    buffer = pointer.buffer
    if buffer is None:
        buffer = execution.launch.memory.buffer_at(at)
        if buffer is None:
            raise KernelValueError(f"{place()}: {name}: address {at:#x} lies in no buffer")
        at = (at - buffer.address) // element.itemsize
    count = buffer.elements(element).size
    if not 0 <= at + index < count:
        raise KernelValueError(
            f'{place()}: {name}: element {at + index} is outside of buffer "{buffer.name}", which'
            f" has {count} elements of {element}"
        )
    return BufferElement(buffer, element, at + index)


def _signal_at(execution: Execution, pointer: Any, name: str, index: int = 0) -> BufferElement:
    word = _word_at(execution, pointer, name, index)
    if not word.element.is_int():
        raise KernelTypeError(f"{place()}: {name}: a signal is an integer, not {word.element}")
    return word


def _signal(name: str, pointer: Any, rank: Any, value: Any, sig_op: Any) -> None:
    execution, peers = _peers(name)
    change = _CHANGES.get(plain(sig_op))
    if change is None:
        raise KernelValueError(
            f"{place()}: {name} has sig_op={sig_op!r}: it is 'set' or 'add'"
            " (SIGNAL_SET, SIGNAL_ADD)"
        )
    word = _signal_at(execution, symm_at(pointer, rank), name)
    peers.signal(execution, word, change, _fitting(_number(value, name), word, name))


def _fitting(value: int, word: BufferElement, name: str) -> int:
    """A signal's value, if its word can hold it."""
    bounds = np.iinfo(word.element.storage)
    if not bounds.min <= value <= bounds.max:
        raise KernelValueError(
            f"{place()}: {name} has signal={value}: a word of {word.element} holds {bounds.min} to"
            f" {bounds.max}"
        )
    return value


def _wait(name: str, pointer: Any, comparison: int, value: Any, count: int) -> None:
    execution, peers = _peers(name)
    if comparison not in _COMPARISONS:
        raise KernelValueError(f"{place()}: {name} has cmp={comparison}: it is 0 to 5 (CMP_*)")
    words = [_signal_at(execution, pointer, name, index) for index in range(count)]
    peers.wait(execution, words, Condition(*_COMPARISONS[comparison], _number(value, name)))


def _bytes_of(name: str, dest: Any, source: Any, nelems: Any) -> int:
    element = element_of(dest)
    if element != element_of(source):
        raise KernelTypeError(
            f"{place()}: {name} copies {element_of(source)} to {element}: they must be of one type"
        )
    return _number(nelems, name) * int(element.itemsize)


def _copy(
    name: str, source: Any, target: Any, size: int, *, waits: bool, reads_later: bool = False
) -> None:
    execution, peers = _peers(name)
    if not size:
        return
    ends = []
    for pointer in (source, target):
        word = _word_at(execution, pointer, name)
        room = word.buffer.size_bytes - word.position * word.element.itemsize
        if not 0 < size <= room:
            raise KernelValueError(
                f'{place()}: {name} of {size} bytes: buffer "{word.buffer.name}" has {room} from'
                f" element {word.position} on"
            )
        ends.append(word)
    peers.copy(execution, ends[0], ends[1], size, waits=waits, reads_later=reads_later)
