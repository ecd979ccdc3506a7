"""What a chip is brought up with, how its result is published, and what the parent gets to see.

The channel has the layout that programs of this kind know, in 4096 bytes unless there are more than
376 buffers:

    i32 state, i32 error_code, i32 buffer_count, u32 version, u64 device_ctx, u64 local_window_base,
    u64 actual_window_size, … from byte 64 on one u64 per buffer, … a message in the last 1024 bytes

The state is written last, so a reader that has been told that it changed finds all the rest there.
"""

import ctypes
import struct
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from rankwise.base.errors import MailboxCorrupt, TreeValueError
from rankwise.base.units import format_bytes
from rankwise.core.tasks.tensors import data_type, get_element_size
from rankwise.workers.errors import UnknownName

BUFFER_ALIGNMENT = 64
"""Buffers begin at cache lines, which suits every type and every vector instruction."""
CHANNEL_BYTES_MIN = 4096
CHANNEL_ERROR_BYTES = 1024
CHANNEL_VERSION = 1
_POINTERS = 64
_HEAD = struct.Struct("=iiiIQQQ")
_PLACEMENTS = ("window",)


class ChipCommBootstrapConfig(msgspec.Struct):
    """The communicator that a chip joins.

    Attributes:
        rank, nranks: its place in it, and how many there are.
        rootinfo_path: the communicator's name: all ranks give the same. No such file is made.
        window_size: how many bytes each rank's window has at least.
    """

    rank: int
    nranks: int
    rootinfo_path: str
    window_size: int

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ConfigError: names the field and its value.
        """
        if self.nranks < 1:
            raise TreeValueError(f"nranks is {self.nranks}, expected 1 or more")
        if not 0 <= self.rank < self.nranks:
            raise TreeValueError(f"rank is {self.rank}, expected 0 to {self.nranks - 1}")
        if self.window_size < 0:
            raise TreeValueError(f"window_size is {self.window_size}, expected 0 or more")
        if not self.rootinfo_path:
            raise TreeValueError("rootinfo_path is empty, expected the name of the communicator")


class ChipBufferSpec(msgspec.Struct):
    """A named buffer of a chip.

    Attributes:
        dtype, count: what it holds: a type's name, and how many elements.
        placement: where it lies: in the communicator's window ("window").
        nbytes: its size; at least what `count` elements take.
        load_from_host: whether `host_inputs` has what it holds at first.
        store_to_host: whether `host_outputs` gets what it holds at the end.
    """

    name: str
    dtype: str
    count: int
    placement: str
    nbytes: int
    load_from_host: bool = False
    store_to_host: bool = False

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ConfigError: names the buffer, the field and its value.
        """
        if self.placement not in _PLACEMENTS:
            raise TreeValueError(
                f"buffer {self.name!r} has placement {self.placement!r}, expected 'window'"
            )
        if self.count < 0:
            raise TreeValueError(f"buffer {self.name!r} has count {self.count}, expected 0 or more")
        needed = self.count * get_element_size(data_type(self.dtype))
        if self.nbytes < needed:
            raise TreeValueError(
                f"buffer {self.name!r} has nbytes {self.nbytes}, but {self.count} elements of "
                f"{self.dtype} take {needed}"
            )


class HostBufferStaging(msgspec.Struct):
    """Where the host keeps what a buffer is loaded from or stored to.

    Attributes:
        name: the buffer.
        shm_name: the name of shared memory: what `Worker.stage` gave, or a POSIX segment.
        size: its size; the buffer's.
    """

    name: str
    shm_name: str
    size: int


class ChipBootstrapConfig(msgspec.Struct):
    """What one chip is brought up with."""

    comm: ChipCommBootstrapConfig | None = None
    buffers: list[ChipBufferSpec] = []
    host_inputs: list[HostBufferStaging] = []
    host_outputs: list[HostBufferStaging] = []

    def input_staging(self, name: str) -> HostBufferStaging:
        """Where a buffer is loaded from.

        Raises:
            UnknownName: nowhere; it is a `KeyError`.
        """
        return _staging(self.host_inputs, name, "host_inputs")

    def output_staging(self, name: str) -> HostBufferStaging:
        """Where a buffer is stored to.

        Raises:
            UnknownName: nowhere; it is a `KeyError`.
        """
        return _staging(self.host_outputs, name, "host_outputs")

    def check(self) -> None:
        """Refuse what can be seen to be wrong before anything is started.

        Raises:
            ConfigError: names the buffer or field, the value, and what was expected.
        """
        for buffer in self.buffers:
            buffer.check()
        if self.comm is not None:
            self.comm.check()
        elif self.buffers:
            names = ", ".join(repr(buffer.name) for buffer in self.buffers)
            raise TreeValueError(
                f"buffers {names} lie in a window, but comm is None",
                hint="give a ChipCommBootstrapConfig; one rank is enough",
            )
        names_seen: set[str] = set()
        for buffer in self.buffers:
            if buffer.name in names_seen:
                raise TreeValueError(f"there are two buffers of the name {buffer.name!r}")
            names_seen.add(buffer.name)
            if buffer.load_from_host:
                _check_size(buffer, self.input_staging(buffer.name), "host_inputs")
            if buffer.store_to_host:
                _check_size(buffer, self.output_staging(buffer.name), "host_outputs")
        for listed, what, flag in (
            (self.host_inputs, "host_inputs", "load_from_host"),
            (self.host_outputs, "host_outputs", "store_to_host"),
        ):
            wanting = {buffer.name for buffer in self.buffers if getattr(buffer, flag)}
            for staging in listed:
                if staging.name not in wanting:
                    raise TreeValueError(
                        f"{what} has {staging.name!r}, but no buffer of that name has {flag}=True"
                    )


