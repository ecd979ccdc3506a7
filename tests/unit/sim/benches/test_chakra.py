"""Chakra execution traces: what is run, what is written, and what is refused."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rankwise.base.errors import ConfigError, Deadlock, RankwiseError
from rankwise.sim.benches.session import BenchSettings, Finished, simulate
from rankwise.sim.reporting.chakra import write_chakra
from rankwise.sim.reporting.chakra_files import ChakraNode, NodeKind, read_traces, write_traces

ALL_REDUCE, GATHER, SCATTER = 0, 3, 4


def replayed(path: Path, **fields: str) -> Finished:
    return simulate(BenchSettings(program=str(path), is_file=True, fields=fields))


def write(
    path: Path, *devices: Iterable[ChakraNode], groups: Mapping[str, Sequence[int]] = {}
) -> Path:
    write_traces(str(path), devices, groups)
    return path


def computes(number: int, *after: int, us: int = 10, **attributes: Any) -> ChakraNode:
    return ChakraNode(number, f"work {number}", NodeKind.COMPUTE, after, us, attributes)


def collective(number: int, *after: int, kind: int = ALL_REDUCE, size: int = 4096,
               **attributes: Any) -> ChakraNode:  # fmt: skip
    given = {"comm_type": kind, "comm_size": size, **attributes}
    return ChakraNode(number, f"collective {number}", NodeKind.COLLECTIVE, after, 0, given)


def sends(number: int, to: int, *after: int, size: int = 4096) -> ChakraNode:
    given = {"comm_dst": to, "comm_size": size}
    return ChakraNode(number, f"send {number}", NodeKind.SEND, after, 0, given)


def receives(number: int, source: int, *after: int, size: int = 4096) -> ChakraNode:
    given = {"comm_src": source, "comm_size": size}
    return ChakraNode(number, f"receive {number}", NodeKind.RECEIVE, after, 0, given)


# The last one waits for all ranks after each algorithm, which traces cannot tell: a rank that has
# given its block to a root goes on sooner.
@pytest.mark.parametrize(
    ("bench", "off"), [("tp_mlp", 0), ("ccl_allreduce", 0.02), ("all_collectives", 0.02)]
)
def test_a_run_that_was_written_takes_the_same_time_again(
    bench: str, off: float, tmp_path: Path
) -> None:
    first = simulate(BenchSettings(program=bench, has_data=False))

    told = write_chakra(str(tmp_path / "run.et"), first.engine)
    again = replayed(tmp_path / "run.et")

    assert told == f"{tmp_path}/run.0.et to {tmp_path}/run.3.et"
    assert again.results[0].time_ps == pytest.approx(first.engine.now, rel=off)
    assert again.results[0].bench == "run.et"


def test_an_mlp_is_replayed_to_the_picosecond_and_its_kernels_have_their_operations(
    tmp_path: Path,
) -> None:
    first = simulate(BenchSettings(program="tp_mlp", has_data=False))
    write_chakra(str(tmp_path / "mlp.et"), first.engine)

    assert replayed(tmp_path / "mlp.et").engine.now == first.engine.now
    nodes = read_traces(str(tmp_path / "mlp.2.et"))[0][2]
    launched = [node for node in nodes if node.attributes.get("num_ops")]
    assert [node.name for node in launched[:2]] == ["linear_kernel", "relu_kernel"]
    # 64 x 128 by 128 x 64: a fourth of the columns.
    assert launched[0].attributes["num_ops"] >= 2 * 64 * 128 * 64


@pytest.mark.parametrize(("kind", "bytes_of_root"), [(GATHER, 3 * 4096), (SCATTER, 3 * 1024)])
def test_gather_and_scatter_move_a_block_between_the_root_and_each_other_device(
    kind: int, bytes_of_root: int, tmp_path: Path
) -> None:
    devices = [[collective(0, kind=kind, root=2)]] * 4
    finished = replayed(write(tmp_path / "x.et", *devices))

    carried = {link.name: link.bytes_carried for link in finished.engine.machine.links}
    data = [f"sip{other}->sip2" if kind == GATHER else f"sip2->sip{other}" for other in (1, 3)]
    returned = 16 * 3  # credits
    assert bytes_of_root <= sum(carried[name] for name in data) <= bytes_of_root + returned


@pytest.mark.parametrize(
    ("call", "size"),
    [("gather(one, each, dst=2)", 2048), ("scatter(one, each, src=2)", 8192),
     ("broadcast(one, src=2)", 2048), ("reduce(one, dst=2)", 2048)],
)  # fmt: skip
def test_a_collective_with_a_root_that_was_written_takes_the_same_time_again(
    call: str, size: int, tmp_path: Path
) -> None:
    program = tmp_path / "rooted.py"
    program.write_text(
        "def worker(rank, world_size, torch):\n"
        "    one = torch.zeros(1024, dtype='f16')\n"
        "    each = [torch.zeros(1024, dtype='f16') for _ in range(4)]\n"
        "    each = each if rank == 2 else None\n"
        f"    torch.distributed.{call}\n"
    )
    first = simulate(BenchSettings(program=str(program), is_file=True, has_data=False))
    write_chakra(str(tmp_path / "run.et"), first.engine)

    for nodes in read_traces(str(tmp_path / "run.et"))[0]:
        (talk,) = [each.attributes for each in nodes if each.kind is NodeKind.COLLECTIVE]
        assert (talk["comm_size"], talk["root"]) == (size, 2)
    assert replayed(tmp_path / "run.et").engine.now == first.engine.now


def test_the_bytes_of_a_file_are_those_of_the_format(tmp_path: Path) -> None:
    """Put together by hand from the numbers of the fields, as other tools write them."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    size = field(1, b"comm_size") + bytes([9 << 3, 0x80, 0x20])  # int64_val = 4096
    kind = field(1, b"comm_type") + bytes([9 << 3, 0x00])
    flag = field(1, b"is_cpu_op") + bytes([(27 << 3 | 0) & 0x7F | 0x80, 27 >> 4, 0x00])
    node = bytes([1 << 3, 7]) + field(2, b"AR") + bytes([3 << 3, 7])
    node += field(10, flag) + field(10, kind) + field(10, size)
    metadata = field(1, b"0.0.4")
    content = b"".join(bytes([len(each)]) + each for each in (metadata, node))
    for device in range(2):
        (tmp_path / f"hand.{device}.et").write_bytes(content)

    (nodes, _), groups = read_traces(str(tmp_path / "hand.et"))

    attributes = {"is_cpu_op": False, "comm_type": ALL_REDUCE, "comm_size": 4096}
    assert nodes == [ChakraNode(7, "AR", NodeKind.COLLECTIVE, (), 0, attributes)]
    assert groups == {}
    result = replayed(tmp_path / "hand.0.et").results[0]
    assert result.bytes == 2 * 4096
    write(tmp_path / "ours.et", nodes, nodes)
    ours = read_traces(str(tmp_path / "ours.et"))[0][0]
    assert ours == nodes


