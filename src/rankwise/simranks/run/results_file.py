"""The file of `--results`: what a sweep has done, so that the same sweep goes on with the rest.

A head line, and then a line of JSON for each case that is done, in the order in which they were
done. One sweep owns the file, by a lock that ends with its process, however that ends. A line is
written by one call, and reaches the disk before the next case begins: whatever kills the process
or the machine, only cases under way are lost. A last line without an end was torn by that, or by a
full disk, and is cut off.
"""

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.sim.reporting.files import NotWritten, check_writable
from rankwise.sim.reporting.sweep_table import SweptCase

_HEAD = b'{"rankwise": "results of a sweep", "format": 1}\n'


class _ResultsEntry(msgspec.Struct, frozen=True):
    key: str
    case: SweptCase


def entries_in(path: str) -> dict[str, SweptCase]:
    """What a file has, which a sweep may be writing.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path!r} cannot be read: {error.strerror}", hint="expected a file of --results"
        ) from error
    _check_head(content, path)
    return _entries(content[: content.rfind(b"\n") + 1], path)


def _check_head(content: bytes | bytearray, path: str) -> None:
    if not content.startswith(_HEAD[: len(content)]):
        raise ConfigError(
            f"{path!r} is not a file of --results, and is left as it is", hint="name another file"
        )


def _entries(content: bytes, path: str) -> dict[str, SweptCase]:
    found: dict[str, SweptCase] = {}
    for number, line in enumerate(content.splitlines()[1:], 2):
        try:
            entry = msgspec.json.decode(line, type=_ResultsEntry)
        except msgspec.DecodeError:
            raise ConfigError(
                f"{path!r}, line {number}: this is no result",
                hint="take the line out, and its case runs again",
            ) from None
        found[entry.key] = entry.case
    return found


class ResultsFile:
    """The file; a context manager that lets go of it.

    Attributes:
        done: what each case has given, by its key.

    Raises:
        ConfigError: it is another sweep's, or no such file, or cannot be opened.
    """

    def __init__(self, path: str) -> None:
        check_writable(path)
        self.path = path
        self.done: dict[str, SweptCase] = {}
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise ConfigError(f"{path!r} cannot be opened: {error.strerror}") from error
        try:
            self._lock()
            self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise ConfigError(f"{self.path!r} is not a regular file, so it cannot keep results")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.path!r} is in use by another sweep",
                hint="wait for its end, or name another file",
            ) from None
        except OSError as error:
            raise ConfigError(f"{self.path!r} cannot be locked: {error.strerror}") from error

    def _read(self) -> None:
        content = bytearray()
        while chunk := os.pread(self._descriptor, 1 << 20, len(content)):
            content += chunk
        _check_head(content, self.path)
        whole = content.rfind(b"\n") + 1
        self.done = _entries(bytes(content[:whole]), self.path)
        if whole < len(content):
            os.ftruncate(self._descriptor, whole)
        if not whole:
            self._append(_HEAD)

    def keep(self, key: str, case: SweptCase) -> None:
        """Write what a case has given.

        Raises:
            NotWritten: it cannot be written; the file is as before.
        """
        self._append(msgspec.json.encode({"key": key, "case": case}) + b"\n")
        self.done[key] = case

    def _append(self, line: bytes) -> None:
        before = os.fstat(self._descriptor).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with suppress(OSError):  # else the next sweep cuts it off
                os.ftruncate(self._descriptor, before)
            kept = len(self.done)
            raise NotWritten(
                f"{self.path!r} cannot be written: {error.strerror}; it has {kept:,} results"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
