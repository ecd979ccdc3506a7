import ctypes
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError, MailboxCorrupt
from rankwise.workers.bootstrap import (
    BUFFER_ALIGNMENT,
    ChannelState,
    ChipBootstrapChannel,
    ChipBootstrapConfig,
    ChipBootstrapResult,
    ChipBufferSpec,
    ChipCommBootstrapConfig,
    HostBufferStaging,
    channel_bytes,
    context_of,
    place_buffers,
)


class Memory:
    """Memory for a channel, with something behind it that must stay as it is."""

    def __init__(self, max_buffer_count: int) -> None:
        self.size = channel_bytes(max_buffer_count)
        self.bytes = ctypes.create_string_buffer(b"\xee" * (self.size + 64), self.size + 64)
        self.channel = ChipBootstrapChannel(ctypes.addressof(self.bytes), max_buffer_count)
        self.channel.reset()

    def other_side(self) -> ChipBootstrapChannel:
        return ChipBootstrapChannel(self.channel.addr, self.channel.max_buffer_count)


def read_all(channel: ChipBootstrapChannel) -> ChipBootstrapResult:
    assert channel.state is ChannelState.SUCCESS
    return channel.result()


def comm(rank: int = 0, nranks: int = 1, size: int = 4096) -> ChipCommBootstrapConfig:
    return ChipCommBootstrapConfig(rank, nranks, "the-group", size)


def buffer(name: str = "x", nbytes: int = 64, **fields: Any) -> ChipBufferSpec:
    return ChipBufferSpec(name, "float32", nbytes // 4, "window", nbytes, **fields)


def test_a_channel_has_the_size_that_programs_know_unless_it_needs_more() -> None:
    assert channel_bytes(0) == channel_bytes(376) == 4096
    assert channel_bytes(377) > 4096


def test_success_is_read_on_the_other_side() -> None:
    memory = Memory(3)

    memory.channel.write_success(1, 2**63, 3, [10, 20, 30])
    other = memory.other_side()

    assert other.state is ChannelState.SUCCESS
    assert other.result() == ChipBootstrapResult(1, 2**63, 3, (10, 20, 30))
    assert other.error_code == 0
    assert struct.unpack_from("=iii", memory.bytes) == (1, 0, 3)
    assert struct.unpack_from("=3Q", memory.bytes, 64) == (10, 20, 30)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=500))
def test_any_number_of_buffers_is_published_whole(pointers: list[int]) -> None:
    memory = Memory(500)

    memory.channel.write_success(0, 0, 0, pointers)

    assert memory.other_side().buffer_ptrs == pointers
    assert memory.bytes.raw[memory.size :] == b"\xee" * 64


def test_more_buffers_than_there_is_room_for_are_a_value_error_and_not_published() -> None:
    memory = Memory(2)

    with pytest.raises(
        ValueError, match="max_buffer_count: 3 buffers were published in a channel for 2"
    ):
        memory.channel.write_success(0, 0, 0, [1, 2, 3])

    assert memory.channel.state is ChannelState.IDLE


def test_an_error_whose_text_is_no_unicode_is_published_all_the_same() -> None:
    memory = Memory(1)

    memory.channel.write_error(1, "no file \udcff")

    assert memory.channel.error_message == "no file ?"


@pytest.mark.parametrize("text", ["boom", "x" * 5000, "ä" * 2000, ""])
def test_of_an_error_as_much_is_kept_as_has_room(text: str) -> None:
    memory = Memory(376)

    memory.channel.write_error(1, text)
    message = memory.other_side().error_message

    assert memory.other_side().state is ChannelState.ERROR
    assert memory.channel.error_code == 1
    assert text.startswith(message)
    assert len(message.encode()) >= min(len(text.encode()), 1022)
    assert memory.bytes.raw[memory.size :] == b"\xee" * 64


def test_a_reset_channel_tells_nothing_of_what_was() -> None:
    memory = Memory(2)
    memory.channel.write_success(1, 2, 3, [4, 5])
    memory.channel.write_error(7, "boom")

    memory.channel.reset()

    assert memory.channel.state is ChannelState.IDLE
    assert memory.channel.result() == ChipBootstrapResult()
    assert (memory.channel.error_code, memory.channel.error_message) == (0, "")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, 9, "state 9"),
        (12, 2, r"version 2, expected 1 \(parent and workers"),
        (8, 77, "77 buffers"),
    ],
)
def test_what_no_chip_of_this_release_writes_is_corrupt(
    offset: int, value: int, message: str
) -> None:
    memory = Memory(2)
    memory.channel.write_success(0, 0, 0, [])
    struct.pack_into("=i", memory.bytes, offset, value)

    with pytest.raises(MailboxCorrupt, match=message):
        read_all(memory.channel)


@given(st.binary(min_size=64, max_size=200))
def test_any_bytes_in_a_channel_are_read_or_corrupt(content: bytes) -> None:
    memory = Memory(4)
    ctypes.memmove(memory.bytes, content, len(content))

    assert isinstance(memory.channel.error_message, str)
    try:
        state = memory.channel.state
        result = memory.channel.result()
    except MailboxCorrupt:
        return
    assert state in ChannelState
    assert len(result.buffer_ptrs) <= 4


