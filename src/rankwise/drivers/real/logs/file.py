"""A log file that survives a full disk.

The bytes of a stream are appended as they come, unbuffered, so that a crash of the agent loses
nothing that it has read. When the disk refuses them (full, over quota, broken), the job goes on:
the refusal is told once per disk, and what does not fit is counted and dropped.

Once a second, with the next chunk, writing is tried again. It resumes at the beginning of a line,
behind a line that says how much is missing, so that every line of the file is whole but for the
one at which the disk filled up.

A file with a limit is renamed to `NAME.1` when it has reached it, in place of the one before, and
begins anew: the last one or two limits' worth of the stream are there. It is cut between lines,
unless a line is as long as the limit.
"""

import os
from collections.abc import Callable

from rankwise.base.units import SECOND, Duration, Instant, format_bytes

RETRY_PAUSE = Duration(1 * SECOND)
"""How long a file is left alone after the disk has refused it."""


class DiskComplaints:
    """Tells the user that files cannot be written, and how much was lost: once each per disk."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._paths: dict[int, str] = {}
        self._lost_bytes: dict[int, int] = {}
        self._has_reported_removal = False

    def complain(self, path: str, error: OSError) -> None:
        """Say one sentence about `path`, unless there has been one about its disk."""
        device = _device_of(path)
        if device not in self._paths:
            self._paths[device] = path
            self._say(
                f"cannot write {path}: {error.strerror or error}; output that does not fit on "
                "this disk is lost, the job continues"
            )

    def complain_of_removal(self, path: str) -> None:
        """Say, once, that a file was removed while it was written."""
        if not self._has_reported_removal:
            self._has_reported_removal = True
            self._say(f"{path} was removed while the job ran; what was written there is lost")

    def add_loss(self, path: str, lost_bytes: int) -> None:
        """Remember how many bytes of a stream a file lacks."""
        device = _device_of(path)
        # By disk: a thousand ranks on a full disk are one line.
        self._lost_bytes[device] = self._lost_bytes.get(device, 0) + lost_bytes

    def tell_losses(self) -> None:
        """Say of each disk how much output is not there; nothing of those that took everything."""
        for device, lost_bytes in self._lost_bytes.items():
            path = self._paths.get(device, "")
            self._say(
                f"{format_bytes(lost_bytes)} of output could not be written to the disk of {path}"
            )
        self._lost_bytes.clear()


class LogFile:
    """A sink that appends to a file. Failing to open it counts like a disk that is full.

    Args:
        path: the file.
        complaints: is told of what the disk refuses.
        bytes_max: how long it may get before another one is begun; None for as long as it gets.
    """

    is_congested = False

    def __init__(self, path: str, complaints: DiskComplaints, bytes_max: int | None = None) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._bytes = 0
        self.lost_bytes = 0
        """Bytes of the stream that are not in the file."""
        self._complaints = complaints
        self._fd = -1
        self._is_ended = False
        self._refused_at: Instant | None = None
        self._reason = ""
        # Of the gap that the file has now, because the disk refuses it:
        self._gap_bytes = 0
        self._gap_ends_line = True
        self._is_torn = False
        try:
            self._open(os.O_TRUNC)
        except OSError as error:
            self._refuse(error, Instant(0))

    def take(self, chunk: bytes, now: Instant) -> None:
        """Append the chunk, or count it as lost."""
        taken = 0
        # Each file takes no more than to the end of a line; what is refused needs no cutting.
        while self._bytes_max is not None and self._refused_at is None:
            end = chunk.find(b"\n", taken + max(0, self._bytes_max - self._bytes - 1)) + 1
            if not 0 < end < len(chunk):
                break
            self._take_piece(chunk[taken:end], now)
            taken = end
        self._take_piece(chunk[taken:], now)

    def _take_piece(self, chunk: bytes, now: Instant) -> None:
        if self._refused_at is None:
            self._append(chunk, now)
        elif now - self._refused_at < RETRY_PAUSE:
            self._lose(chunk)
        else:
            self._resume(chunk, now)

    def end(self, now: Instant) -> None:
        """Close the file. Harmless the second time."""
        if self._is_ended:
            return
        self._is_ended = True
        if self._fd >= 0:
            if self._gap_bytes:
                note = self._note()
                self._append(note, now, note_bytes=len(note))
            # The file has lost its name, so its contents are lost.
            if os.fstat(self._fd).st_nlink == 0:
                self._complaints.complain_of_removal(self.path)
            try:
                os.close(self._fd)
            except OSError as error:  # some file systems tell only now that they have no room
                self._refuse(error, now)
            self._fd = -1
        if self.lost_bytes:
            self._complaints.add_loss(self.path, self.lost_bytes)

    def _open(self, flags: int = 0) -> None:
        # Appending, so that a file which a user truncates goes on at its new end.
        flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY
        self._fd = os.open(self.path, flags, 0o644)

    def _append(self, data: bytes, now: Instant, *, note_bytes: int = 0) -> None:
        """Append `data`, of which the first `note_bytes` are ours and not the stream's."""
        written = 0
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
        except OSError as error:
            self._refuse(error, now)
        if written:
            self._is_torn = data[written - 1] != ord("\n")
            self._bytes += written
        if written >= note_bytes:
            self._gap_bytes = 0
        if written < len(data):
            self._lose(memoryview(data)[max(written, note_bytes) :])
        elif self._bytes_max is not None and self._bytes >= self._bytes_max:
            self._begin_again(self._bytes_max, now)

    def _begin_again(self, bytes_max: int, now: Instant) -> None:
        """Put the file, which is full, aside for a new one, at the end of a line."""
        # A line is not cut, unless it alone is as long as the file may be.
        if self._is_torn and self._bytes < 2 * bytes_max:
            return
        try:
            os.rename(self.path, f"{self.path}.1")
        except OSError:
            self._bytes_max = None  # better a long file than a lost one
            return
        try:
            fd, self._fd, self._bytes = self._fd, -1, 0  # closed even if its disk complains
            os.close(fd)
            self._open(os.O_TRUNC)
        except OSError as error:
            self._refuse(error, now)

    def _refuse(self, error: OSError, now: Instant) -> None:
        # Writing is tried again after a pause: each failed write of a full disk costs the agent
        # time.
        self._refused_at = now
        self._reason = error.strerror or str(error)
        self._complaints.complain(self.path, error)

    def _lose(self, data: bytes | memoryview) -> None:
        if data:
            self.lost_bytes += len(data)
            self._gap_bytes += len(data)
            self._gap_ends_line = data[-1] == ord("\n")

    def _resume(self, chunk: bytes, now: Instant) -> None:
        # A gap ends at a line's end: half a line behind the note would look like a whole one.
        start = 0 if self._gap_ends_line else chunk.find(b"\n") + 1
        if start == 0 and not self._gap_ends_line:
            self._lose(chunk)
            return
        self._lose(memoryview(chunk)[:start])
        if start == len(chunk):
            return
        try:
            if self._fd < 0:
                self._open()
        except OSError as error:
            self._refuse(error, now)
            self._lose(memoryview(chunk)[start:])
            return
        note = self._note() if self._gap_bytes else b""
        self._refused_at = None
        self._append(note + chunk[start:], now, note_bytes=len(note))

    def _note(self) -> bytes:
        newline = "\n" if self._is_torn else ""
        note = f"{newline}[rankwise: {self._gap_bytes} bytes are missing here: {self._reason}]\n"
        return note.encode("utf-8", "replace")


def _device_of(path: str) -> int:
    """The disk that `path` is on, or would be; minus one when even that cannot be known."""
    for candidate in (path, os.path.dirname(path) or "."):
        try:
            return os.stat(candidate).st_dev
        except OSError:
            continue
    return -1
