"""What ranks call, and which calls of theirs meet: numbers, agreement, missing members, order."""

from rankwise.core.matching.call_digest import digest_of
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
from rankwise.core.matching.messages import GroupMessages, ends_meet, missing_peer
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
    "GroupMessages",
    "Match",
    "Matcher",
    "MemberCalls",
    "OrderBreak",
    "TensorForm",
    "agree",
    "behind",
    "describe_call",
    "describe_tensors",
    "digest_of",
    "ends_meet",
    "missing",
    "missing_peer",
    "next_number",
    "order_break",
    "parties",
]