def test_computing_takes_one_thing_at_a_time_and_the_host_beside_it(tmp_path: Path) -> None:
    nodes = [computes(0), computes(1), computes(2, us=15, is_cpu_op=True), computes(3, 0, 1)]
    path = write(tmp_path / "a.et", nodes)

    assert replayed(path).results[0].time_ps == 30_000_000


def test_what_comes_after_a_collective_waits_for_it_and_nothing_else_does(tmp_path: Path) -> None:
    size = 1 << 18
    alone = replayed(write(tmp_path / "alone.et", *[[collective(0, size=size)]] * 4))
    took = alone.results[0].time_ps

    beside = [[collective(0, size=size), computes(1, us=10)]] * 4
    behind = [[collective(0, size=size), computes(1, 0, us=10)]] * 4
    times = [
        replayed(write(tmp_path / f"{name}.et", *devices)).results[0].time_ps
        for name, devices in (("beside", beside), ("behind", behind))
    ]

    assert took > 10_000_000
    assert times == [took, took + 10_000_000]


def test_stages_of_a_pipeline_overlap(tmp_path: Path) -> None:
    """Each computes 10 us and hands on, four times: (4 + 3) x 10 us and the messages."""
    stages: list[list[ChakraNode]] = []
    for stage in range(4):
        nodes: list[ChakraNode] = []
        for batch in range(4):
            got = 3 * batch
            before = [got] if stage else []
            if stage:
                nodes.append(receives(got, stage - 1))
            nodes.append(computes(got + 1, *before))
            if stage < 3:
                nodes.append(sends(got + 2, stage + 1, got + 1))
        stages.append(nodes)

    took = replayed(write(tmp_path / "pipe.et", *stages)).results[0].time_ps

    assert 70_000_000 < took < 78_000_000


