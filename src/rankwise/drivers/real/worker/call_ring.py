"""A rank's call record, in memory that its agent reads whatever the rank does.

It lies behind the buffers of the segment: an *area* per worker, its only writer:

    head     64 bytes: the process that writes, how many groups, how many entries, how many entries
             plus one there were when the rank was done, how many of them are waits, how often
             the handle of a call was asked, and told that it is not over, and how many entries
             plus one there were when the program had ended well
    groups   GROUPS_MAX slots: how many calls it has begun there, and who the members are
    ring     ENTRIES entries: the latest calls, each over the one ENTRIES before
    sections what `rankwise.drivers.real.section_ring` keeps there

A call costs one entry: four words, and its *stamp*, which is made once for each line and shape. A
stamp tells what is called field by field (`signature_text`): readers parse no sentence. A rank that
waits for the handle of a call enters that wait as well, with the number of the call. Numbers come
from counters that threads may share.

This file runs in whatever interpreter the user chose, from Python 3.9 on, and is loaded when a
program first imports torch.distributed or makes calls of `rankwise.collectives`: see
`rankwise.drivers.real.call_rings` for the agent's side.
"""

import os
import struct
import sys
import threading
import time
from itertools import count
from mmap import PROT_READ, PROT_WRITE, mmap

TYPE_CHECKING = False  # `typing` may not be in memory
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SEGMENT_VARIABLE = "RANKWISE_SEGMENT_FD"
LOCAL_RANK_VARIABLE = "RANKWISE_LOCAL_RANK"
SWITCH_VARIABLE = "RANKWISE_LEDGER"
"""Is "0" where calls are not to be entered (`--no-ledger`)."""
MAGIC = b"rankwise"
TOTAL_BYTES_AT = 24
"""Where a segment says how long it is without the areas."""

WAITING, ISSUED, DONE, FAILED = range(4)
HEAD_PID, HEAD_GROUPS, HEAD_DONE, HEAD_CALLS, HEAD_WAITS, HEAD_POLLS, HEAD_OVER = range(7)
HEAD_BYTES = 64
GROUPS_MAX = 320
GROUP_HEAD = struct.Struct("=QQ")
INIT_KEY = "torch init"
"""The group of all ranks while they make the first one: `rankwise.core.ledger.INIT_GROUP`."""
GROUP_KEY_BYTES, GROUP_LABEL_BYTES, MEMBERS_BYTES = 64, 64, 512
GROUP_BYTES = GROUP_HEAD.size + GROUP_KEY_BYTES + GROUP_LABEL_BYTES + MEMBERS_BYTES
RING_AT = HEAD_BYTES + GROUPS_MAX * GROUP_BYTES
ENTRIES = 256
ENTRY_HEAD = struct.Struct("=QQQQiIiI")
"""Sequence and call number, instants of begin and end; then what equal calls have in common, their
stamp: slot of the group, what must match, peer, and flags: `OF_OTHER_THREAD` than the main one,
`OF_HANDLE` where it is a wait for an issued call. Text and place follow, and belong to the stamp.

The instant of the end holds the stage in its two lowest bits, so that one store tells both; while
the rank waits it is 0, as WAITING is."""
STAGE_BITS = 2
OF_OTHER_THREAD, OF_HANDLE = 1, 2
TEXT_BYTES, PLACE_BYTES = 144, 64
FIELD_END = "\x1f"
"""ASCII has it for this: no name of a dtype has one."""
ENTRY_BYTES = ENTRY_HEAD.size + TEXT_BYTES + PLACE_BYTES
_CALL = struct.Struct("=QQQQ")
_STAMP_HEAD = struct.Struct("=iIiI")
_END_AT = 24
_NUMBER_BEFORE_END = 2
SECTIONS_AT = RING_AT + ENTRIES * ENTRY_BYTES
SECTIONS_BYTES = 7104
AREA_BYTES = SECTIONS_AT + SECTIONS_BYTES
NO_SLOT = -1
_STAMP_AT = _CALL.size
_KNOWN_MAX = 1024
_pack_call = _CALL.pack_into
_now = time.monotonic_ns
_ident = threading.get_ident


class RingGroup:
    """A group of which calls are entered."""

    __slots__ = ("count_at", "numbers", "slot")

    def __init__(self, slot: int) -> None:
        """Begin with the first call."""
        self.slot = slot
        self.count_at = (HEAD_BYTES + slot * GROUP_BYTES) // 8
        self.numbers = count(1)


