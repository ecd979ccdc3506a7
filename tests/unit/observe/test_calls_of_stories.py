"""Calls in a journal, of this version and of earlier ones."""

from typing import Any

import msgspec

from rankwise.base.units import Instant
from rankwise.core.agent.vocabulary import AGENT
from rankwise.core.matching import CallSignature, TensorForm
from rankwise.core.rendezvous.vocabulary import InquiryAnswered
from rankwise.observe.records import (
    RECORDER,
    CallsSampled,
    CallsSeen,
    RecordedCall,
    RecordedGroup,
)
from rankwise.observe.story import read_story
from rankwise.observe.timeline import PlacedCall

GROUP = RecordedGroup("torch 0 0", "", 2, (0, 1))
SIGNATURE = CallSignature("all_reduce", "sum", tensors=(TensorForm((4,), "float32"),))


def seen(**fields: Any) -> CallsSeen:
    return CallsSeen(
        attempt=0, rank=0, base=Instant(5), since=Instant(5), until=Instant(9),
        calls=(RecordedCall(0, 7, 0, 2, 2, 0),), groups={0: GROUP}, **fields,
    )  # fmt: skip


def signatures_in(record: CallsSeen | CallsSampled) -> list[CallSignature]:
    begun = {"at": 1, "machine": AGENT, "effect": InquiryAnswered(0)}
    told = {"at": 1, "machine": RECORDER, "record": record}
    lines = [msgspec.json.encode(each) + b"\n" for each in (begun, told)]
    story = read_story(lines, "a journal")
    return [call.signature for life in story.lives.values() for call in life.calls]


def test_calls_are_read_as_they_were_recorded() -> None:
    assert signatures_in(seen(signatures={0: (SIGNATURE, "train.py:8")})) == [SIGNATURE]


def test_text_of_an_earlier_journal_stands_for_the_operation() -> None:
    (signature,) = signatures_in(seen(texts={0: ("all_reduce #? (sum) of (4,)", "train.py:8")}))

    assert str(signature) == "all_reduce (sum) of (4,)"


def test_call_of_a_timeline_is_told_with_and_without_its_number() -> None:
    call = PlacedCall((0, "g", 7), 0, 1, 0, -1, SIGNATURE, "train.py:8", True, 4, "")  # noqa: FBT003

    assert call.text == "wait for all_reduce #7 (sum) of (4,) float32"
    assert call.text_without_number == "wait for all_reduce (sum) of (4,) float32"
