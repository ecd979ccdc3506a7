"""A world of one rank, wrong arguments, and environments that nobody can communicate in."""

import threading
from typing import Any, get_args

import numpy as np
import pytest

from rankwise import collectives
from rankwise.base.errors import CollectiveError, ConfigError, LocalProtocolError
from rankwise.base.units import SECOND
from rankwise.collectives.calls import describe, read_header
from rankwise.collectives.communicator import Communicator
from rankwise.collectives.default import communicator_from_environment
from rankwise.collectives.ordered_reductions import REDUCTIONS, ReductionName
from rankwise.collectives.transport import SolitaryTransport
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.drivers.real.segments import Segment


@pytest.fixture
def alone() -> Communicator:
    return communicator_from_environment({})


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
def test_alone_every_operation_is_the_identity(alone: Communicator, op: ReductionName) -> None:
    array = np.array([[1.5, -2.0], [0.25, 8.0]])

    assert (alone.rank, alone.size) == (0, 1)
    assert np.array_equal(alone.all_reduce(array, op), array)
    assert np.array_equal(alone.reduce_scatter(array[np.newaxis], op), array)
    assert np.array_equal(alone.all_gather(array), array[np.newaxis])
    assert np.array_equal(alone.all_to_all(array[np.newaxis]), array[np.newaxis])
    assert np.array_equal(alone.broadcast(array), array)
    alone.barrier()


def test_the_result_is_a_new_array_unless_out_is_given(alone: Communicator) -> None:
    array = np.arange(3.0)
    out = np.zeros(3)

    assert not np.shares_memory(alone.all_reduce(array), array)
    assert alone.all_reduce(array, out=out) is out
    assert out.tolist() == [0, 1, 2]


def test_what_numpy_makes_an_array_of_is_accepted(alone: Communicator) -> None:
    assert alone.all_reduce(3.5).shape == ()
    assert alone.all_gather([1, 2]).tolist() == [[1, 2]]


def test_module_functions_use_one_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.collectives.default._default", None)
    for name in ("WORLD_SIZE", "RANK", "RANKWISE_SEGMENT_FD"):
        monkeypatch.delenv(name, raising=False)

    assert (collectives.rank(), collectives.size()) == (0, 1)
    assert collectives.all_reduce([2.0]).tolist() == [2]
    assert collectives.reduce_scatter([[2.0]]).tolist() == [2]
    assert collectives.all_gather(7).tolist() == [7]
    assert collectives.all_to_all([7]).tolist() == [7]
    assert collectives.broadcast([1]).tolist() == [1]
    collectives.barrier()
    assert collectives.default_communicator() is collectives.default_communicator()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("all_reduce", ([1], "avg"), r"op is 'avg', expected one of sum, mean, max, min, prod"),
        ("all_reduce", ([1], "mean"), r"dtype int64 cannot be reduced with 'mean' .*astype"),
        ("all_reduce", (["a"],), r"dtype <U1 cannot be reduced with 'sum'"),
        ("all_reduce", ([1.0], "sum", np.zeros(2)), r"out has shape \(2,\) and dtype float64"),
        ("all_reduce", ([1.0], "sum", np.zeros(1, int)), r"expected \(1,\) and float64"),
        ("all_reduce", ([1.0], "sum", [0.0]), r"out is a list, expected a numpy array"),
        ("all_reduce", ([1.0], "sum", np.broadcast_to(0.0, 1)), r"out cannot be written"),
        ("reduce_scatter", (np.ones((3, 2)),), r"shape \(3, 2\), expected \(1, …\)"),
        ("reduce_scatter", (1.0,), r"shape \(\), expected \(1, …\)"),
        ("all_to_all", (np.ones((3, 2)),), r"shape \(3, 2\), expected \(1, …\)"),
        ("all_gather", ([object()],), r"all_gather: arrays of dtype object hold Python objects"),
        ("broadcast", ([object()],), r"broadcast: arrays of dtype object hold Python objects"),
        ("broadcast", ([1], 1), r"root is 1, expected a whole number, 0 to 0"),
        ("broadcast", ([1], -1), r"root is -1, expected a whole number, 0 to 0"),
        ("barrier", (0,), r"timeout is 0, expected a number of seconds, more than 0"),
    ],
)
def test_a_wrong_argument_is_named_and_breaks_nothing(
    alone: Communicator, name: str, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        getattr(alone, name)(*arguments)

    alone.barrier()


@pytest.mark.parametrize("world_size", ["1", "4"])
def test_under_somebody_elses_launcher_it_says_what_to_do(world_size: str) -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is '\d', but .*`rankwise run`"):
        communicator_from_environment({"WORLD_SIZE": world_size, "RANK": "0"})


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"RANKWISE_COLLECTIVE_TIMEOUT is '{text}', expected"):
        communicator_from_environment({"RANKWISE_COLLECTIVE_TIMEOUT": text})