class CallRing:
    """The writing end of one area."""

    def __init__(self, memory: mmap, local_rank: int, first_rank: int, size: int) -> None:
        """Write the area of that worker; ranks from `first_rank` on, `size` of them, are here."""
        self.rank = first_rank + local_rank
        self._first_rank = first_rank
        self._size = size
        self._memory = memory
        self.words = memoryview(memory).cast("Q")
        self._sequence = count(1)
        self._waits = count(1)
        self._main_thread = threading.main_thread().ident
        self._stamps = [b""] * ENTRIES
        """What was stored last in each entry: most calls are the ones before again."""
        self._of_other_threads: dict[bytes, bytes] = {}

    def add_group(
        self, key: str, label: str, size: int, members: "Iterable[int]"
    ) -> "RingGroup | None":
        """Enter a group by a key that is the same on all members; None if there is no room."""
        slot = self.words[HEAD_GROUPS]
        if slot >= GROUPS_MAX:
            return None
        here = 0
        for rank in members:
            if 0 <= rank - self._first_rank < self._size:
                here |= 1 << (rank - self._first_rank)
        at = HEAD_BYTES + slot * GROUP_BYTES
        entry = (
            GROUP_HEAD.pack(0, size)
            + fitted(key, GROUP_KEY_BYTES)
            + fitted(label, GROUP_LABEL_BYTES)
            + here.to_bytes(MEMBERS_BYTES, "little")
        )
        self._memory[at : at + GROUP_BYTES] = entry
        self.words[HEAD_GROUPS] = slot + 1
        return RingGroup(slot)

    def begin(self, group: "RingGroup | None", stamp: bytes) -> int:
        """Enter a call; return where. A message has no group."""
        sequence = next(self._sequence)
        if _ident() != self._main_thread:
            stamp = self._of_other_thread(stamp)
        index = sequence % ENTRIES
        at = RING_AT + index * ENTRY_BYTES
        if self._stamps[index] is not stamp:
            self._memory[at + _STAMP_AT : at + ENTRY_BYTES] = stamp
            self._stamps[index] = stamp
        words = self.words
        # The sequence number after the stamp: a reader that leaves out the oldest entry never sees
        # half of one.
        if group is None:
            _pack_call(self._memory, at, sequence, 0, _now(), WAITING)
        else:
            number = next(group.numbers)
            _pack_call(self._memory, at, sequence, number, _now(), WAITING)
            words[group.count_at] = number
        words[HEAD_CALLS] = sequence
        return at + _END_AT >> 3

    def _of_other_thread(self, stamp: bytes) -> bytes:
        known = self._of_other_threads.get(stamp)
        if known is None:
            if len(self._of_other_threads) >= _KNOWN_MAX:
                self._of_other_threads.clear()
            known = self._of_other_threads[stamp] = _flagged(stamp, OF_OTHER_THREAD)
        return known

    def number_at(self, entry: int) -> int:
        """Return the number in its group of a call that was entered just now."""
        return self.words[entry - _NUMBER_BEFORE_END]

    def begin_wait(self, number: int, stamp: bytes) -> int:
        """Enter that the rank waits for the handle of a call; return where."""
        sequence = next(self._sequence)
        if _ident() != self._main_thread:
            stamp = self._of_other_thread(stamp)
        index = sequence % ENTRIES
        at = RING_AT + index * ENTRY_BYTES
        if self._stamps[index] is not stamp:
            self._memory[at + _STAMP_AT : at + ENTRY_BYTES] = stamp
            self._stamps[index] = stamp
        _pack_call(self._memory, at, sequence, number, _now(), WAITING)
        self.words[HEAD_WAITS] = next(self._waits)
        self.words[HEAD_CALLS] = sequence
        return at + _END_AT >> 3

    def end(self, entry: int, stage: int) -> None:
        """Enter how a call has ended, or that it goes on without the rank waiting."""
        self.words[entry] = _now() << STAGE_BITS | stage

    def enter_poll(self) -> None:
        """Enter that the rank has asked a handle in vain whether its call is over."""
        self.words[HEAD_POLLS] += 1

    def be_done(self, *, is_over: bool) -> None:
        """Enter that nothing more is to be called, until there is another call.

        `is_over` is whether the program has ended well, and not only destroyed its groups.
        """
        done = self.words[HEAD_CALLS] + 1
        if is_over:
            self.words[HEAD_OVER] = done
        self.words[HEAD_DONE] = done


def line_outside(depth: int, inner: "tuple[str, ...]") -> "tuple[str, int]":
    """Return the file and the line of the program: of the first caller outside of such files.

    `depth` is how many callers are left out in any case.
    """
    frame = sys._getframe(depth + 1)  # noqa: SLF001 - the only way to know
    path = frame.f_code.co_filename
    while path.startswith(inner) and frame.f_back is not None:
        frame = frame.f_back
        path = frame.f_code.co_filename
    return path, frame.f_lineno


