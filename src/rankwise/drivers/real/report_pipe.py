r"""What a worker tells on its report pipe, cut out of the bytes that arrive.

Two writers share the pipe and do not know of each other. The boot code of the worker writes
*records*: one line each, `\x1e`, a JSON object, a newline. faulthandler writes *text* from inside
a signal handler, at any moment: stacks when they are asked for, or the stack of a fatal signal.
faulthandler writes printable ASCII only, so `\x1e` always begins a record, wherever it stands.

Death may cut a record anywhere, and the text of the signal that killed the worker then follows in
the same line. Such a record is lost, the text is not: it goes on at the first words that only
faulthandler writes. Text and records are bounded, since a worker gone wild must not eat the
memory of the agent.
"""

import msgspec

from rankwise.base.failure import ErrorRecord
from rankwise.base.units import Instant

_RECORD_START = b"\x1e"
_FATAL = b"Fatal Python error: "
_WORDS_OF_FAULTHANDLER = (_FATAL, b"Current thread 0x", b"Thread 0x", b'  File "')
_LINE_BYTES_MAX = 64 * 1024


class Ready(msgspec.Struct, frozen=True, tag_field="kind", tag="ready"):
    """The worker can be asked for its stacks. It says itself which process it is."""

    pid: int


class CallsBegin(msgspec.Struct, frozen=True, tag_field="kind", tag="calls"):
    """The worker enters its calls in its call record from now on."""


class LedgerOff(msgspec.Struct, frozen=True, tag_field="kind", tag="no-ledger"):
    """The worker cannot enter its calls of torch.distributed, or not all, for that reason."""

    why: str


class RecorderReady(msgspec.Struct, frozen=True, tag_field="kind", tag="recorder"):
    """The worker can be asked for what torch's flight recorder has: a thread of it answers."""

    thread: int


RawSignature = tuple[str, str, int, tuple[tuple[tuple[int, ...], str], ...]]
"""The first fields of a `core.matching.CallSignature`, which agents load when it is needed."""


class ReportedCall(msgspec.Struct, frozen=True):
    """A call that torch has recorded; `begun_at` is of the monotonic clock."""

    begun_at: int
    number: int
    signature: RawSignature
    is_over: bool


class ReportedGroup(msgspec.Struct, frozen=True):
    """The latest calls of a process group, in their order.

    Attributes:
        name, label, members: the group.
        calls: the latest.
        sample: more of them, each its number, when it was begun, and which of `signatures` it is.
        signatures: what these are.
    """

    name: str
    label: str
    members: tuple[int, ...]
    calls: tuple[ReportedCall, ...]
    sample: tuple[tuple[int, int, int], ...] = ()
    signatures: tuple[RawSignature, ...] = ()


class Recorded(msgspec.Struct, frozen=True, tag_field="kind", tag="recorded"):
    """What torch's flight recorder has; `ask` is the question's number, -1 of a dying worker."""

    ask: int
    groups: tuple[ReportedGroup, ...]


class Exiting(msgspec.Struct, frozen=True, tag_field="kind", tag="exiting"):
    """The worker's program has ended with a code other than 0, at that monotonic instant.

    `place` is the line where it has raised SystemExit, such as `train.py:7, in main`.
    """

    code: int
    at: int
    place: str = ""


class ErrorReported(msgspec.Struct, frozen=True):
    """The worker is about to die of an exception."""

    error: ErrorRecord


WorkerReport = Ready | CallsBegin | LedgerOff | RecorderReady | Recorded | Exiting | ErrorReported


class _ErrorLine(msgspec.Struct, frozen=True, tag_field="kind", tag="error"):
    """An error record as it is written."""

    type: str
    message: str
    traceback: str
    raised_at: int
    wall_ns: int
    tensors: str = ""


_Line = Ready | CallsBegin | LedgerOff | RecorderReady | Recorded | Exiting | _ErrorLine
_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)