def test_simulated_chips_and_real_ranks_know_the_same_reductions_by_the_same_names() -> None:
    assert set(REDUCTIONS) == {op.value for op in ReduceOp} == set(get_args(ReductionName))


def test_the_timeout_is_read_from_the_environment() -> None:
    communicator = communicator_from_environment({"RANKWISE_COLLECTIVE_TIMEOUT": "1.5"})

    assert communicator._timeout == 3 * SECOND // 2


def test_a_segment_variable_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="RANKWISE_SEGMENT_FD is 'seven'"):
        communicator_from_environment({"RANKWISE_SEGMENT_FD": "seven"})


def test_a_closed_communicator_refuses_and_gives_its_rank_back() -> None:
    with Segment.create(1) as segment:
        environment = {"RANK": "0", "WORLD_SIZE": "1", "RANKWISE_SEGMENT_FD": str(segment.fd)}
        with communicator_from_environment(environment) as first:
            first.barrier()
            with pytest.raises(LocalProtocolError, match="already in use by this process"):
                communicator_from_environment(environment)
        first.close()

        with pytest.raises(CollectiveError, match="rank 0 cannot do barrier #2: it is closed"):
            first.barrier()
        with communicator_from_environment(environment) as second:
            assert second.all_reduce(np.ones(100_000)).sum() == 100_000
        assert segment.marks(0)[0] > 0


class HeldUpTransport(SolitaryTransport):
    """A barrier that lasts as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.leave = threading.Event()

    def barrier(self) -> None:
        self.entered.set()
        self.leave.wait()


def test_a_second_thread_is_refused_and_the_first_unharmed() -> None:
    transport = HeldUpTransport()
    communicator = Communicator(transport)
    first = threading.Thread(target=communicator.barrier)
    first.start()
    transport.entered.wait()

    with pytest.raises(
        LocalProtocolError,
        match=r"called all_reduce #2 \(sum\) of \(1,\) int64 while another thread is in .* #1",
    ):
        communicator.all_reduce([1])

    transport.leave.set()
    first.join()
    assert communicator.all_reduce([1]).tolist() == [1]


def test_an_operation_is_described_by_all_that_ranks_must_agree_on() -> None:
    structure = np.dtype([("id", "i4"), ("value", "f8")])
    texts = [
        describe("barrier").numbered(7),
        describe("all_reduce", np.dtype("f4"), (), op="max").numbered(1),
        describe("broadcast", np.dtype(">i2"), (3, 4), root=2).numbered(12),
        describe("all_gather", structure, (1,)).numbered(1),
    ]

    assert texts == [
        "barrier #7",
        "all_reduce #1 (max) of () float32",
        "broadcast #12 from rank 2 of (3, 4) >i2",
        "all_gather #1 of (1,) [('id', '<i4'), ('value', '<f8')]",
    ]
    assert read_header(describe("barrier").header, 7) == "barrier #7"


def test_headers_too_long_for_their_place_are_still_told_apart() -> None:
    shape = (1,) * 60
    left = describe("all_reduce", np.dtype("f4"), (*shape, 2), op="sum").header
    right = describe("all_reduce", np.dtype("f4"), (*shape, 3), op="sum").header

    assert len(left) == len(right)
    assert left != right
