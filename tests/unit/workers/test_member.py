"""Members of one domain in one process: what one does is seen, wrong arguments break nothing."""

import gc
import mmap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.base.errors import (
    CollectiveTimeout,
    ConfigError,
    LocalProtocolError,
    PeerDied,
)
from rankwise.workers import UnknownName
from rankwise.workers.domains import create_domain, place_domain, plan_domain
from rankwise.workers.member import Member

BUFFERS: dict[str, Any] = {
    "x": (8, "f4"),
    "rows": ((3, 2), "i8"),
    "one": ((), "f8"),
    "none": (0, "f4"),
}
SPEC = plan_domain("tp", [0, 1, 2], BUFFERS, signals=["go", "done"])


@pytest.fixture
def members() -> Iterator[list[Member]]:
    with create_domain(SPEC) as region:
        joined = [Member.join(region, rank, SPEC) for rank in range(3)]
        yield joined
        for member in joined:
            member.close()


def test_a_window_is_the_same_memory_for_all(members: list[Member]) -> None:
    zero, one, two = members
    one["x"][:] = range(8)

    assert zero.peer(1)["x"].tolist() == list(range(8))
    assert np.shares_memory(one["x"], one.window["x"])
    zero.peer(1)["rows"][2, 1] = 5
    assert one["rows"].tolist() == [[0, 0], [0, 0], [0, 5]]
    assert two["rows"].sum() == 0
    assert list(one.window) == ["x", "rows", "one", "none"]
    assert len(one.window) == 4
    assert one.window.whole.nbytes == SPEC.window_bytes
    assert one["none"].shape == (0,)


def test_rows_are_put_and_got(members: list[Member]) -> None:
    zero, one, _ = members
    zero.put("rows", [[1, 2], [3, 4]], to=1, at=1)
    zero.put("one", 2.5, to=1)
    zero.put("x", np.arange(8, dtype="f4")[::2], to=1, at=4)

    assert one["rows"].tolist() == [[0, 0], [1, 2], [3, 4]]
    assert zero.get("rows", 1, at=2).tolist() == [[3, 4]]
    assert zero.get("rows", 1, count=1).tolist() == [[0, 0]]
    assert zero.get("one", 1) == 2.5
    assert one["x"].tolist() == [0, 0, 0, 0, 0, 2, 4, 6]
    out = np.empty((2, 2), "i8")
    assert zero.get("rows", 1, at=1, out=out) is out
    assert out.tolist() == [[1, 2], [3, 4]]
    assert not np.shares_memory(zero.get("x", 0), zero["x"])


def test_a_signal_is_added_to_and_set(members: list[Member]) -> None:
    zero, one, two = members
    assert two.value("go") == 0

    zero.signal("go", to=2)
    one.signal("go", to=2, value=10)
    zero.put("x", np.ones(8, "f4"), to=2, signal="go")

    assert two.wait("go", ge=12) == 12
    assert two.wait("go", eq=12) == 12
    assert two.value("done") == one.value("go") == 0
    one.signal("go", to=2, value=3, op="set")
    assert two.value("go") == 3
    zero.put("one", 1.0, to=2, signal=("go", 1 << 63))
    zero.put("one", 1.0, to=2, signal=("done", 7, "set"))
    assert two.wait("go") == (1 << 63) + 3
    assert two.wait("done", eq=7) == 7
    two.signal("go", to=2, value=0, op="set")
    assert two.value("go") == 0


operations = st.one_of(
    st.tuples(
        st.just("put"), st.integers(0, 2), st.integers(0, 2), st.integers(0, 7),
        st.lists(st.integers(-99, 99), max_size=8),
    ),
    st.tuples(
        st.just("signal"), st.integers(0, 2), st.integers(0, 2), st.sampled_from(["add", "set"]),
        st.one_of(st.integers(0, 9), st.integers((1 << 64) - 9, (1 << 64) - 1)),
    ),
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(operations, max_size=30))
def test_any_sequence_of_puts_and_signals_does_what_arrays_and_numbers_do(
    sequence: list[tuple[Any, ...]],
) -> None:
    with create_domain(SPEC) as region:
        members = [Member.join(region, rank, SPEC) for rank in range(3)]
        windows = np.zeros((3, 8), "f4")
        signals = [0, 0, 0]

        for kind, source, target, where, what in sequence:
            if kind == "signal":
                members[source].signal("go", target, what, where)
                before = signals[target] if where == "add" else 0
                signals[target] = (before + what) % (1 << 64)
            elif where + len(what) > 8:
                with pytest.raises(ConfigError, match="do not lie in buffer 'x'"):
                    members[source].put("x", np.array(what, "f4"), target, where)
            else:
                members[source].put("x", np.array(what, "f4"), target, where)
                windows[target, where : where + len(what)] = what

        for reader in members:
            assert [reader.get("x", rank).tolist() for rank in range(3)] == windows.tolist()
        assert [member.value("go") for member in members] == signals
        for member in members:
            member.close()


