"""Writing what a run leaves behind: plain, or packed if the name ends in .gz."""

import gzip
from pathlib import Path

from rankwise.base.errors import ConfigError


def check_writable(path: str) -> None:
    """Refuse a place that nothing can be written to, before hours go into what should go there.

    Raises:
        ConfigError: names the path, and why.
    """
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"{path!r} is a directory, expected the name of a file to write")
    if not file.parent.is_dir():
        raise ConfigError(f"{path!r} cannot be written: there is no directory {str(file.parent)!r}")


def write_text(path: str, text: str) -> None:
    """Write a file; the same text always gives the same bytes.

    Raises:
        ConfigError: it cannot be written.
    """
    check_writable(path)
    content = text.encode()
    if path.endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be written: {error.strerror}") from error
