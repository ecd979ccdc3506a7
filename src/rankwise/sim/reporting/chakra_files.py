"""Files of Chakra execution traces: what each device of a run did, and what had to come before.

It is the format of MLCommons' Chakra, which ASTRA-sim takes as its workload: one file per device,
`NAME.0.et`, `NAME.1.et`, …, plain or packed by gzip. In a file is a message of metadata, then one
per *node*, each after its length. A node computes, moves memory, sends, receives, or takes part in
a collective; what is particular to its kind is in attributes, by name. Which devices a collective
is for follows from its process group: `NAME.groups.json` has the devices of each group by its name,
as ASTRA-sim reads it; a collective without a group is for all.

The messages are described to protobuf here, which is wanted only by who reads or writes such files.
"""

import glob
import gzip
import io
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.sim.reporting.files import write_bytes

SUFFIX = ".et"
_GZIP = b"\x1f\x8b"
_VERSION = "0.0.4"
_SCALARS = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32",
    "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes",
)  # fmt: skip
"""What an attribute may hold, alone or as a list, in the order of the fields' numbers."""
_FIRST_VALUE_FIELD = 3


class NodeKind(IntEnum):
    """What a node does."""

    INVALID = 0
    METADATA = 1
    MEMORY_LOAD = 2
    MEMORY_STORE = 3
    COMPUTE = 4
    SEND = 5
    RECEIVE = 6
    COLLECTIVE = 7


COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all",
    "reduce_scatter", "reduce_scatter_block", "barrier",
)  # fmt: skip
"""By the number that the attribute `comm_type` has."""


class ChakraNode(NamedTuple):
    """Something that a device did.

    Attributes:
        number: of its kind in its file; others name it by that.
        name: for people.
        kind: what it does.
        after: the nodes that have to come first.
        duration_us: how long it took, in whole microseconds; 0 if that is not known.
        attributes: what is particular to its kind.
        inputs: what it read, as text.
    """

    number: int
    name: str
    kind: NodeKind
    after: tuple[int, ...] = ()
    duration_us: int = 0
    attributes: Mapping[str, Any] = {}
    inputs: str = ""


def read_traces(path: str) -> tuple[list[list[ChakraNode]], dict[str, list[int]]]:
    """The nodes of every device, and the devices of every process group.

    Args:
        path: `NAME.et`, or the file of any of the devices.

    Raises:
        ConfigError: there are no such files, or one of them is no trace; names the file.
    """
    stem = _stem_of(path)
    files: list[Path] = []
    while (file := Path(f"{stem}.{len(files)}{SUFFIX}")).is_file():
        files.append(file)
    later = _first_after(stem, len(files))
    if later is not None or not files:
        raise ConfigError(
            f"there is no trace {file}" + (f", and there is {later}" if later is not None else ""),
            hint="traces are a file per device: NAME.0.et, NAME.1.et, …",
        )
    return [_read(file) for file in files], _groups(Path(f"{stem}.groups.json"))


def _first_after(stem: str, number: int) -> Path | None:
    """The trace of the first device after this one; a gap is a file that was lost."""
    folder, name = Path(stem).parent, Path(stem).name
    numbers = {
        int(middle)
        for file in folder.glob(f"{glob.escape(name)}.*{SUFFIX}")
        if (middle := file.name[len(name) + 1 : -len(SUFFIX)]).isdecimal()
    }
    after = [each for each in numbers if each > number]
    return Path(f"{stem}.{min(after)}{SUFFIX}") if after else None


def _stem_of(path: str) -> str:
    stem = path.removesuffix(SUFFIX)
    front, _, number = stem.rpartition(".")
    return front if number.isdecimal() and front else stem


def _read(file: Path) -> list[ChakraNode]:
    messages, proto = _messages()
    try:
        content = file.read_bytes()
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    source, nodes = io.BytesIO(content), list[ChakraNode]()
    if not content:
        raise ConfigError(f"{file} is empty, expected a Chakra trace")
    kind = "the metadata"
    try:
        proto.parse_length_prefixed(messages["GlobalMetadata"], source)
        kind = "node 1"
        while (found := proto.parse_length_prefixed(messages["Node"], source)) is not None:
            nodes.append(_node(found))
            kind = f"node {len(nodes) + 1}"
    except Exception as error:  # protobuf has several, and a number may be no kind of node
        why = f"{kind} cannot be read: {error}"
        raise ConfigError(f"{file} is not a Chakra trace: {why}") from error
    _check(file, nodes)
    return nodes


def _check(file: Path, nodes: Sequence[ChakraNode]) -> None:
    numbers = {node.number for node in nodes}
    if len(numbers) < len(nodes):
        raise ConfigError(f"{file}: two nodes have the same number")
    for node in nodes:
        missing = [each for each in node.after if each not in numbers]
        if missing:
            raise ConfigError(
                f"{file}: node {node.number} {node.name!r} comes after node {missing[0]},"
                " which is not there"
            )


