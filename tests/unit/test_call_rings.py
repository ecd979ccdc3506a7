"""What a rank enters in its call record is what its agent reads, at any moment."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from math import prod
from types import FunctionType, ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from rankwise.core.ledger import INIT_GROUP, Arrival, Fate, Stage
from rankwise.core.matching import CallSignature, TensorForm, next_number
from rankwise.core.matching.call_digest import digest_of
from rankwise.drivers.real import section_ring, segments
from rankwise.drivers.real.call_rings import (
    ArrivalReader,
    calls_begun,
    read_call_record,
    signature_in,
)
from rankwise.drivers.real.segments import Segment
from rankwise.drivers.real.worker import call_ring, torch_calls
from rankwise.drivers.real.worker.call_ring import (
    DONE,
    ENTRIES,
    GROUPS_MAX,
    ISSUED,
    CallRing,
    signature_text,
    stamp_of,
    stamp_of_wait,
)

TEXT = signature_text("all_reduce", "sum", tensors=[((4,), "float32")])
SIGNATURE = CallSignature("all_reduce", "sum", tensors=(TensorForm((4,), "float32"),))
LINE = ("/home/me/train.py", 88)


@pytest.fixture
def segment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Segment]:
    with Segment.create(4) as made:
        monkeypatch.setenv("RANKWISE_SEGMENT_FD", str(made.fd))
        monkeypatch.setenv("RANKWISE_LOCAL_RANK", "1")
        monkeypatch.setenv("RANK", "9")
        monkeypatch.delenv("RANKWISE_LEDGER", raising=False)
        call_ring.forget_ring()
        yield made
        call_ring.forget_ring()


def attached() -> CallRing:
    ring = call_ring.ring_of_process()
    assert ring is not None
    return ring


def test_the_agent_knows_how_long_a_call_record_is() -> None:
    assert segments.CALLS_BYTES == call_ring.AREA_BYTES
    assert segments.SECTIONS_AT == call_ring.SECTIONS_AT
    assert section_ring.BYTES <= call_ring.SECTIONS_BYTES
    assert not call_ring.AREA_BYTES % 4096


def test_a_call_of_another_thread_does_not_hold_the_main_thread(segment: Segment) -> None:
    ring = attached()
    group = ring.add_group("torch 0 0", "", 4, range(8, 12))
    stamp = stamp_of(group, 77, TEXT, LINE)
    entries: list[int] = []

    def begin_in_a_thread() -> None:
        thread = threading.Thread(target=lambda: entries.append(ring.begin(group, stamp)))
        thread.start()
        thread.join()

    begin_in_a_thread()
    before = read_call_record(segment, 1, 8)
    ring.begin(group, stamp)
    begin_in_a_thread()
    after = read_call_record(segment, 1, 8)
    ring.end(entries[0], DONE)
    at_last = read_call_record(segment, 1, 8)

    assert before is not None
    assert before.call_of_main_thread is None
    assert [call.number for call in before.standing] == [1]
    assert after is not None
    assert after.call_of_main_thread is not None
    assert after.call_of_main_thread.number == 2
    assert [call.number for call in after.standing] == [3]
    assert at_last is not None
    assert [call.stage for call in at_last.calls] == [Stage.DONE, Stage.WAITING, Stage.WAITING]
    assert [call.is_of_main_thread for call in at_last.calls] == [False, True, False]


def test_a_wait_has_the_words_of_its_call_and_a_line_of_its_own(segment: Segment) -> None:
    ring = attached()
    group = ring.add_group("torch 0 0", "", 4, range(8, 12))
    stamp = stamp_of(group, 77, TEXT, LINE)
    ring.end(ring.begin(group, stamp), ISSUED)

    ring.begin_wait(1, stamp_of_wait(stamp, ("/home/me/train.py", 90)))
    record = read_call_record(segment, 1, 8)

    assert record is not None
    issued, wait = record.calls
    assert (issued.of_handle, wait.of_handle) == (False, True)
    assert (wait.group, wait.number, wait.match) == ("torch 0 0", 1, 77)
    assert (wait.signature, issued.place, wait.place) == (SIGNATURE, "train.py:88", "train.py:90")


def test_a_call_is_read_as_it_was_entered(segment: Segment) -> None:
    ring = attached()
    group = ring.add_group("torch 0 0", "dp", 16, range(6, 22))

    first = ring.begin(group, stamp_of(group, 77, TEXT, LINE))
    ring.end(first, DONE)
    ring.begin(group, stamp_of(group, 78, TEXT, LINE))
    record = read_call_record(segment, 1, 8)

    assert record is not None
    assert (record.rank, record.fate, record.counts) == (9, Fate.LIVES, {"torch 0 0": 2})
    assert record.groups["torch 0 0"].label == "dp"
    assert record.groups["torch 0 0"].size == 16
    assert record.groups["torch 0 0"].members == (8, 9, 10, 11)
    assert [call.stage for call in record.calls] == [Stage.DONE, Stage.WAITING]
    assert [call.number for call in record.calls] == [1, 2]
    assert [call.match for call in record.calls] == [77, 78]
    assert (record.calls[1].signature, record.calls[1].place) == (SIGNATURE, "train.py:88")
    assert record.standing == (record.calls[1],)


def test_a_message_belongs_to_no_group(segment: Segment) -> None:
    attached().begin(None, stamp_of(None, 0, TEXT, LINE, 10))

    record = read_call_record(segment, 1, 8)

    assert record is not None
    assert (record.calls[0].group, record.calls[0].peer) == ("", 10)


def test_the_latest_calls_are_kept_and_all_are_counted(segment: Segment) -> None:
    ring = attached()
    group = ring.add_group("g", "", 4, range(8, 12))
    stamp = stamp_of(group, 1, TEXT, LINE)

    for _ in range(3 * ENTRIES):
        ring.end(ring.begin(group, stamp), ISSUED)
    record = read_call_record(segment, 1, 8)

    assert record is not None
    assert record.counts == {"g": 3 * ENTRIES}
    assert calls_begun(segment, 1) == 3 * ENTRIES
    # The oldest is left out, since it could be about to be written over.
    assert [call.number for call in record.calls] == [*range(2 * ENTRIES + 2, 3 * ENTRIES + 1)]


def test_an_entry_that_is_used_again_has_the_signature_of_its_new_call(segment: Segment) -> None:
    ring = attached()
    group = ring.add_group("torch 0 0", "", 4, range(8, 12))
    assert group is not None
    stamp = stamp_of(group, 1, TEXT, LINE)
    other = stamp_of(group, 1, "barrier", LINE)

    barrier = CallSignature("barrier")
    for stored, what in (
        (stamp, SIGNATURE), (stamp, SIGNATURE), (other, barrier), (stamp, SIGNATURE),
    ):  # fmt: skip
        for _ in range(ENTRIES):
            ring.end(ring.begin(group, stored), DONE)
        assert latest_signatures(segment) == {what}
    for _ in range(ENTRIES):
        ring.begin_wait(1, stamp_of_wait(other, LINE))
    for _ in range(ENTRIES):
        ring.begin(group, stamp)

    assert latest_signatures(segment) == {SIGNATURE}


def latest_signatures(segment: Segment) -> set[CallSignature]:
    record = read_call_record(segment, 1, 8)
    assert record is not None
    return {call.signature for call in record.calls}


def test_arrivals_are_read_once_and_as_far_as_calls_have_ended(segment: Segment) -> None:
    ring = attached()
    group = ring.add_group("g", "", 4, range(8, 12))
    stamp = stamp_of(group, 1, TEXT, LINE)
    reader = ArrivalReader(segment, 1, 8)
    ring.end(ring.begin(group, stamp), DONE)
    waiting = ring.begin(group, stamp)
    ring.end(ring.begin(None, stamp_of(None, 1, TEXT, LINE, 10)), ISSUED)

    first = reader.read(100)
    is_standing = [reader.is_standing]
    last = ring.begin(group, stamp)
    is_standing.append(reader.is_standing)
    ring.end(last, DONE)
    ring.end(waiting, ISSUED)
    ring.end(ring.begin(group, stamp), DONE)
    second = reader.read(100)

    assert is_standing == [False, True]
    assert [arrival.number for arrival in first] == [1]
    assert [arrival.number for arrival in second] == [2, 3, 4], "messages belong to no group"
    assert reader.read(100) == []
    assert reader.groups["g"].members == (8, 9, 10, 11)
    record = read_call_record(segment, 1, 8)
    assert record is not None
    of_group = [call for call in record.calls if call.group]
    told = [Arrival(c.group, c.number, c.begun_at, c.ended_at) for c in of_group]
    assert told == [*first, *second]
    assert all(arrival.begun_at <= arrival.ended_at for arrival in told)


def test_of_many_arrivals_the_latest_are_read(segment: Segment) -> None:
    ring = attached()
    group = ring.add_group("g", "", 4, range(8, 12))
    stamp = stamp_of(group, 1, TEXT, LINE)
    reader = ArrivalReader(segment, 1, 8)
    for _ in range(3 * ENTRIES):
        ring.end(ring.begin(group, stamp), DONE)

    arrivals = reader.read(10)

    assert [arrival.number for arrival in arrivals] == [*range(3 * ENTRIES - 9, 3 * ENTRIES + 1)]


def test_what_is_read_while_a_rank_writes_is_whole(segment: Segment) -> None:
    ring = attached()
    group = ring.add_group("g", "", 4, range(8, 12))
    is_over = threading.Event()

    def write() -> None:
        for number in range(1, 30_000):
            stamp = stamp_of(group, number, f"n{number}", LINE)
            ring.end(ring.begin(group, stamp), DONE)
        is_over.set()

    writer = threading.Thread(target=write)
    writer.start()
    looks = 0
    while not is_over.is_set() or not looks:
        record = read_call_record(segment, 1, 8)
        assert record is not None
        assert all(call.signature.operation == f"n{call.match}" for call in record.calls)
        assert all(call.number == call.match for call in record.calls)
        looks += 1
    writer.join()


def test_threads_enter_each_call_once(segment: Segment) -> None:
    ring = attached()
    group = ring.add_group("g", "", 4, range(8, 12))
    stamp = stamp_of(group, 1, TEXT, LINE)

    def write() -> None:
        for _ in range(60):
            ring.end(ring.begin(group, stamp), DONE)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record = read_call_record(segment, 1, 8)

    assert record is not None
    assert sorted(call.number for call in record.calls) == list(range(1, 241))


def test_who_is_done_says_so_until_the_next_call(segment: Segment) -> None:
    ring = attached()
    group = ring.add_group("g", "", 4, range(8, 12))
    stamp = stamp_of(group, 1, TEXT, LINE)
    ring.end(ring.begin(group, stamp), DONE)

    ring.be_done(is_over=False)
    done = read_call_record(segment, 1, 8)
    ring.begin(group, stamp)
    again = read_call_record(segment, 1, 8)

    assert done is not None
    assert again is not None
    assert (done.fate, done.standing) == (Fate.LEFT, ())
    assert again.fate is Fate.LIVES


def test_a_rank_without_a_call_has_a_call_record_once_it_could_make_one(segment: Segment) -> None:
    assert read_call_record(segment, 1, 8) is None

    attached()
    record = read_call_record(segment, 1, 8)

    assert record is not None
    assert record.calls == ()


def test_groups_that_have_no_room_are_refused(segment: Segment) -> None:
    ring = attached()

    made = [ring.add_group(f"g{number}", "", 4, ()) for number in range(GROUPS_MAX + 1)]

    assert all(group is not None for group in made[:-1])
    assert made[-1] is None


def test_a_process_that_the_rank_has_forked_is_no_rank(segment: Segment) -> None:
    attached()

    pid = os.fork()
    if pid == 0:
        os._exit(0 if call_ring.ring_of_process() is None else 1)

    assert os.waitpid(pid, 0)[1] == 0
    assert attached() is call_ring.ring_of_process()
    assert segment.fd >= 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANKWISE_SEGMENT_FD", "0"),
        ("RANKWISE_SEGMENT_FD", "987"),
        ("RANKWISE_SEGMENT_FD", "seven"),
        ("RANKWISE_LOCAL_RANK", "4"),
        ("RANKWISE_LEDGER", "0"),
    ],
)
def test_without_a_segment_or_when_it_is_not_wanted_nothing_is_entered(
    name: str, value: str, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)

    assert call_ring.ring_of_process() is None
    assert read_call_record(segment, 1, 8) is None


def test_the_writer_needs_nothing_of_rankwise() -> None:
    source = (
        f"import sys; sys.modules['rankwise'] = None; sys.path.insert(0, {os.path.dirname(call_ring.__file__)!r});"  # noqa: E501, PTH120
        "import call_ring, torch_calls; print(call_ring.ring_of_process())"
    )

    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, env={}
    )

    assert done.stdout == "None\n"


def test_a_torch_that_lacks_what_is_needed_is_told_of_and_left_alone() -> None:
    class World:
        default_pg = pg_names = None

    module = ModuleType("torch.distributed.distributed_c10d")
    for name in torch_calls.NAMES_NEEDED:
        setattr(module, name, print)
    setattr(module, "_world", World())  # noqa: B010  # a module has no such attribute
    told: list[str] = []
    reporter = SimpleNamespace(tell_ledger_is_off=told.append)

    torch_calls.enter_calls(module, call_ring, digest_of, reporter)
    delattr(module, "barrier")
    torch_calls.enter_calls(module, call_ring, digest_of, reporter)

    assert told == ["has no _world.pg_group_ranks", "has no distributed_c10d.barrier"]
    assert module.all_reduce is print


def torch_of_two(**functions: object) -> ModuleType:
    """As much of torch as is needed to enter calls of ranks 8 and 9, of whom this is the second."""

    class World:
        default_pg = "world"
        pg_group_ranks: ClassVar = {"world": {8: 0, 9: 1}}
        pg_names: ClassVar = {"world": "0"}

    def collective(tensor: object, group: object = None) -> None: ...

    module = ModuleType("torch.distributed.distributed_c10d")
    for name in ("all_reduce", "broadcast", "barrier"):
        setattr(module, name, FunctionType(collective.__code__, {}, name, (None,)))
    vars(module).update(_world=World(), get_rank=lambda: 9, **functions)
    return module


def test_what_is_raised_after_groups_were_destroyed_counts_from_then_until_there_are_others(
    segment: Segment,
) -> None:
    module = torch_of_two(init_process_group=lambda: None, destroy_process_group=lambda: None)
    reporter = SimpleNamespace(
        left_at=None, tell_last_recorded=lambda: None, answer_for_recorder=lambda _: None
    )
    torch_calls.enter_calls(module, call_ring, digest_of, reporter)

    module.destroy_process_group()
    left_at = reporter.left_at
    module.init_process_group()

    assert left_at is not None
    assert reporter.left_at is None
    assert read_call_record(segment, 1, 8) is not None


def test_the_tag_of_a_message_is_told_where_it_has_one(segment: Segment) -> None:
    def send(tensor: object, dst: int, group: object = None, tag: int = 0) -> None: ...

    module = torch_of_two(send=send)
    torch_calls.enter_calls(module, call_ring, digest_of, SimpleNamespace())
    tensor = SimpleNamespace(shape=(4,), dtype="torch.float32")

    for tag in (0, 3, 4, 3):
        module.send(tensor, 8, tag=tag)
    module.send(tensor, 8, None, 5)

    record = read_call_record(segment, 1, 8)
    assert record is not None
    assert [str(call.signature) for call in record.calls] == [
        f"send of (4,) float32 to rank 8{told}"
        for told in ("", ", tag 3", ", tag 4", ", tag 3", ", tag 5")
    ]


def test_what_members_must_agree_on_is_the_digest_of_the_call_that_is_entered(
    segment: Segment,
) -> None:
    def gather(tensor: object, dst: object = None, group: object = None) -> None: ...

    module = torch_of_two(gather=gather, get_backend=lambda _: "nccl")
    torch_calls.enter_calls(module, call_ring, digest_of, SimpleNamespace())

    for shape in ((4, 3), (3, 4), (5,)):
        tensor = SimpleNamespace(
            shape=shape, dtype="torch.float32", numel=lambda shape=shape: prod(shape)
        )
        module.all_reduce(tensor)
        module.gather(tensor)

    record = read_call_record(segment, 1, 8)
    assert record is not None
    reduced, gathered = record.calls[::2], record.calls[1::2]
    for calls, has_one_size in ((reduced, True), (gathered, False)):
        assert [call.match for call in calls] == [
            call.signature.agreed(has_one_size=has_one_size).checksum for call in calls
        ]
    assert len({call.match for call in reduced}) == 2, "of two sizes"
    assert len({call.match for call in gathered}) == 1, "members of NCCL may bring any size"


def test_a_rank_numbers_its_calls_of_a_group_as_the_matcher_does(segment: Segment) -> None:
    ring = attached()
    group = ring.add_group("g", "", 4, range(8, 12))
    expected = 0

    for _ in range(3):
        entry = ring.begin(group, stamp_of(group, 1, TEXT, LINE))
        expected = next_number(expected)
        assert ring.number_at(entry) == expected


def test_agents_know_the_key_under_which_ranks_enter_init_process_group() -> None:
    assert call_ring.INIT_KEY == INIT_GROUP


def test_call_too_long_for_its_entry_keeps_all_but_its_last_tensors(segment: Segment) -> None:
    ring = attached()
    group = ring.add_group("g", "", 4, range(8, 12))
    tensors = [((1024,) * 20, "float32"), ((1024,) * 20, "float32")]
    ring.begin(group, stamp_of(group, 1, signature_text("all_gather", tensors=tensors), LINE))

    record = read_call_record(segment, 1, 8)

    assert record is not None
    (call,) = record.calls
    assert call.signature.tensors[0].shape == (1024,) * 20
    assert str(call.signature).endswith(" float32, ...")


@pytest.mark.parametrize(
    "signature",
    [
        CallSignature("barrier"),
        CallSignature("broadcast", root=0, tensors=(TensorForm((), "bfloat16"),)),
        CallSignature("recv", root=3, tag=7, tensors=(TensorForm((2, 3), "int64"),)),
        CallSignature("all_gather", lists=(2, 4), tensors=(TensorForm((4,), "float32"),)),
        CallSignature("all_gather", lists=(0,)),
        CallSignature("all_reduce", "max", tensors=(TensorForm((1,), "[('id', '<i4')]"),)),
    ],
)
def test_signature_that_a_rank_enters_is_the_one_that_is_read(signature: CallSignature) -> None:
    root = None if signature.root < 0 else signature.root
    tensors = [(each.shape or (), each.dtype) for each in signature.tensors]
    text = signature_text(
        signature.operation, signature.reduction, root, signature.tag, signature.lists, tensors
    )

    assert signature_in(text.encode()) == signature
