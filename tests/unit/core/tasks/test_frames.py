import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError, MailboxCorrupt
from rankwise.core.tasks.calls import (
    ChipCallConfig,
    Command,
    ControlCode,
    decode_command,
    decode_task,
    encode_command,
    encode_task,
)
from rankwise.core.tasks.frames import (
    HEADER_BYTES,
    VERSION,
    Frame,
    FrameKind,
    RequestLane,
    decode_frame,
    encode_frame,
)
from rankwise.core.tasks.tensors import ContinuousTensor, DataType

FRAMES = st.builds(
    Frame,
    st.sampled_from(FrameKind),
    st.sampled_from(RequestLane),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=60),
)


@given(FRAMES)
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    assert decode_frame(encode_frame(frame)) == frame


@given(FRAMES, st.data())
def test_a_cut_frame_is_corrupt_and_says_that_it_was_cut(frame: Frame, data: st.DataObject) -> None:
    encoded = encode_frame(frame)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]

    with pytest.raises(MailboxCorrupt, match="was cut"):
        decode_frame(cut)


def test_what_follows_a_frame_is_corrupt() -> None:
    with pytest.raises(MailboxCorrupt, match="3 bytes that are not its own"):
        decode_frame(encode_frame(Frame(FrameKind.REPLY, RequestLane.TASK, 0)) + b"abc")


def test_a_frame_of_another_release_says_so_and_what_to_do() -> None:
    encoded = bytearray(encode_frame(Frame(FrameKind.REPLY, RequestLane.TASK, 0)))
    struct.pack_into("=H", encoded, 4, VERSION + 1)

    with pytest.raises(MailboxCorrupt, match=rf"version {VERSION + 1}, expected.*same release"):
        decode_frame(encoded)


@pytest.mark.parametrize(
    ("form", "offset", "value", "message"),
    [
        ("=I", 0, 7, "begins with 0x00000007"),
        ("=B", 6, 99, "kind 99"),
        ("=B", 7, 9, "lane 9"),
        ("=Q", 16, 2**63, "says that its body has"),
    ],
)
def test_a_header_that_cannot_be_meant_is_corrupt(
    form: str, offset: int, value: int, message: str
) -> None:
    encoded = bytearray(encode_frame(Frame(FrameKind.REPLY, RequestLane.TASK, 0)))
    struct.pack_into(form, encoded, offset, value)

    with pytest.raises(MailboxCorrupt, match=message):
        decode_frame(encoded)


@given(st.binary(max_size=100))
def test_bytes_that_nobody_framed_are_corrupt(data: bytes) -> None:
    with pytest.raises(MailboxCorrupt):
        decode_frame(data)


CONFIGS = st.builds(
    ChipCallConfig, st.integers(1, 2**31 - 1), st.integers(1, 64), st.booleans(), st.booleans()
)


@given(CONFIGS, st.integers(0, 100))
def test_a_task_keeps_every_option_and_every_tensor(config: ChipCallConfig, count: int) -> None:
    tensors = [
        ContinuousTensor.make(64 * place, (place,), DataType.INT8, place % 2 == 1)
        for place in range(count)
    ]

    assert decode_task(encode_task(tensors, [count], config)) == (tensors, [count], config)


def test_a_task_without_options_has_the_default_ones() -> None:
    assert decode_task(encode_task([], [])) == ([], [], ChipCallConfig())


@given(st.data())
def test_a_cut_task_is_corrupt(data: st.DataObject) -> None:
    frame = encode_task([ContinuousTensor.make(8, (1,), DataType.INT8)], [3])

    with pytest.raises(MailboxCorrupt):
        decode_task(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(st.integers(0, 3), st.integers(0, 3), st.data())
def test_a_damaged_task_is_corrupt_or_another_task_but_never_anything_else(
    tensor_count: int, scalar_count: int, data: st.DataObject
) -> None:
    tensors = [ContinuousTensor.make(8, (2, 3), DataType.INT8)] * tensor_count
    frame = bytearray(encode_task(tensors, [7] * scalar_count))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))

    try:
        arrived = decode_task(frame)
    except MailboxCorrupt:
        return
    assert decode_task(encode_task(*arrived)) == arrived


def test_a_task_whose_arguments_are_missing_says_how_long_it_would_be() -> None:
    short = encode_frame(Frame(FrameKind.REQUEST, RequestLane.TASK, 0, b"\0" * 16))

    with pytest.raises(MailboxCorrupt, match="has 40 bytes, expected at least 48"):
        decode_task(short)


def test_a_command_is_no_task_and_a_task_no_command() -> None:
    with pytest.raises(MailboxCorrupt, match="REQUEST on lane CONTROL came where a task"):
        decode_task(encode_frame(Frame(FrameKind.REQUEST, RequestLane.CONTROL, 0, b"\0" * 32)))
    with pytest.raises(MailboxCorrupt, match="a command's message has 48 bytes, expected 32"):
        decode_command(encode_task([], []))


def test_a_task_with_an_impossible_option_is_corrupt() -> None:
    frame = bytearray(encode_task([], []))
    struct.pack_into("=i", frame, HEADER_BYTES, -1)

    with pytest.raises(MailboxCorrupt, match="block_dim is -1"):
        decode_task(frame)


@given(*[st.integers(0, 2**64 - 1)] * 4)
def test_a_command_survives_the_wire(code: int, first: int, second: int, third: int) -> None:
    body = encode_command(code, first, second, third)

    assert decode_command(body) == Command(code, first, second, third)


def test_a_command_with_a_word_that_has_no_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        encode_command(ControlCode.FREE, -1)


def test_a_long_command_is_corrupt() -> None:
    with pytest.raises(MailboxCorrupt, match="33 bytes, expected 32"):
        decode_command(b"\0" * 33)


@pytest.mark.parametrize("name", ["block_dim", "aicpu_thread_num"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "8", 2**31])
def test_an_option_that_cannot_be_meant_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is"):
        ChipCallConfig().changed(**{name: value})


def test_an_option_set_to_nonsense_later_is_refused_when_it_travels() -> None:
    config = ChipCallConfig()
    config.enable_profiling = 7  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="enable_profiling is 7"):
        encode_task([], [], config)


def test_an_unknown_option_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no call option 'blockdim'.*block_dim"):
        ChipCallConfig().changed(blockdim=3)