@pytest.mark.parametrize(("addr", "count"), [(0, 1), (4097, 1), (4096, -1)])
def test_a_channel_that_cannot_be_is_refused(addr: int, count: int) -> None:
    with pytest.raises(ConfigError, match=r"address is|max_buffer_count is"):
        ChipBootstrapChannel(addr, count)


def test_buffers_lie_at_cache_lines_in_their_order() -> None:
    placed = place_buffers([buffer("a", 4), buffer("b", 100), buffer("c", 64)], 4096)

    assert [(each.name, each.offset) for each in placed] == [("a", 0), ("b", 64), ("c", 192)]


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(0, 10_000))
def test_buffers_fit_and_are_apart_or_an_error_says_how_much_they_need(
    sizes: list[int], window: int
) -> None:
    specs = [ChipBufferSpec(f"b{n}", "int8", size, "window", size) for n, size in enumerate(sizes)]
    placed = place_buffers(specs, 1 << 20)
    needed = placed[-1].offset + placed[-1].nbytes if placed else 0
    if window < needed:
        with pytest.raises(ConfigError, match=f"window_size={needed}"):
            place_buffers(specs, window)
    else:
        assert place_buffers(specs, window) == placed

    assert all(each.offset % BUFFER_ALIGNMENT == 0 for each in placed)
    ends = [each.offset + each.nbytes for each in placed]
    assert all(end <= each.offset for end, each in zip(ends, placed[1:], strict=False))


def test_a_buffer_that_runs_over_the_window_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"buffer 'b' ends at byte 164 of its window, which has 128 .*=164"
    ):
        place_buffers([buffer("a", 64), buffer("b", 100)], 128)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ChipBootstrapConfig(buffers=[buffer("x")]), "buffers 'x' lie in a window, but comm is"),
        (
            ChipBootstrapConfig(comm(), [ChipBufferSpec("x", "f", 1, "hbm", 4)]),
            "buffer 'x' has placement 'hbm', expected 'window'",
        ),
        (
            ChipBootstrapConfig(comm(), [ChipBufferSpec("x", "float33", 1, "window", 4)]),
            "no data type 'float33'",
        ),
        (
            ChipBootstrapConfig(comm(), [ChipBufferSpec("x", "float32", 9, "window", 4)]),
            "buffer 'x' has nbytes 4, but 9 elements of float32 take 36",
        ),
        (
            ChipBootstrapConfig(comm(), [ChipBufferSpec("x", "int8", -1, "window", 4)]),
            "count -1",
        ),
        (ChipBootstrapConfig(comm(), [buffer(), buffer()]), "two buffers of the name 'x'"),
        (
            ChipBootstrapConfig(comm(), [buffer(load_from_host=True)]),
            "host_inputs has nothing for buffer 'x': it has nothing",
        ),
        (
            ChipBootstrapConfig(
                comm(), [buffer(store_to_host=True)], [], [HostBufferStaging("x", "s", 63)]
            ),
            "host_outputs has 63 bytes for buffer 'x', which has 64",
        ),
        (
            ChipBootstrapConfig(comm(), [buffer()], [HostBufferStaging("x", "s", 64)]),
            "host_inputs has 'x', but no buffer of that name has load_from_host=True",
        ),
        (ChipBootstrapConfig(comm(rank=2, nranks=2)), "rank is 2, expected 0 to 1"),
        (ChipBootstrapConfig(comm(nranks=0)), "nranks is 0"),
        (ChipBootstrapConfig(comm(size=-1)), "window_size is -1"),
        (
            ChipBootstrapConfig(ChipCommBootstrapConfig(0, 1, "", 64)),
            "rootinfo_path is empty",
        ),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused_by_name(
    config: ChipBootstrapConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config.check()


def test_staging_is_found_by_the_name_of_its_buffer() -> None:
    config = ChipBootstrapConfig(
        comm(),
        [buffer(load_from_host=True, store_to_host=True)],
        [HostBufferStaging("x", "in", 64)],
        [HostBufferStaging("x", "out", 64)],
    )

    config.check()

    assert config.input_staging("x").shm_name == "in"
    assert config.output_staging("x").shm_name == "out"
    with pytest.raises(KeyError, match="nothing for buffer 'y': it has 'x'"):
        config.input_staging("y")


def test_the_parent_sees_buffers_by_name() -> None:
    config = ChipBootstrapConfig(comm(1, 2), [buffer("a"), buffer("b")])

    context = context_of(5, config, ChipBootstrapResult(1, 2, 3, (10, 20)))

    assert (context.device_id, context.rank, context.nranks) == (5, 1, 2)
    assert context.buffer_ptrs == {"a": 10, "b": 20}


@pytest.mark.parametrize("pointers", [(), (1, 2, 3)])
def test_a_disagreement_on_the_number_of_buffers_is_an_error(pointers: tuple[int, ...]) -> None:
    config = ChipBootstrapConfig(comm(), [buffer("a"), buffer("b")])

    with pytest.raises(MailboxCorrupt, match=rf"chip 0 published {len(pointers)} buffers, but 2"):
        context_of(0, config, ChipBootstrapResult(buffer_ptrs=pointers))