def test_roofs_take_the_place_of_recorded_times_where_they_are_wanted(tmp_path: Path) -> None:
    known = computes(0, us=1_000, num_ops=1 << 30, tensor_size=1 << 20)
    unknown = computes(0, us=0, num_ops=1 << 30, tensor_size=1 << 20)
    times = [
        replayed(write(tmp_path / f"{name}.et", [node]), computing=how).results[0].time_ps
        for name, node, how in (
            ("a", known, "recorded"),
            ("b", known, "roofline"),
            ("c", unknown, "recorded"),
        )
    ]

    assert times[0] == 1_000_000_000
    assert times[1] == times[2] < 100_000_000


def test_groups_beside_the_traces_say_who_takes_part(tmp_path: Path) -> None:
    devices = [[collective(0, pg_name=str(1 + rank % 2))] for rank in range(4)]
    groups = {"1": [0, 2], "2": [1, 3]}

    finished = replayed(write(tmp_path / "g.et", *devices, groups=groups))

    names = {each.name for each in finished.engine.op_log if each.kind == "all_reduce"}
    assert {name.partition(" in ")[2] for name in names} == {
        "process group 1 (ranks 0, 2)",
        "process group 2 (ranks 1, 3)",
    }
    told = write_chakra(str(tmp_path / "again.et"), finished.engine)
    assert told.endswith(f"and {tmp_path}/again.groups.json")
    assert read_traces(str(tmp_path / "again.et"))[1] == groups


def test_groups_that_pytorch_describes_in_its_traces_are_known(tmp_path: Path) -> None:
    described = """['[{"pg_name": "7", "ranks": [0, 1]}, {"pg_name": "0", "ranks": []}]']"""
    path = write(tmp_path / "p.et", *[[collective(1, pg_name="7")]] * 2, [computes(1)])
    for rank in range(3):
        add_metadata(Path(f"{tmp_path}/p.{rank}.et"), described)

    finished = replayed(path)

    assert finished.results[0].case == "3 devices, 6 nodes"
    names = [each.name for each in finished.engine.op_log if each.kind == "all_reduce"]
    assert [name.partition(" in ")[2] for name in names] == ["process group 7 (ranks 0-1)"] * 2


