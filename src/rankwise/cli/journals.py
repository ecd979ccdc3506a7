"""The journals that command lines name: files, or the log directories that hold them."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from rankwise.base.errors import ConfigError
from rankwise.base.units import format_bytes

LINE_BYTES_MAX = 16 << 20
"""Far above an entry of a journal; devices may never end."""


def journal_at(path: str, command: str) -> str:
    """The journal that a path names: the file itself, or the one in a run's log directory.

    `command` is what hints tell to try again.
    """
    folder = Path(path)
    if not folder.is_dir():
        return path
    found = [folder / "journal.jsonl"] if (folder / "journal.jsonl").is_file() else []
    found = found or sorted(folder.glob("*/journal.jsonl"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise ConfigError(
            f"there is no journal.jsonl in {path}, nor in a folder there",
            hint="a run writes its journal where --log-dir says",
        )
    if len(found) > 1:
        raise ConfigError(
            f"{path} holds {len(found)} journals, of several runs or nodes, expected one",
            hint=f"choose a folder of {path}; the newest: rankwise {command}"
            f" {shlex.quote(str(found[-1].parent))}",
        )
    return str(found[0])


def lines_of(path: str) -> Iterator[bytes]:
    """The lines of a journal, the last one as far as it was written.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123  # a plain name, as given
            while line := file.readline(LINE_BYTES_MAX + 1):
                if len(line) > LINE_BYTES_MAX:
                    raise ConfigError(
                        f"{path} has a line of more than {format_bytes(LINE_BYTES_MAX)}, or no end",
                        hint="is it the journal of a run?",
                    )
                yield line
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be read: {error.strerror}") from error
