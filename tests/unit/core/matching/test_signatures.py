"""What a call is, and how it is told."""

import msgspec
import pytest

from rankwise.core.matching import (
    ANY_RANK,
    CallSignature,
    TensorForm,
    describe_call,
    describe_tensors,
)
from rankwise.core.matching.call_digest import digest_of

SMALL, FLAT = TensorForm((4, 3), "float32"), TensorForm((12,), "float32")
WORDS = [
    (CallSignature("barrier"), "barrier #3"),
    (CallSignature("all_reduce", "max", tensors=(SMALL,)), "all_reduce #3 (max) of (4, 3) float32"),
    (
        CallSignature("broadcast", root=0, tensors=(FLAT,)),
        "broadcast #3 from rank 0 of (12,) float32",
    ),
    (CallSignature("reduce", "sum", 1, (FLAT,)), "reduce #3 (sum) to rank 1 of (12,) float32"),
    (CallSignature("all_to_all", tensors=(TensorForm(None, "int64"),)), "all_to_all #3 of int64"),
    (
        CallSignature("all_gather", lists=(2, 4), tensors=(FLAT,)),
        "all_gather #3 of 2 times 4 times (12,) float32",
    ),
    (CallSignature("all_gather", lists=(0,)), "all_gather #3 of 0 times nothing"),
    (
        CallSignature("all_reduce", tensors=(FLAT, SMALL), more=2),
        "all_reduce #3 of (12,) float32, (4, 3) float32 and 2 more",
    ),
    (
        CallSignature("all_reduce", tensors=(FLAT,), algorithm="ring"),
        "all_reduce #3 of (12,) float32 by ring",
    ),
    (
        CallSignature("all_reduce", tensors=(FLAT,), has_data=False),
        "all_reduce #3 of (12,) float32 without data",
    ),
    (CallSignature("symm_mem.rendezvous", size_bytes=64), "symm_mem.rendezvous #3 of 64 bytes"),
    (
        CallSignature("send", root=1, tensors=(FLAT,), tag=5),
        "send #3 of (12,) float32 to rank 1, tag 5",
    ),
    (
        CallSignature("recv", root=ANY_RANK, tensors=(FLAT,)),
        "recv #3 of (12,) float32 from any rank",
    ),
]


@pytest.mark.parametrize(("signature", "words"), WORDS, ids=[words for _, words in WORDS])
def test_call_is_told_with_its_number(signature: CallSignature, words: str) -> None:
    assert describe_call(signature, 3) == words
    assert str(signature) == words.replace(" #3", "")


def test_tag_0_is_told_on_request() -> None:
    message = CallSignature("send", root=1, tensors=(FLAT,))

    assert describe_call(message, tells_tag=True) == "send of (12,) float32 to rank 1, tag 0"
    assert describe_tensors([]) == ""


@pytest.mark.parametrize("signature", [signature for signature, _ in WORDS])
def test_signature_survives_the_wire(signature: CallSignature) -> None:
    packed = msgspec.msgpack.encode(signature)

    again = msgspec.msgpack.decode(packed, type=CallSignature)

    assert again == signature
    assert again.checksum == signature.checksum


def test_signatures_of_equal_sizes_are_equal_in_sizes_only() -> None:
    one, other = (CallSignature("all_reduce", "sum", tensors=(each,)) for each in (SMALL, FLAT))

    assert one != other
    assert one.in_sizes() == other.in_sizes()
    assert one.checksum != other.checksum


def test_kind_of_a_call_has_neither_tensors_nor_the_peer_of_a_message() -> None:
    assert CallSignature("reduce", "max", 2, (FLAT,)).in_kind() == CallSignature("reduce", "max", 2)
    assert CallSignature("send", root=1, tensors=(FLAT,)).in_kind() == CallSignature("send")


def test_calls_that_differ_in_one_field_have_different_digests() -> None:
    call = CallSignature("reduce", "sum", 3, (TensorForm((4, 3), "float32"),))
    others = [
        msgspec.structs.replace(call, **{field: value})
        for field, value in {
            "operation": "gather", "reduction": "max", "root": 4, "more": 1, "lists": (2,),
            "tag": 7, "algorithm": "ring", "size_bytes": 8, "has_data": False,
            "tensors": (TensorForm((43,), "float32"),),
        }.items()
    ]  # fmt: skip
    others += [
        msgspec.structs.replace(call, tensors=(TensorForm(shape, dtype),))
        for shape, dtype in (((4, 3), "float64"), (None, "float32"), ((3, 4), "float32"))
    ]

    assert len({each.checksum for each in (call, *others)}) == len(others) + 1


def test_texts_that_are_joined_to_the_same_have_different_digests() -> None:
    assert digest_of("all_reduce", "sum") != digest_of("all_", "reducesum")
    assert digest_of("a", "1", 2) != digest_of("a", "", 12)


def test_a_digest_is_the_same_in_all_processes_and_versions() -> None:
    assert digest_of("all_reduce", "sum", -1, [((12,), "float32")]) == 0x03DDC1E5
