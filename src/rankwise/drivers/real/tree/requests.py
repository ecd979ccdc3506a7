"""Requests: what a child is asked for that is no task, and what it answers.

Carries out what the machine of `core.tasks.request` orders. A child has a frame for this in the
arena; the word `COMMAND` in its task pipe says that a request lies there, `ANSWERED` in the
completion pipe that the answer does. An answer that is longer than the frame goes into the report
file. There is one request at a time, after all that was sent before it.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from rankwise.base.errors import MailboxCorrupt, RemoteProtocolError, TreeValueError
from rankwise.base.units import format_bytes
from rankwise.core.tasks.frames import HEADER_BYTES, Frame, FrameKind, decode_frame, encode_frame
from rankwise.core.tasks.request import (
    AnswerArrived,
    Called,
    ChannelBroke,
    Deliver,
    Effect,
    GiveUp,
    KillPeer,
    PeerEnded,
    Requests,
    SendFrame,
    Stimulus,
)
from rankwise.drivers.feed import Door
from rankwise.drivers.real.tree.arena import FRAME_BYTES
from rankwise.drivers.real.tree.pipe_protocol import ANSWERED, LEFT_IN_FILE, completion
from rankwise.drivers.real.tree.reports import ANSWER, ReportFile, report_of, report_of_left
from rankwise.ports.journal import Journal

_now: Callable[[], Any] = time.monotonic_ns


class ChildRequests:
    """The worker process's side: asks one child.

    Args:
        name: what the child is called.
        frame: the child's frame for commands.
        ring: tells the child that a request of so many bytes lies there.
        kill: ends the child, which does not keep to the rules.
        journal: remembers what is asked and answered.
    """

    def __init__(
        self,
        name: str,
        frame: memoryview,
        ring: Callable[[int], None],
        kill: Callable[[], None],
        journal: Journal | None = None,
    ) -> None:
        self._frame = frame
        self._ring = ring
        self._kill = kill
        self._calls = 0
        self._ends: dict[int, Deliver | GiveUp | None] = {}
        """How the calls that are waited for have ended."""
        self._door: Door[Stimulus, Effect] = Door(f"requests of {name}", Requests(name), journal)

    def call(self, body: bytes) -> int:
        """Ask for something; returns a number for `end_of` and `forget`.

        Raises:
            ConfigError: the frame has no room for so much.
        """
        if HEADER_BYTES + len(body) > FRAME_BYTES:
            raise TreeValueError(f"a command takes {format_bytes(len(body))}, too much for a frame")
        self._calls += 1
        self._ends[self._calls] = None
        self._tell(Called(self._calls, body))
        return self._calls

    def end_of(self, call: int) -> Deliver | GiveUp | None:
        """How a call has ended; None while it has not. It is told once."""
        end = self._ends[call]
        if end is not None:
            del self._ends[call]
        return end

    def forget(self, call: int) -> None:
        """The caller does not wait for this call any more."""
        self._ends.pop(call, None)

    def on_answer(self, length: int) -> None:
        """Handle the answer that lies in the frame."""
        self.on_answer_bytes(self._frame[:length])

    def on_answer_bytes(self, data: bytes | memoryview) -> None:
        """Handle an answer."""
        try:
            self._tell(AnswerArrived(decode_frame(data)))
        except MailboxCorrupt as error:
            self._tell(ChannelBroke(str(error)))

    def on_child_ended(self, how: str) -> None:
        """Handle the end of a child: no answer will come."""
        self._tell(PeerEnded(f"it {how}"))

    def _tell(self, stimulus: Stimulus) -> None:
        for effect in self._door.tell(stimulus, _now()):
            match effect:
                case SendFrame(frame=frame):
                    data = encode_frame(frame)
                    self._frame[: len(data)] = data
                    self._ring(len(data))
                case Deliver(call=call) | GiveUp(call=call):
                    if call in self._ends:
                        self._ends[call] = effect
                case KillPeer():
                    self._kill()


class RequestServer:
    """A child's side: answers one request at a time.

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

    def serve(self, length: int) -> None:
        """Carry out the request that lies in the frame, and answer it.

        Raises:
            RemoteProtocolError: it is none, so this child must end.
        """
        try:
            frame = decode_frame(self._frame[:length])
        except MailboxCorrupt as error:
            reason = f"the parent's messages cannot be read: {error}"
            raise RemoteProtocolError(reason) from error
        if frame.kind is not FrameKind.REQUEST:
            raise RemoteProtocolError(
                f"the parent sent a {frame.kind.name}, which is a worker's to send"
            )
        try:
            kind, body = FrameKind.REPLY, self._carry_out(frame.body)
        except BaseException as error:  # noqa: BLE001  # the worker process raises it
            kind, body = FrameKind.FAILURE, report_of(error)
        data = encode_frame(Frame(kind, frame.lane, frame.sequence, body))
        length = len(data)
        if length > FRAME_BYTES:
            self._reports.append(ANSWER, report_of_left(data))
            length = LEFT_IN_FILE
        else:
            self._frame[:length] = data
        os.write(self._done_fd, completion(ANSWERED, self._index, length))