class PlacedBuffer(msgspec.Struct, frozen=True):
    """A buffer's place in its window."""

    name: str
    offset: int
    nbytes: int


def place_buffers(buffers: Sequence[ChipBufferSpec], window_bytes: int) -> tuple[PlacedBuffer, ...]:
    """Give each buffer its place: in the order of declaration, each at a cache line.

    Raises:
        ConfigError: they do not fit; names the one that does not, and how large the window must be.
    """
    placed: list[PlacedBuffer] = []
    end = 0
    for buffer in buffers:
        buffer.check()
        offset = -(-end // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        end = offset + buffer.nbytes
        placed.append(PlacedBuffer(buffer.name, offset, buffer.nbytes))
    if end > window_bytes:
        first = next(each for each in placed if each.offset + each.nbytes > window_bytes)
        raise TreeValueError(
            f"buffer {first.name!r} ends at byte {first.offset + first.nbytes} of its window, "
            f"which has {window_bytes} ({format_bytes(window_bytes)})",
            hint=f"all buffers together need window_size={end}",
        )
    return tuple(placed)


class ChipBootstrapResult(msgspec.Struct, frozen=True):
    """What a chip has after it was brought up; zeros where there is no communicator."""

    device_ctx: int = 0
    local_window_base: int = 0
    actual_window_size: int = 0
    buffer_ptrs: tuple[int, ...] = ()


class ChipContext(msgspec.Struct, frozen=True):
    """A chip that is up, as its parent sees it; addresses are good in tasks on that chip.

    Attributes:
        device_ctx: where a kernel finds the windows of all ranks: u32 rank, u32 ranks, u64 bytes of
            a window, u64 address of each rank's.
        local_window_base, actual_window_size: the chip's own window.
        buffer_ptrs: where each buffer lies, by name.
    """

    device_id: int
    rank: int
    nranks: int
    device_ctx: int
    local_window_base: int
    actual_window_size: int
    buffer_ptrs: dict[str, int]


def context_of(
    device_id: int, config: ChipBootstrapConfig, result: ChipBootstrapResult
) -> ChipContext:
    """What the parent hands to its user of a chip that has published its success.

    Raises:
        MailboxCorrupt: the chip has published another number of buffers than were configured.
    """
    wanted, got = len(config.buffers), len(result.buffer_ptrs)
    if wanted != got:
        raise MailboxCorrupt(
            f"chip {device_id} published {got} buffers, but {wanted} were configured",
            hint="parent and workers must use the same release of rankwise",
        )
    names = [buffer.name for buffer in config.buffers]
    return ChipContext(
        device_id=device_id,
        rank=config.comm.rank if config.comm else 0,
        nranks=config.comm.nranks if config.comm else 1,
        device_ctx=result.device_ctx,
        local_window_base=result.local_window_base,
        actual_window_size=result.actual_window_size,
        buffer_ptrs=dict(zip(names, result.buffer_ptrs, strict=True)),
    )


class ChannelState(IntEnum):
    """What a chip has published."""

    IDLE = 0
    SUCCESS = 1
    ERROR = 2


def channel_bytes(max_buffer_count: int) -> int:
    """How much memory a channel for so many buffers takes."""
    return max(CHANNEL_BYTES_MIN, _POINTERS + 8 * max_buffer_count + CHANNEL_ERROR_BYTES)


class ChipBootstrapChannel:
    """Shared memory in which a chip publishes how its bootstrap went.

    Args:
        addr: where it lies, in both processes; `channel_bytes` of it, which outlive this object.
        max_buffer_count: for how many buffers it has room.
    """

    def __init__(self, addr: int, max_buffer_count: int) -> None:
        if max_buffer_count < 0:
            raise TreeValueError(f"max_buffer_count is {max_buffer_count}, expected 0 or more")
        if addr <= 0 or addr % 8:
            raise TreeValueError(f"a channel's address is {addr:#x}, expected a multiple of 8")
        self.addr = addr
        self.max_buffer_count = max_buffer_count
        self._size = channel_bytes(max_buffer_count)
        self._memory = memoryview((ctypes.c_ubyte * self._size).from_address(addr)).cast("B")
        self._state = ctypes.c_int32.from_address(addr)

    def reset(self) -> None:
        """Make it as if nothing had been published."""
        self._state.value = ChannelState.IDLE
        ctypes.memset(self.addr, 0, self._size)
        self._write_head(0, 0, ChipBootstrapResult())

    def write_success(
        self,
        device_ctx: int,
        local_window_base: int,
        actual_window_size: int,
        buffer_ptrs: Sequence[int],
    ) -> None:
        """Publish that the chip is up.

        Raises:
            ConfigError: there are more buffers than the channel has room for; nothing is published.
        """
        if len(buffer_ptrs) > self.max_buffer_count:
            raise TreeValueError(
                f"buffer_ptrs exceeds max_buffer_count: {len(buffer_ptrs)} buffers were published "
                f"in a channel for {self.max_buffer_count}"
            )
        struct.pack_into(f"={len(buffer_ptrs)}Q", self._memory, _POINTERS, *buffer_ptrs)
        result = ChipBootstrapResult(device_ctx, local_window_base, actual_window_size)
        self._write_head(0, len(buffer_ptrs), result)
        self._state.value = ChannelState.SUCCESS

    def write_error(self, code: int, message: str) -> None:
        """Publish why the chip is not up; of the message, as much as 1023 bytes hold."""
        kept = message.encode(errors="replace")[: CHANNEL_ERROR_BYTES - 1]
        text = kept.decode(errors="ignore").encode()  # no half character at the cut
        field = f"={CHANNEL_ERROR_BYTES}s"
        struct.pack_into(field, self._memory, self._size - CHANNEL_ERROR_BYTES, text)
        self._write_head(code, 0, ChipBootstrapResult())
        self._state.value = ChannelState.ERROR

    @property
    def state(self) -> ChannelState:
        """What was published.

        Raises:
            MailboxCorrupt: something that no chip of this release publishes.
        """
        value = self._state.value
        if value not in tuple(ChannelState):
            raise MailboxCorrupt(f"a bootstrap channel has the unknown state {value}")
        if value and (version := self._head()[3]) != CHANNEL_VERSION:
            raise MailboxCorrupt(
                f"a bootstrap channel has version {version}, expected {CHANNEL_VERSION}",
                hint="parent and workers must use the same release of rankwise",
            )
        return ChannelState(value)

    @property
    def error_code(self) -> int:
        """The number that came with an error; 0 without one."""
        return int(self._head()[1])

    @property
    def error_message(self) -> str:
        """The text that came with an error; empty without one."""
        text = bytes(self._memory[self._size - CHANNEL_ERROR_BYTES : self._size])
        return text.partition(b"\0")[0].decode(errors="replace")

    @property
    def device_ctx(self) -> int:
        """Where kernels find the windows of all ranks."""
        return int(self._head()[4])

    @property
    def local_window_base(self) -> int:
        """Where the chip's own window begins."""
        return int(self._head()[5])

    @property
    def actual_window_size(self) -> int:
        """How many bytes its window has."""
        return int(self._head()[6])

    @property
    def buffer_ptrs(self) -> list[int]:
        """Where each buffer lies, in the order of their declaration.

        Raises:
            MailboxCorrupt: the channel claims more than it has room for.
        """
        count = self._head()[2]
        if not 0 <= count <= self.max_buffer_count:
            raise MailboxCorrupt(
                f"a bootstrap channel claims {count} buffers, and has room for "
                f"{self.max_buffer_count}"
            )
        return list(struct.unpack_from(f"={count}Q", self._memory, _POINTERS))

    def result(self) -> ChipBootstrapResult:
        """All that a success has published."""
        return ChipBootstrapResult(
            self.device_ctx,
            self.local_window_base,
            self.actual_window_size,
            tuple(self.buffer_ptrs),
        )

    def _head(self) -> tuple[int, ...]:
        return _HEAD.unpack_from(self._memory)

    def _write_head(self, code: int, count: int, result: ChipBootstrapResult) -> None:
        """All but the state."""
        head = _HEAD.pack(
            0, code, count, CHANNEL_VERSION,
            result.device_ctx, result.local_window_base, result.actual_window_size,
        )  # fmt: skip
        self._memory[4 : _HEAD.size] = head[4:]


def _staging(listed: Sequence[HostBufferStaging], name: str, what: str) -> HostBufferStaging:
    for staging in listed:
        if staging.name == name:
            return staging
    known = ", ".join(repr(staging.name) for staging in listed) or "nothing"
    raise UnknownName(f"{what} has nothing for buffer {name!r}: it has {known}")


def _check_size(buffer: ChipBufferSpec, staging: HostBufferStaging, what: str) -> None:
    if staging.size != buffer.nbytes:
        raise TreeValueError(
            f"{what} has {staging.size} bytes for buffer {buffer.name!r}, which has {buffer.nbytes}"
        )