def signature_text(  # noqa: PLR0917 - the fields of a `core.matching.CallSignature`
    operation: str,
    reduction: str = "",
    root: "int | None" = None,
    tag: int = 0,
    lists: "Iterable[int]" = (),
    tensors: "Iterable[tuple[Iterable[int], str]]" = (),
) -> str:
    """Return what is called, field by field; the longest last, for what is too long is cut.

    `tensors` are shapes and dtypes; `lists` the lengths of the lists whose first tensor is told.
    """
    fields = [operation, reduction, "" if root is None else str(root), str(tag or "")]
    fields.append(",".join(map(str, lists)))
    fields += [f"{','.join(map(str, shape))} {dtype}" for shape, dtype in tensors]
    return FIELD_END.join(fields)


def stamp_of(
    group: "RingGroup | None", match: int, text: str, line: "tuple[str, int]", peer: int = -1
) -> bytes:
    """Return what equal calls have in common, as it stands in their entries.

    `text` is that of `signature_text`.
    """
    slot = NO_SLOT if group is None else group.slot
    place = f"{os.path.basename(line[0])}:{line[1]}"
    words = fitted(text, TEXT_BYTES) + fitted(place, PLACE_BYTES)
    return _STAMP_HEAD.pack(slot, match, peer, 0) + words


def stamp_of_wait(stamp: bytes, line: "tuple[str, int]") -> bytes:
    """Return the stamp of waits at that line for the handles of such calls."""
    place = f"{os.path.basename(line[0])}:{line[1]}"
    return _flagged(stamp, OF_HANDLE)[:-PLACE_BYTES] + fitted(place, PLACE_BYTES)


def _flagged(stamp: bytes, flag: int) -> bytes:
    slot, match, peer, flags = _STAMP_HEAD.unpack_from(stamp)
    return _STAMP_HEAD.pack(slot, match, peer, flags | flag) + stamp[_STAMP_HEAD.size :]


def fitted(text: str, size: int) -> bytes:
    """Return a text as it stands in an area."""
    return text.encode("utf-8", "replace")[:size].ljust(size, b"\0")


ring: "CallRing | None" = None
"""That of this process, once it is attached; `ring_of_process` attaches it."""
_is_settled = False
_on_begun: "Callable[[], None] | None" = None


def ring_of_process() -> "CallRing | None":
    """Return the ring of this process, attached by the first call; None where there is none."""
    global ring, _is_settled  # noqa: PLW0603 - one process is one rank
    if not _is_settled:
        _is_settled = True
        ring = _attach()
        if ring is not None and _on_begun is not None:
            _on_begun()
    return ring


def tell_when_begun(tell: "Callable[[], None]") -> None:
    """Have this called when calls begin to be entered."""
    global _on_begun  # noqa: PLW0603 - as above
    _on_begun = tell


def forget_ring() -> None:
    """Let the next call look for another ring: the process has forked, or its world is new."""
    global ring, _is_settled
    ring, _is_settled = None, False


def be_done(*, is_over: bool = False) -> None:
    """Enter that this process is done with its calls, if it has entered any."""
    if ring is not None:
        ring.be_done(is_over=is_over)


def _attach() -> "CallRing | None":
    environment = os.environ
    text = environment.get(SEGMENT_VARIABLE)
    if text is None or environment.get(SWITCH_VARIABLE) == "0":
        return None
    try:
        fd, local_rank = int(text), int(environment[LOCAL_RANK_VARIABLE])
        identity = os.pread(fd, TOTAL_BYTES_AT + 8, 0)
        worker_count, _, total_bytes = struct.unpack_from("=IQQ", identity, 12)
        if not identity.startswith(MAGIC) or not 0 <= local_rank < worker_count:
            return None
        offset = total_bytes + local_rank * AREA_BYTES
        memory = mmap(fd, AREA_BYTES, prot=PROT_READ | PROT_WRITE, offset=offset)
        first_rank = int(environment.get("RANK", local_rank)) - local_rank
    except (OSError, ValueError, KeyError, struct.error):
        return None  # a process that a worker has started: it is no rank
    words = memoryview(memory).cast("Q")
    # A rank is the process that came first; one that it has forked is another.
    if words[HEAD_PID] not in (0, os.getpid()):
        return None
    words[HEAD_PID] = os.getpid()
    return CallRing(memory, local_rank, first_rank, worker_count)


os.register_at_fork(after_in_child=forget_ring)
