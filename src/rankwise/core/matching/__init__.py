"""What ranks call, and which calls of theirs meet: numbers, agreement, missing members, order."""

from rankwise.core.matching.matcher import (
    GroupCalls,
    Match,
    Matcher,
    MemberCalls,
    OrderBreak,
    agree,
    behind,
    missing,
    next_number,
    order_break,
    parties,
)
from rankwise.core.matching.signature import (
    ANY_RANK,
    NO_RANK,
    CallSignature,
    TensorForm,
    describe_call,
    describe_tensors,
)

__all__ = [
    "ANY_RANK",
    "NO_RANK",
    "CallSignature",
    "GroupCalls",
    "Match",
    "Matcher",
    "MemberCalls",
    "OrderBreak",
    "TensorForm",
    "agree",
    "behind",
    "describe_call",
    "describe_tensors",
    "missing",
    "next_number",
    "order_break",
    "parties",
]
