"""Writing what a run leaves: plain, or packed if the name ends in .gz; whole, or not at all."""

import gzip
import os
from contextlib import suppress
from pathlib import Path

from rankwise.base.errors import ConfigError, RankwiseError


class NotWritten(RankwiseError):
    """What was to be written could not be; the run itself has come to its end."""


def check_writable(path: str) -> None:
    """Refuse a place that nothing can be written to, before hours go into what should go there.

    Raises:
        ConfigError: names the path, and why.
    """
    file = Path(path)
    if not path:
        raise ConfigError("'' is the name of no file to write")
    if file.is_dir():
        raise ConfigError(f"{path!r} is a directory, expected the name of a file to write")
    if not file.parent.is_dir():
        raise ConfigError(f"{path!r} cannot be written: there is no directory {str(file.parent)!r}")
    place = file if file.exists() else file.parent
    if not os.access(place, os.W_OK):
        is_read_only = os.statvfs(place).f_flag & os.ST_RDONLY
        why = "the file system is read-only" if is_read_only else "permission denied"
        raise ConfigError(f"{path!r} cannot be written: {why}")


def write_text(path: str, text: str) -> None:
    """Write a file; the same text always gives the same bytes.

    It appears under its name when it is complete: what was there before stays if it cannot be.

    Raises:
        ConfigError: the place is none that can be written to.
        NotWritten: writing failed; nothing of it is left.
    """
    content = text.encode()
    write_bytes(path, gzip.compress(content, mtime=0) if path.endswith(".gz") else content)


def write_bytes(path: str, content: bytes) -> None:
    """Write a file of bytes, like `write_text`, but as they are."""
    check_writable(path)
    file = Path(path)
    try:
        if file.exists() and not file.is_file():  # a pipe, a device
            file.write_bytes(content)
        else:
            _replace(file.resolve(), content)
    except OSError as error:
        raise NotWritten(f"{path!r} cannot be written: {error.strerror}") from error


def _replace(file: Path, content: bytes) -> None:
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(file)
    finally:
        with suppress(OSError):  # it has got its name, or its file system is in trouble
            part.unlink()
