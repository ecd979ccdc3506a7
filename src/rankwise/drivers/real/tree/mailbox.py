"""Mailboxes: what a child is asked for that is no task, and what it answers.

Carries out what the two machines of `core.mailbox` order. A child has a frame for this in the
arena; the word `COMMAND` in its task pipe says that a request lies there, `ANSWERED` in the
completion pipe that the answer does. An answer that is longer than the frame goes into the report
file. There is one request at a time, after all that was sent before it. One whose caller went away,
by Ctrl-C or because time was up, keeps its place until it is answered; so the next one neither
overwrites it nor takes its answer for its own.

How a child comes up and ends is told by other words: `READY` is the HELLO of its mailbox, and
`RELEASE` ends it. When it dies, whoever waits is told.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from rankwise.base.errors import ConfigError, MailboxCorrupt, RemoteProtocolError
from rankwise.base.units import format_bytes
from rankwise.core.mailbox.frames import (
    HEADER_BYTES,
    Frame,
    FrameKind,
    Lane,
    decode_frame,
    encode_frame,
)
from rankwise.core.mailbox.parent_end import ParentEnd
from rankwise.core.mailbox.vocabulary import (
    AnnounceEnd,
    AnnounceReady,
    Called,
    CarryOut,
    ChannelBroke,
    Deliver,
    FrameArrived,
    GiveUpCall,
    KillPeer,
    Leave,
    ParentStimulus,
    PeerEnded,
    SendFrame,
    Started,
    WorkerStimulus,
    WorkFinished,
)
from rankwise.core.mailbox.worker_end import WorkerEnd
from rankwise.drivers.real.tree.arena import FRAME_BYTES
from rankwise.drivers.real.tree.reports import ANSWER, ReportFile, report_of, report_of_left
from rankwise.drivers.real.tree.words import ANSWERED, LEFT_IN_FILE, READY, completion

_now: Callable[[], Any] = time.monotonic_ns


class Mailbox:
    """The worker process's end of one child's mailbox.

    Args:
        name: what the child is called.
        frame: the child's frame for commands.
        ring: tells the child that a request of so many bytes lies there.
        kill: ends the child, which does not keep to the rules.
    """

    def __init__(
        self, name: str, frame: memoryview, ring: Callable[[int], None], kill: Callable[[], None]
    ) -> None:
        self._frame = frame
        self._ring = ring
        self._kill = kill
        self._calls = 0
        self._ends: dict[int, Deliver | GiveUpCall | None] = {}
        """How the calls that somebody waits for have ended."""
        self._end = ParentEnd(name, _now())
        self._tell(FrameArrived(Frame(FrameKind.HELLO, Lane.CONTROL, 0)))

    def call(self, body: bytes) -> int:
        """Ask for something; returns a number for `end_of` and `forget`.

        Raises:
            ConfigError: the frame has no room for so much.
        """
        if HEADER_BYTES + len(body) > FRAME_BYTES:
            raise ConfigError(f"a command takes {format_bytes(len(body))}, too much for a frame")
        self._calls += 1
        self._ends[self._calls] = None
        self._tell(Called(self._calls, Lane.CONTROL, body))
        return self._calls

    def end_of(self, call: int) -> Deliver | GiveUpCall | None:
        """How a call has ended; None while it has not. It is told once."""
        end = self._ends[call]
        if end is not None:
            del self._ends[call]
        return end

    def forget(self, call: int) -> None:
        """Nobody waits for this call any more."""
        self._ends.pop(call, None)

    def answered(self, length: int) -> None:
        """Hear that an answer lies in the frame."""
        self.hear(self._frame[:length])

    def hear(self, data: bytes | memoryview) -> None:
        """Take an answer in."""
        try:
            self._tell(FrameArrived(decode_frame(data)))
        except MailboxCorrupt as error:
            self._tell(ChannelBroke(str(error)))

    def child_ended(self, how: str) -> None:
        """Hear that nobody will answer any more."""
        self._tell(PeerEnded(f"it {how}"))

    def _tell(self, stimulus: ParentStimulus) -> None:
        for effect in self._end.handle(stimulus, _now()):
            match effect:
                case SendFrame(frame=frame):
                    data = encode_frame(frame)
                    self._frame[: len(data)] = data
                    self._ring(len(data))
                case Deliver(call=call) | GiveUpCall(call=call):
                    if call in self._ends:
                        self._ends[call] = effect
                case KillPeer():
                    self._kill()
                case AnnounceReady() | AnnounceEnd():
                    pass  # told by other words


class ChildMailbox:
    """A child's end of its mailbox.

    Args:
        index: the child's number.
        frame: its frame for commands.
        done_fd: where it writes words.
        reports: its report file.
        carry_out: does what a request says, and returns the answer.
    """

    def __init__(
        self,
        index: int,
        frame: memoryview,
        done_fd: int,
        reports: ReportFile,
        carry_out: Callable[[bytes], bytes],
    ) -> None:
        self._index = index
        self._frame = frame
        self._done_fd = done_fd
        self._reports = reports
        self._carry_out = carry_out
        self._end = WorkerEnd()

    def start(self) -> None:
        """Say that this child is up."""
        self._tell(Started())

    def rung(self, length: int) -> None:
        """Hear that a request lies in the frame; returns when it has been answered.

        Raises:
            RemoteProtocolError: it is none, so this child must end.
        """
        try:
            self._tell(FrameArrived(decode_frame(self._frame[:length])))
        except MailboxCorrupt as error:
            self._tell(ChannelBroke(str(error)))

    def _tell(self, stimulus: WorkerStimulus) -> None:
        for effect in self._end.handle(stimulus, _now()):
            match effect:
                case SendFrame(frame=frame):
                    self._send(frame)
                case CarryOut():
                    self._tell(self._work(effect))
                case Leave(reason=reason):
                    raise RemoteProtocolError(reason)

    def _work(self, order: CarryOut) -> WorkFinished:
        try:
            answer = self._carry_out(order.body)
        except BaseException as error:  # noqa: BLE001  # the worker process raises it
            return WorkFinished(order.lane, order.sequence, report_of(error), succeeded=False)
        return WorkFinished(order.lane, order.sequence, answer)

    def _send(self, frame: Frame) -> None:
        if frame.kind is FrameKind.HELLO:
            os.write(self._done_fd, completion(READY, self._index))
            return
        data = encode_frame(frame)
        length = len(data)
        if length > FRAME_BYTES:
            self._reports.append(ANSWER, report_of_left(data))
            length = LEFT_IN_FILE
        else:
            self._frame[:length] = data
        os.write(self._done_fd, completion(ANSWERED, self._index, length))
