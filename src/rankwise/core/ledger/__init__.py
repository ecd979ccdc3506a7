"""The ledger of collectives: who has come to which call, and so who keeps the others waiting."""

from rankwise.core.ledger.blame import (
    Blame,
    Wait,
    find_blame,
    find_disagreement,
    find_past_disagreement,
    judge,
    waits_of,
)
from rankwise.core.ledger.call_records import (
    INIT_GROUP,
    NO_PEER,
    UNNUMBERED,
    Call,
    CallRecord,
    Fate,
    Group,
    Stage,
)
from rankwise.core.ledger.lateness import Arrival, Delay, Lateness
from rankwise.core.ledger.sampled import Begun, SampledLateness
from rankwise.core.ledger.sentences import (
    delay_in_words,
    straggler_in_words,
    wait_in_words,
)
from rankwise.core.ledger.sheets import Sheet, pack, unpack, with_all_members
from rankwise.core.ledger.timetables import (
    CALLS_MAX,
    RankTimes,
    ReceivedTimetable,
    Timetable,
    late_over_nodes,
    pack_times,
    unpack_times,
    who_is_late,
)

__all__ = [
    "CALLS_MAX",
    "INIT_GROUP",
    "NO_PEER",
    "UNNUMBERED",
    "Arrival",
    "Begun",
    "Blame",
    "Call",
    "CallRecord",
    "Delay",
    "Fate",
    "Group",
    "Lateness",
    "RankTimes",
    "ReceivedTimetable",
    "SampledLateness",
    "Sheet",
    "Stage",
    "Timetable",
    "Wait",
    "delay_in_words",
    "find_blame",
    "find_disagreement",
    "find_past_disagreement",
    "judge",
    "late_over_nodes",
    "pack",
    "pack_times",
    "straggler_in_words",
    "unpack",
    "unpack_times",
    "wait_in_words",
    "waits_of",
    "who_is_late",
    "with_all_members",
]