def add_metadata(file: Path, text: str) -> None:
    """A first node that describes process groups."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    node = bytes([1 << 3, 0, 3 << 3, 1]) + field(8, field(1, text.encode()))
    content = file.read_bytes()
    metadata, nodes = content[: content[0] + 1], content[content[0] + 1 :]
    file.write_bytes(metadata + bytes([len(node)]) + node + nodes)


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        pytest.param(
            [[collective(0)], [collective(0, size=8192)]],
            r"x.et, device 0: node 0 'collective 0' is all_reduce of 4096 bytes, and"
            r" .*device 1: node 0 .* is all_reduce of 8192 bytes: both are the next of all devices",
            id="sizes differ",
        ),
        pytest.param(
            [[collective(0), collective(1)], [collective(0)]],
            "of all devices, device 0 has 2, device 1 has 1",
            id="one has more",
        ),
        pytest.param([[sends(0, 1)], []], "device 0 has 1, device 1 has 0", id="nobody receives"),
        pytest.param([[sends(0, 0)], []], "goes to device 0, expected another device", id="self"),
        pytest.param(
            [[collective(0, kind=77)]], "is a number 77, which cannot be run", id="number"
        ),
        pytest.param([[collective(0, size=0)]], "has no comm_size, or one of 0", id="no size"),
        pytest.param([[collective(0, pg_name="9")]], "'9', which nothing describes", id="group"),
        pytest.param([[computes(0, 1)]], "comes after node 1, which is not there", id="missing"),
        pytest.param([[computes(0, 1), computes(1, 0)]], "comes after itself", id="circle"),
        pytest.param([[computes(0), computes(0)]], "two nodes have the same number", id="twice"),
        pytest.param([[computes(0)]] * 5, "of 5 devices, and the machine has 4", id="too many"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    devices: list[list[ChakraNode]], told: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.et", *devices)

    with pytest.raises(ConfigError, match=told):
        replayed(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "there is no trace .*x.0.et"),
        (b"", "x.0.et is empty, expected a Chakra trace"),
        (b"import torch\n", "x.0.et is not a Chakra trace: the metadata cannot be read"),
        (b"\x00\x7fabc", "x.0.et is not a Chakra trace: node 1 cannot be read"),
        (b"\x1f\x8bnot packed", "x.0.et cannot be read"),
        (b"\x00\x02\x18\x63", "node 1 cannot be read: 99 is not a valid NodeKind"),
    ],
)
def test_a_file_that_is_no_trace_is_told(content: bytes | None, told: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.0.et").write_bytes(content)

    with pytest.raises(ConfigError, match=told):
        replayed(tmp_path / "x.et")


@pytest.mark.parametrize(("lost", "told"), [(0, 1), (1, 2), (2, 10)])
def test_a_trace_that_is_lost_from_the_middle_is_told(lost: int, told: int, tmp_path: Path) -> None:
    for number in (0, 1, 2, 10):
        if number != lost:
            (tmp_path / f"x[1].{number}.et").write_bytes(b"")
    (tmp_path / "x[1].old.et").write_bytes(b"")

    with pytest.raises(ConfigError) as refused:
        replayed(tmp_path / "x[1].et")

    stem = tmp_path / "x[1]"
    assert f"there is no trace {stem}.{lost}.et, " in str(refused.value)
    assert f"and there is {stem}.{told}.et" in str(refused.value)


def test_devices_that_wait_for_each_other_in_a_circle_are_a_deadlock_that_names_nodes(
    tmp_path: Path,
) -> None:
    devices = [[receives(0, 1 - rank), sends(1, 1 - rank, 0)] for rank in range(2)]
    path = write(tmp_path / "circle.et", *devices)

    with pytest.raises(Deadlock, match="message from rank 0 to rank 1"):
        replayed(path)


def test_packed_traces_are_read(tmp_path: Path) -> None:
    import gzip  # noqa: PLC0415  # only here

    path = write(tmp_path / "p.et", [computes(0)])
    file = tmp_path / "p.0.et"
    file.write_bytes(gzip.compress(file.read_bytes()))

    assert replayed(path).results[0].time_ps == 10_000_000


def test_two_ranks_of_one_device_have_no_trace(tmp_path: Path) -> None:
    run = simulate(
        BenchSettings(program="ccl_allreduce", fields={"world_size": "8"}, has_data=False)
    )

    with pytest.raises(RankwiseError, match=r"two ranks of all_reduce.* are on sip"):
        write_chakra(str(tmp_path / "x.et"), run.engine)
