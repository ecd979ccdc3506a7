"""What a worker is told in one frame: a task's configuration and arguments, or a command.

A task's body is the configuration (4 words of 32 bits) and the arguments; a command's is a
code and three arguments of 64 bits. Both are bodies of REQUEST frames, on lanes of their own. Tasks
are written as whole frames here, since there are many; commands are framed by the machines.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from rankwise.base.errors import ConfigError, MailboxCorrupt, TreeValueError
from rankwise.core.tasks.frames import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    FrameKind,
    RequestLane,
    decode_frame,
)
from rankwise.core.tasks.tensors import (
    ContinuousTensor,
    TensorArgType,
    decode_numbers,
    decode_tags,
    encode_numbers,
)

_CONFIG = struct.Struct("=4i")
_COMMAND = struct.Struct("=4Q")
_TASK = struct.Struct("=IHBBQQ4i")
"""A header of `frames` and a configuration at once: every task of every worker comes by here."""
_TASK_BYTES_MIN = _TASK.size + 8
_REQUEST, _ON_TASK_LANE = int(FrameKind.REQUEST), int(RequestLane.TASK)
_I32_MAX = (1 << 31) - 1


class ChipCallConfig(msgspec.Struct):
    """How a chip runs a task.

    Attributes:
        block_dim: how many blocks a kernel is cut into, unless its callable says otherwise.
        aicpu_thread_num: how many threads drive it; kept for programs that set it.
        enable_profiling: whether the report has a span for each operation, not only for the task.
        enable_dump_tensor: whether the report summarises each tensor after the task.
    """

    block_dim: int = 24
    aicpu_thread_num: int = 3
    enable_profiling: bool = False
    enable_dump_tensor: bool = False

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse what cannot be meant; its fields can be set after it was made.

        Raises:
            ConfigError: names the field and its value.
        """
        _check_count("block_dim", self.block_dim)
        _check_count("aicpu_thread_num", self.aicpu_thread_num)
        _check_switch("enable_profiling", self.enable_profiling)
        _check_switch("enable_dump_tensor", self.enable_dump_tensor)

    def changed(self, **overrides: object) -> "ChipCallConfig":
        """A copy in which some fields are different.

        Raises:
            ConfigError: there is no such field, or it cannot have that value.
        """
        for name in overrides:
            if name not in self.__struct_fields__:
                raise TreeValueError(
                    f"there is no call option {name!r}",
                    hint=f"there are {', '.join(self.__struct_fields__)}",
                )
        return msgspec.structs.replace(self, **overrides)


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= _I32_MAX:
        raise TreeValueError(f"{name} is {value!r}, expected a whole number, 1 or more")


def _check_switch(name: str, value: object) -> None:
    if value is not True and value is not False:
        raise TreeValueError(f"{name} is {value!r}, expected True or False")


_DEFAULT_WORDS = (24, 3, 0, 0)


def encode_task(
    tensors: Sequence[ContinuousTensor],
    scalars: Sequence[int | float],
    config: ChipCallConfig | None = None,
    sequence: int = 0,
    *,
    tags: Sequence[TensorArgType] = (),
) -> bytes:
    """A task's frame, of whatever length its arguments take."""
    words = _DEFAULT_WORDS if config is None else _config_words(config)
    arguments = encode_numbers(tensors, scalars, tags)
    size = _CONFIG.size + len(arguments)
    head = _TASK.pack(MAGIC, VERSION, _REQUEST, _ON_TASK_LANE, sequence, size, *words)
    return head + arguments


def _config_words(config: ChipCallConfig) -> tuple[int, int, int, int]:
    config.check()
    return (
        config.block_dim,
        config.aicpu_thread_num,
        config.enable_profiling,
        config.enable_dump_tensor,
    )


def decode_task(
    data: bytes | bytearray | memoryview,
) -> tuple[list[ContinuousTensor], list[int | float], ChipCallConfig]:
    """Read a task's frame: tensors, scalars, configuration.

    Raises:
        MailboxCorrupt: it was cut, is from another release, or is no task.
    """
    block_dim, thread_num, profiling, dump = _task_words(data)
    try:
        config = ChipCallConfig(block_dim, thread_num, profiling == 1, dump == 1)
    except ConfigError as error:
        raise MailboxCorrupt(f"a task's message has a wrong configuration: {error}") from None
    return *decode_task_arguments(data), config


def decode_task_arguments(
    data: bytes | bytearray | memoryview,
) -> tuple[list[ContinuousTensor], list[int | float]]:
    """Read the tensors and scalars of a frame; see `decode_task`, which looks at all of it."""
    _task_words(data)
    return decode_numbers(memoryview(data)[_TASK.size :])


def decode_task_tags(data: bytes | bytearray | memoryview) -> list[TensorArgType]:
    """Read the tags of a frame's tensors; see `decode_task`, which has looked at it."""
    return decode_tags(memoryview(data)[_TASK.size :])


def _task_words(data: bytes | bytearray | memoryview) -> list[int]:
    """The words of a frame's configuration, if it is a task's and whole."""
    if len(data) < _TASK_BYTES_MIN:
        decode_frame(data)  # says what is missing, if it is not that
        raise MailboxCorrupt(
            f"a task's message has {len(data)} bytes, expected at least {_TASK_BYTES_MIN}"
        )
    magic, version, kind, lane, _sequence, size, *words = _TASK.unpack_from(data)
    is_ours = magic == MAGIC and version == VERSION and size == len(data) - HEADER_BYTES
    if not is_ours or kind != _REQUEST or lane != _ON_TASK_LANE:
        _body(data, RequestLane.TASK, "task")  # raises, and says why
    return words


class ControlCode(IntEnum):
    """Commands that work on a chip's memory."""

    MALLOC = 0
    FREE = 1
    COPY_TO = 2
    COPY_FROM = 3


class Command(msgspec.Struct, frozen=True):
    """A command to a worker; what its arguments mean, and other codes, are the driver's."""

    code: int
    arg0: int = 0
    arg1: int = 0
    arg2: int = 0


def encode_command(code: int, arg0: int = 0, arg1: int = 0, arg2: int = 0) -> bytes:
    """A command, as the body of a request.

    Raises:
        ConfigError: one of the words has no place in 64 bits.
    """
    try:
        return _COMMAND.pack(code, arg0, arg1, arg2)
    except struct.error:
        raise TreeValueError(
            f"command {code} has arguments {arg0}, {arg1}, {arg2}, expected 0 to 2**64 - 1"
        ) from None


def decode_command(body: bytes | bytearray | memoryview) -> Command:
    """Read a command out of a request's body.

    Raises:
        MailboxCorrupt: it was cut, or is no command.
    """
    if len(body) != _COMMAND.size:
        raise MailboxCorrupt(f"a command's message has {len(body)} bytes, expected {_COMMAND.size}")
    return Command(*_COMMAND.unpack(body))


def _body(data: bytes | bytearray | memoryview, lane: RequestLane, what: str) -> bytes:
    frame = decode_frame(data)
    if frame.kind is not FrameKind.REQUEST or frame.lane is not lane:
        raise MailboxCorrupt(
            f"a {frame.kind.name} on lane {frame.lane.name} came where a {what} was expected"
        )
    return frame.body