ONES = np.ones(8, "f4")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("put", ("y", ONES, 1), "domain 'tp' has no buffer 'y'; it has 'x', 'rows', 'one', 'none'"),
        ("put", ("x", ONES, 3), "rank is 3, expected 0 to 2: domain 'tp' has 3 ranks"),
        ("put", ("x", ONES, -1), "rank is -1, expected 0 to 2"),
        ("put", ("x", ONES, "1"), "rank is '1', expected 0 to 2"),
        ("put", ("x", np.ones(8), 1), r"dtype float64, but buffer 'x' .* float32 .*astype"),
        ("put", ("x", ONES, 1, 1), "8 rows from row 1 on do not lie in buffer 'x'.*has 8"),
        ("put", ("x", ONES[:1], 1, -1), "1 rows from row -1 on do not lie"),
        ("put", ("x", np.float32(1), 1), r"shape \(\), but buffer 'x' .* expected \(rows,\)"),
        ("put", ("rows", np.ones((1, 3), "i8"), 1), r"shape \(1, 3\), .* expected \(rows, 2\)"),
        ("put", ("one", np.ones(1), 1), r"shape \(1,\) at 0, .* has shape \(\)"),
        ("put", ("x", ONES, 1, 0, "stop"), "has no signal 'stop'; it has 'go', 'done'"),
        ("put", ("x", ONES, 1, 0, ("go", -1)), "signal 'go': the value is -1, expected a whole"),
        ("put", ("x", ONES, 1, 0, ("go", 1, "or")), "op is 'or', expected 'add' or 'set'"),
        ("put", ("x", ONES, 1, 0, ("go", 1, "add", 2)), r"signal is \('go', 1, 'add', 2\), expect"),
        ("get", ("y", 1), "no buffer 'y'"),
        ("get", ("x", 5), "rank is 5"),
        ("get", ("x", 1, 9), "0 rows from row 9 on do not lie"),
        ("get", ("x", 1, 0, 9), "9 rows from row 0 on do not lie"),
        ("get", ("x", 1, 0, None, [0.0]), "out is a list, expected a numpy array"),
        ("get", ("x", 1, 0, None, np.empty(8)), "dtype float64"),
        ("get", ("x", 1, 0, None, np.broadcast_to(np.float32(0), 8)), "out cannot be written"),
        ("signal", ("stop", 1), "no signal 'stop'"),
        ("signal", ("go", 9), "rank is 9"),
        (
            "signal",
            ("go", 1, 1.5),
            "the value is 1.5, expected a whole number, 0 to 18446744073709",
        ),
        ("signal", ("go", 1, 1 << 64), "the value is 18446744073709551616"),
        ("wait", ("stop",), "no signal 'stop'"),
        ("wait", ("go", 1, 1), "both ge=1 and eq=1, expected one of them"),
        ("wait", ("go", -1), "the value is -1"),
        ("wait", ("go", 1, None, 0), "wait for 'go': timeout is 0, expected a number of seconds"),
        ("peer", (3,), "rank is 3"),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(
    members: list[Member], name: str, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        getattr(members[0], name)(*arguments)

    assert not any(member.window.whole.any() for member in members)
    assert [member.value("go") for member in members] == [0, 0, 0]


def test_an_unknown_buffer_is_a_key_error_too(members: list[Member]) -> None:
    with pytest.raises(UnknownName) as caught:
        members[0]["y"]

    assert isinstance(caught.value, KeyError)
    assert str(caught.value) == "domain 'tp' has no buffer 'y'; it has 'x', 'rows', 'one', 'none'"
    assert "y" not in members[0].window


def test_a_wait_that_is_too_late_names_those_of_whom_nothing_came(members: list[Member]) -> None:
    zero, one, _ = members
    one.signal("go", to=0)

    with pytest.raises(
        CollectiveTimeout,
        match=r"wait for signal 'go' >= 2 timed out on rank 0 of 'tp' after 10 ms: it is 1; "
        r"nothing was added by rank 2$",
    ):
        zero.wait("go", ge=2, timeout=0.01)

    assert zero.wait("go", timeout=0.01) == 1


def test_a_rank_that_never_joined_is_said_to_be_absent() -> None:
    with create_domain(SPEC) as region, Member.join(region, 1, SPEC) as alone:
        with pytest.raises(
            CollectiveTimeout, match=r"nothing was added by ranks 0, 2; ranks 0, 2 n"
        ):
            alone.wait("go", eq=4, timeout=0.01)
        with pytest.raises(CollectiveTimeout, match=r"rank 0 is missing.*rank 2 is missing"):
            alone.barrier(timeout=0.01)


def test_a_dead_peer_fails_what_needs_it_and_nothing_else(members: list[Member]) -> None:
    zero, one, _ = members
    one.signal("go", to=0)
    one["x"][:] = 3

    zero.region.mark_dead(1, "chip 1 was killed by SIGKILL")

    died = r"rank 1 (of 'tp' )?has ended \(chip 1 was killed by SIGKILL\)"
    for call in (
        lambda: zero.wait("go", ge=2),
        lambda: zero.put("x", ONES, to=1),
        lambda: zero.signal("go", to=1),
        zero.barrier,
    ):
        with pytest.raises(PeerDied, match=died):
            call()
    assert zero.wait("go") == 1
    assert zero.get("x", 1).tolist() == [3] * 8
    zero.put("x", ONES, to=2, signal="go")
    assert zero.peer(2)["x"].sum() == 8


def test_a_rank_that_has_left_is_not_missed_as_long_as_others_remain(
    members: list[Member],
) -> None:
    zero, one, two = members
    one.close()
    zero.region.mark_dead(1)

    with pytest.raises(CollectiveTimeout):
        zero.wait("go", timeout=0.01)
    two.close()
    with pytest.raises(PeerDied, match="cannot end on rank 0 of 'tp': all others have left"):
        zero.wait("go")


def test_a_closed_member_refuses_and_gives_its_rank_back(members: list[Member]) -> None:
    zero = members[0]
    mine = zero["x"]
    mine[:] = 4
    with pytest.raises(LocalProtocolError, match="rank 0 of the segment is already in use"):
        Member.join(zero.region, 0, SPEC)
    zero.close()
    zero.close()

    for call in (
        lambda: zero["x"],
        lambda: zero.peer(1),
        lambda: zero.put("x", ONES, to=1),
        lambda: zero.get("x", 1),
        lambda: zero.signal("go", to=1),
        lambda: zero.wait("go"),
        lambda: zero.value("go"),
    ):
        with pytest.raises(LocalProtocolError, match="cannot use domain 'tp': it has left"):
            call()
    with Member.join(zero.region, 0, SPEC) as again:
        assert again["x"].tolist() == mine.tolist() == [4] * 8


def test_a_spec_that_does_not_fit_the_region_is_refused() -> None:
    with create_domain(SPEC) as region:
        for other, message in (
            (plan_domain("tp", [0, 1], BUFFERS), "domain 'tp' has 2 ranks .* has 3 and"),
            (plan_domain("tp", [0, 1, 2]), "windows of 0 bytes, but the region"),
            (
                plan_domain("tp", [0, 1, 2], BUFFERS, signals=["a", "b", "c"]),
                "has 3 signals, but the region 'tp' has room for 2",
            ),
        ):
            with pytest.raises(ConfigError, match=message):
                Member.join(region, 0, other)
        with pytest.raises(ConfigError, match="rank is 3, expected 0 to 2"):
            Member.join(region, 3, SPEC)


def test_without_a_spec_a_window_is_bytes() -> None:
    with create_domain(SPEC) as region, Member.join(region, 0) as zero:
        zero.peer(2).whole[5] = 9

        assert zero.window.whole.size == SPEC.window_bytes
        assert zero.region.memory[region.window_offset(2) + 5] == 9
        assert list(zero.window) == []


def test_alone_all_operations_return_at_once() -> None:
    spec = plan_domain("solo", [7], {"x": (1 << 18, "f4")}, signals=["go"])
    with create_domain(spec) as region, Member.join(region, 0, spec) as solo:
        solo["x"][:] = 2
        solo.put("x", solo["x"][:2] * 2, to=0, signal="go")
        solo.wait("go")
        solo.barrier()

        assert solo.all_reduce(solo["x"], out=solo["x"]).sum() == 2 * (1 << 18) + 4
        assert repr(solo) == "<Member rank 0 of 1 of 'solo'>"
        assert repr(solo.peer(0)) == "<Window of rank 0 of 'solo': x>"


def test_a_rank_that_has_left_does_not_keep_the_memory_mapped() -> None:
    spec = plan_domain("tp", [0], {"x": (1 << 16, "f4")}, signals=["go"])
    with mmap.mmap(-1, spec.region_bytes) as memory:
        place_domain(memory, spec)
        member = Member.join_at(memory, spec, 0)
        member.all_reduce(member["x"], out=member["x"])
        member.signal("go", to=0)
        member.wait("go")
        member.close()
        del member
        gc.collect()

        memory.close()  # BufferError, if anything of the domain could still be unmapped

    assert memory.closed


def test_a_wait_ends_when_its_own_rank_leaves_in_another_thread() -> None:
    spec = plan_domain("tp", [0, 1], signals=["go"])
    with create_domain(spec) as region, Member.join(region, 1, spec):
        zero = Member.join(region, 0, spec)
        told: list[str] = []

        def wait() -> None:
            try:
                zero.wait("go", timeout=60)
            except LocalProtocolError as error:
                told.append(str(error))

        waiter = threading.Thread(target=wait)
        waiter.start()
        zero.close()
        waiter.join(60)

        assert told == ["rank 0 cannot use domain 'tp': it has left"]