def _node(found: Any) -> ChakraNode:
    attributes = {}
    for each in found.attr:
        field = each.WhichOneof("value")
        if field is not None:
            value = getattr(each, field)
            attributes[each.name] = list(value.values) if field.endswith("_list") else value
    return ChakraNode(
        found.id,
        found.name,
        NodeKind(found.type),
        tuple(dict.fromkeys((*found.ctrl_deps, *found.data_deps))),
        found.duration_micros,
        attributes,
        found.inputs.values,
    )


def _groups(file: Path) -> dict[str, list[int]]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, list[int]])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}", hint='expected {"1": [0, 2], "2": [1, 3]}'
        ) from error


def write_traces(
    path: str, devices: Sequence[Iterable[ChakraNode]], groups: Mapping[str, Sequence[int]]
) -> str:
    """Write a file per device, and one of the groups if there are any.

    Args:
        path: `NAME.et`.
        devices: the nodes of every device, each after those that it comes after.
        groups: the devices of every process group.

    Returns:
        What was written, in words.
    """
    messages, proto = _messages()
    stem = _stem_of(path)
    for number, nodes in enumerate(devices):
        content = io.BytesIO()
        proto.serialize_length_prefixed(messages["GlobalMetadata"](version=_VERSION), content)
        for node in nodes:
            proto.serialize_length_prefixed(_message(messages, node), content)
        write_bytes(f"{stem}.{number}{SUFFIX}", content.getvalue())
    if groups:
        write_bytes(f"{stem}.groups.json", msgspec.json.encode(groups))
    last = f" to {stem}.{len(devices) - 1}{SUFFIX}" if len(devices) > 1 else ""
    return f"{stem}.0{SUFFIX}{last}" + (f", and {stem}.groups.json" if groups else "")


def _message(messages: Mapping[str, Any], node: ChakraNode) -> Any:
    made = messages["Node"](
        id=node.number, name=node.name, type=int(node.kind), duration_micros=node.duration_us
    )
    made.data_deps.extend(node.after)
    for name, value in node.attributes.items():
        if isinstance(value, bool):
            made.attr.add(name=name, bool_val=value)
        elif isinstance(value, int):
            made.attr.add(name=name, int64_val=value)
        else:
            made.attr.add(name=name, string_val=value)
    return made


@lru_cache(maxsize=1)
def _messages() -> tuple[dict[str, Any], Any]:
    """The classes of the messages by name, and what writes and reads them after their lengths."""
    try:
        from google.protobuf import (  # noqa: PLC0415  # an extra
            descriptor_pb2,
            descriptor_pool,
            message_factory,
            proto,
        )
    except ImportError as missing:
        raise ConfigError(
            f"Chakra traces need protobuf: {missing}", hint="pip install 'rankwise[chakra]'"
        ) from None
    file = descriptor_pb2.FileDescriptorProto(
        name="rankwise/chakra.proto", package="ChakraProtoMsg", syntax="proto3"
    )
    _describe(file, descriptor_pb2.FieldDescriptorProto)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in ("GlobalMetadata", "Node")
    }
    return classes, proto


def _describe(file: Any, of_fields: Any) -> None:
    """Describe the messages. protobuf leaves unknown fields out by itself."""

    def message(name: str, *fields: tuple[str, int, str], repeated: Iterable[str] = ()) -> Any:
        made = file.message_type.add(name=name)
        for field, number, kind in fields:
            is_list = field in repeated
            own = made.field.add(
                name=field,
                number=number,
                label=of_fields.LABEL_REPEATED if is_list else of_fields.LABEL_OPTIONAL,
            )
            if kind[0].isupper():
                own.type, own.type_name = of_fields.TYPE_MESSAGE, f".ChakraProtoMsg.{kind}"
            else:
                own.type = getattr(of_fields, f"TYPE_{kind.upper()}")
        return made

    for scalar in _SCALARS:
        message(f"{scalar.capitalize()}List", ("values", 1, scalar), repeated=["values"])
    values = []
    for place, scalar in enumerate(_SCALARS):
        number = _FIRST_VALUE_FIELD + 2 * place
        values.append((f"{scalar}_val", number, scalar))
        values.append((f"{scalar}_list", number + 1, f"{scalar.capitalize()}List"))
    attribute = message("AttributeProto", ("name", 1, "string"), *values)
    attribute.oneof_decl.add(name="value")
    for field in attribute.field[1:]:
        field.oneof_index = 0
    message(
        "GlobalMetadata", ("version", 1, "string"), ("attr", 2, "AttributeProto"),
        repeated=["attr"],
    )  # fmt: skip
    message("IOInfo", ("values", 1, "string"), ("shapes", 2, "string"), ("types", 3, "string"))
    message(
        "Node",
        ("id", 1, "uint64"),
        ("name", 2, "string"),
        ("type", 3, "uint32"),  # an enumeration, which has the same form
        ("ctrl_deps", 4, "uint64"),
        ("data_deps", 5, "uint64"),
        ("duration_micros", 7, "uint64"),
        ("inputs", 8, "IOInfo"),
        ("attr", 10, "AttributeProto"),
        repeated=["ctrl_deps", "data_deps", "attr"],
    )
