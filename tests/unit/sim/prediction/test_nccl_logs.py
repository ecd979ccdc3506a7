"""Logs of nccl-tests as people keep them: other collectives, columns, prefixes, several tables."""

import pytest

from rankwise.base.errors import ConfigError
from rankwise.simranks.prediction.machines.calibration import MeasuredCollective
from rankwise.simranks.prediction.machines.nccl_logs import read_nccl_tests

MIB = 1 << 20
HEADING = (
    "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    "     time   algbw   busbw #wrong"
)


def ranks(count: int, nodes: int = 1) -> list[str]:
    """The list of ranks, with the addresses that newer releases print."""
    per_node = count // nodes
    return [
        f"#  Rank {rank:2} Group  0 Pid 20{rank:04} on  node{rank // per_node} device"
        f" {rank % per_node:2} [0009:01:00] NVIDIA GH200 120GB"
        for rank in range(count)
    ]


def row(size: int, time_us: float, factor: float, kind: str = "float     sum      -1") -> str:
    rate = size / time_us / 1e3
    figures = f"{time_us:.2f}  {rate:.2f}  {rate * factor:.2f}"
    return f"   {size}   {size // 4}   {kind}   {figures}   0   {figures}   N/A"


def log(*lines: str, name: str = "all_reduce_perf", count: int = 8, nodes: int = 1) -> str:
    begin = [f"# Collective test starting: {name}", "# nThread 1 nGpus 1 minBytes 8"]
    return "\n".join([*begin, *ranks(count, nodes), HEADING, *lines, "# Avg bus bandwidth : 1"])


def point(
    kind: str, size: int, time_us: float, nodes: int = 1, per_node: int = 8
) -> MeasuredCollective:
    return MeasuredCollective(
        kind=kind, size=size, nodes=nodes, per_node=per_node, seconds=time_us * 1e-6
    )


@pytest.mark.parametrize(
    ("name", "kind", "words", "share"),
    [
        ("all_gather", "all_gather", "float    none      -1", 8),
        ("reduce_scatter", "reduce_scatter", "float     sum      -1", 1),
        ("alltoall", "all_to_all", "float    none      -1", 1),
    ],
)
def test_other_collectives_are_read_by_what_a_rank_puts_in(
    name: str, kind: str, words: str, share: int
) -> None:
    text = log(row(64 * MIB, 900.0, 7 / 8, words), name=f"{name}_perf")

    assert read_nccl_tests(text, "a.log") == [point(kind, 64 * MIB // share, 900.0)]


def test_columns_follow_the_heading() -> None:
    heading = (
        "#   size    count    type     time   algbw   busbw  error     time   algbw   busbw  error"
    )
    line = "  65536   2048   float   52.01   1.26   1.10  0e+00   50.09   1.31   1.14  0e+00"
    text = "\n".join(["all_gather_perf -b 64K", *ranks(8), heading, line])

    assert read_nccl_tests(text, "a.log") == [point("all_gather", 8192, 52.01)]


def test_in_place_time_counts_where_the_other_is_lacking() -> None:
    line = f"  {MIB}  {MIB // 4}  float  sum  -1    N/A   N/A   N/A   N/A   40.00  26.21  45.88   0"

    assert read_nccl_tests(log(line), "a.log") == [point("all_reduce", MIB, 40.0)]


def test_prefixes_of_launchers_and_lines_of_nccl_are_passed_over() -> None:
    lines = log(row(MIB, 40.0, 7 / 4), row(4 * MIB, 60.0, 7 / 4)).splitlines()
    noise = (
        "node0:2081594:2081604 [1] NCCL INFO AllReduce: opCount 5 sendbuff 0x7f count 262144 float"
    )
    text = "\n".join(f"[1,0]<stdout>:{line}\n{noise}" for line in lines)

    assert [each.size for each in read_nccl_tests(text, "a.log")] == [MIB, 4 * MIB]


def test_a_log_of_several_programs_has_the_points_of_each() -> None:
    first = log(row(MIB, 90.0, 15 / 8), count=16, nodes=2)
    second = log(row(MIB, 50.0, 15 / 16), name="reduce_scatter_perf", count=16, nodes=2)
    third = log(row(MIB, 30.0, 1.0), name="sendrecv_perf", count=16, nodes=2)

    assert read_nccl_tests(f"{first}\n{second}\n{third}", "a.log") == [
        point("all_reduce", MIB, 90.0, nodes=2),
        point("reduce_scatter", MIB, 50.0, nodes=2),
    ]


def test_a_program_that_is_not_named_is_known_by_its_bandwidths_or_its_file() -> None:
    reduced = "\n".join([*ranks(8), HEADING, row(MIB, 40.0, 7 / 4)])
    gathered = "\n".join([*ranks(8), HEADING, row(MIB, 40.0, 7 / 8, "float none -1")])

    assert read_nccl_tests(reduced, "a.log") == [point("all_reduce", MIB, 40.0)]
    assert read_nccl_tests(gathered, "all_gather.log") == [point("all_gather", MIB // 8, 40.0)]
    with pytest.raises(ConfigError, match="does not name its program"):
        read_nccl_tests(gathered, "a.log")


def test_a_log_that_contradicts_itself_is_refused() -> None:
    shortened = log(row(64 * MIB, 400.0, 7 / 4), count=2)
    milliseconds = log(f"  {64 * MIB}  {16 * MIB}  float  sum  -1  0.4  167.8  293.6  0")

    with pytest.raises(ConfigError, match="lists 2 ranks of all_reduce"):
        read_nccl_tests(shortened, "a.log")
    with pytest.raises(ConfigError, match="expected times in microseconds"):
        read_nccl_tests(milliseconds, "a.log")


def test_a_log_of_what_is_not_predicted_is_refused() -> None:
    with pytest.raises(ConfigError, match="has only sendrecv_perf"):
        read_nccl_tests(log(row(MIB, 30.0, 1.0), name="sendrecv_perf"), "a.log")


@pytest.mark.parametrize("time", ["0.00", "-1", "nan"])
def test_a_row_that_takes_no_time_is_refused(time: str) -> None:
    last = f"  {64 * MIB}  {16 * MIB}  float  sum  -1  {time}  0.00  0.00  0  400  167.8  293.6  0"
    text = log(row(MIB, 40.0, 7 / 4), last)

    with pytest.raises(ConfigError, match=r"67,108,864 bytes take .* us, expected a time"):
        read_nccl_tests(text, "a.log")