class ReportPipe:
    """The agent's end of one worker's report pipe: bytes in, reports out, text kept.

    Records that cannot be read, cut by death or not ours, are left out without a word: the worker's
    exit tells of its death, and a report about the record would not help.
    """

    def __init__(
        self, *, text_bytes_max: int = 256 * 1024, record_bytes_max: int = 16 * 1024 * 1024
    ) -> None:
        self._record_bytes_max = record_bytes_max
        self._record: bytearray | None = None
        self._record_is_too_long = False
        self._line = bytearray()
        self._stacks = _BoundedText(text_bytes_max)
        self._fatal = _BoundedText(text_bytes_max)
        self._is_dying = False

    def feed(self, chunk: bytes) -> list[WorkerReport]:
        """Take in the next bytes, however they were cut; return the reports that they complete."""
        reports: list[WorkerReport] = []
        at = 0
        while at < len(chunk):
            if self._record is None:
                at = self._feed_text(chunk, at)
            else:
                at, report = self._feed_record(chunk, at)
                if report is not None:
                    reports.append(report)
        return reports

    def finish(self) -> list[WorkerReport]:
        """Take notice that nothing more will come, and give out what was waiting for its end."""
        report = self._end_record() if self._record is not None else None
        if self._line:
            self._keep_line(bytes(self._line))
            self._line.clear()
        return [] if report is None else [report]

    @property
    def has_stacks(self) -> bool:
        """Whether `take_stacks` would give something."""
        return bool(self._stacks)

    def take_stacks(self) -> str:
        """Give the stacks printed on demand since the last call, whole lines only."""
        return self._stacks.take()

    @property
    def fatal_stacks(self) -> str:
        """What was printed at a fatal signal; empty as long as there was none."""
        return self._fatal.text

    def _feed_text(self, chunk: bytes, at: int) -> int:
        end = chunk.find(_RECORD_START, at)
        if end < 0:
            self._keep_text(chunk[at:])
            return len(chunk)
        self._keep_text(chunk[at:end])
        self._record = bytearray()
        self._record_is_too_long = False
        return end + 1

    def _feed_record(self, chunk: bytes, at: int) -> tuple[int, WorkerReport | None]:
        assert self._record is not None, "only called inside a record"
        newline = chunk.find(b"\n", at)
        line_end = len(chunk) if newline < 0 else newline
        next_record = chunk.find(_RECORD_START, at, line_end)
        end = line_end if next_record < 0 else next_record
        room = self._record_bytes_max - len(self._record)
        self._record += chunk[at : min(end, at + room)]
        # Read on and dropped: an agent must not hold what a broken rank may write for ever.
        self._record_is_too_long |= end - at > room
        if next_record >= 0:
            # The mark belongs to the next record: this one ends without its newline.
            return next_record, self._end_record()
        if newline >= 0:
            return newline + 1, self._end_record()
        return end, None

    def _end_record(self) -> WorkerReport | None:
        record = bytes(self._record or b"")
        self._record = None
        report = None if self._record_is_too_long else _read_record(record)
        if report is None:
            # A fatal error may cut a record short, and its stacks follow in the same line.
            self._keep_text(_text_after_cut(record))
        return report

    def _keep_text(self, text: bytes) -> None:
        self._line += text
        if b"\n" in text or len(self._line) > _LINE_BYTES_MAX:
            lines = bytes(self._line).split(b"\n")
            self._line = bytearray(lines.pop())
            for line in lines:
                self._keep_line(line + b"\n")
            if len(self._line) > _LINE_BYTES_MAX:
                self._keep_line(bytes(self._line))
                self._line.clear()

    def _keep_line(self, line: bytes) -> None:
        if not self._is_dying:
            before, found, after = line.partition(_FATAL)
            self._stacks.add(before)
            if not found:
                return
            # faulthandler prints nothing else from now on: the process ends by this signal.
            self._is_dying = True
            line = found + after
        self._fatal.add(line)


class _BoundedText:
    """Text of which only the beginning is kept, with a note of how much was left out.

    The beginning, since faulthandler prints the innermost frame first.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept = bytearray()
        self._left_out = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def add(self, text: bytes) -> None:
        room = self._bytes_max - len(self._kept) if not self._left_out else 0
        self._kept += text[:room]
        self._left_out += max(0, len(text) - room)

    @property
    def text(self) -> str:
        text = self._kept.decode("utf-8", "backslashreplace")
        return f"{text}\n... {self._left_out} bytes more\n" if self._left_out else text

    def take(self) -> str:
        text = self.text
        self._kept.clear()
        self._left_out = 0
        return text


def _text_after_cut(record: bytes) -> bytes:
    """The part of a broken record that can only come from faulthandler, with its newline."""
    starts = [at for word in _WORDS_OF_FAULTHANDLER if (at := record.find(word)) >= 0]
    return record[min(starts) :] + b"\n" if starts else b""


def _read_record(record: bytes) -> WorkerReport | None:
    line: _Line | None
    try:
        line = _decoder.decode(record)
    except msgspec.DecodeError:
        line = _read_lenient(record)
    if not isinstance(line, _ErrorLine):
        return line
    return ErrorReported(
        ErrorRecord(
            type=line.type,
            message=line.message,
            traceback=line.traceback,
            raised_at=Instant(line.raised_at),
            wall_ns=line.wall_ns,
            tensors=line.tensors,
        )
    )


def _read_lenient(record: bytes) -> Ready | _ErrorLine | None:
    """Read what only the standard library accepts: half surrogates, as in names of odd files."""
    import json  # noqa: PLC0415  # needed for nearly no run

    try:
        document = json.loads(record.decode("utf-8", "replace"), strict=False)
        escaped = {key: _without_surrogates(value) for key, value in document.items()}
        line: Ready | _ErrorLine = msgspec.convert(escaped, Ready | _ErrorLine)
    except (ValueError, AttributeError, RecursionError, msgspec.ValidationError):
        return None
    return line


def _without_surrogates(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return value
