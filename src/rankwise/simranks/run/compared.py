"""What `rankwise sim compare` is given: files that runs have left, or commands that leave one."""

import gzip
import json
import os
import shlex
import subprocess
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.errors import ConfigError, RankwiseError
from rankwise.base.units import format_bytes
from rankwise.sim.reporting.breakdown import Breakdown, from_document, from_page
from rankwise.simranks.run.cores import command_line

if TYPE_CHECKING:
    from rankwise.sim.reporting.comparison import Comparison

PREDICTION_FILE = "prediction.json"
"""Its name in a log directory, beside the journal."""
_FILE_BYTES_MAX = 256 << 20
_EXPECTED = (
    "expected a page of --report, a file of --prediction, a journal or its directory, or a "
    "rankwise command in quotes"
)
_LINES_SHOWN = 3
_GZIP = b"\x1f\x8b"
_FORMS = {
    # By the words behind `rankwise`: the option that makes the command leave a file.
    ("sim", "bench"): "--report",
    ("sim", "run"): "--report",
    ("run",): "--prediction",
}


class CommandFailed(RankwiseError):
    """A command that was to be compared has failed."""


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    names: tuple[str, str] | None = None,
) -> "Comparison":
    """Set two runs side by side: pages, files of `--prediction`, journals, or commands.

    The result has `headline()`, `rows`, `ranks` and `as_document()`.

    Raises:
        ConfigError: one of them tells nothing of a run.
    """
    from rankwise.sim.reporting.comparison import compare as side_by_side  # noqa: PLC0415  # its name

    words = os.fspath(first), os.fspath(second)
    runs = breakdown_of(words[0]), breakdown_of(words[1])
    names = names or names_of(words)
    return side_by_side(*runs, names, commands_in_words(names, words))


def names_of(words: tuple[str, str]) -> tuple[str, str]:
    """What two runs are called: as short as they can be told apart, `A` and `B` for commands."""
    if any(is_command(word) for word in words):
        return "A", "B"
    paths = [Path(word) for word in words]
    names = [path.parent.name if path.name == "journal.jsonl" else path.name for path in paths]
    if names[0] == names[1]:
        names = [str(path) for path in paths]
    return (names[0], names[1]) if names[0] != names[1] else ("A", "B")


def commands_in_words(names: tuple[str, str], words: tuple[str, str]) -> list[str]:
    """What each run is, as far as its name does not say it."""
    return [
        f"{name} is {word}"
        for name, word in zip(names, words, strict=True)
        if name not in {word, Path(word).name}
    ]


def is_command(word: str) -> bool:
    """Whether it is words of a command line, and no file."""
    return " " in word.strip() and not os.path.exists(word)


def breakdown_of(word: str) -> Breakdown:
    """Where the time of a run went.

    Args:
        word: a file, a log directory or a command.

    Raises:
        ConfigError: it tells nothing of a run.
        CommandFailed: the command has.
    """
    if is_command(word):
        return _of_command(word)
    path = Path(word)
    if os.path.isdir(word):  # it never raises, however long the name is
        return _of_directory(path, word)
    if path.name == "journal.jsonl" and (beside := path.with_name(PREDICTION_FILE)).is_file():
        return breakdown_of(str(beside))
    content = _content(path, word)
    start = content[:4096].lstrip()
    if start.lower().startswith(b"<!doctype html"):
        return from_page(content.decode(errors="replace"), word)
    if start.startswith(b"{"):
        try:
            document = json.loads(content)
        except ValueError:
            return _of_journal(word)
        if isinstance(document, dict) and "machine" in document and "stimulus" not in document:
            return from_document(document, word)
        return _of_journal(word)
    raise ConfigError(f"{word} is none of these; {_EXPECTED}")


def _content(path: Path, word: str) -> bytes:
    try:
        if not path.is_file():
            what = "is not a regular file" if path.exists() else "does not exist"
            raise ConfigError(f"{word!r} {what}; {_EXPECTED}")
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise ConfigError(f"{word} has more than {format_bytes(_FILE_BYTES_MAX)}; {_EXPECTED}")
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(_GZIP) else content
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{word} cannot be read: {why}") from error


def _of_directory(path: Path, word: str) -> Breakdown:
    found = sorted(path.glob("journal.jsonl")) or sorted(path.glob("*/journal.jsonl"))
    if not found:
        raise ConfigError(f"there is no journal.jsonl in {word}; {_EXPECTED}")
    if len(found) > 1:
        shown = ", ".join(str(each.parent) for each in found[:3])
        raise ConfigError(
            f"{word} holds {len(found)} journals, expected one", hint=f"name one: {shown}"
        )
    return breakdown_of(str(found[0]))


def _of_journal(word: str) -> Breakdown:
    from rankwise.observe.breakdown import breakdown_of as of_timeline  # noqa: PLC0415  # rare
    from rankwise.observe.timeline import timeline_of  # noqa: PLC0415  # the same

    breakdown = of_timeline(timeline_of([(word, _lines(word))]))
    if not breakdown.ranks:
        raise ConfigError(f"{word} tells of no rank that has begun")
    return breakdown


def _lines(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


def _of_command(word: str) -> Breakdown:
    words = _split(word)
    form = next((form for form in _FORMS if tuple(words[: len(form)]) == form), None)
    if form is None:
        raise ConfigError(
            f"{word!r} is neither a file nor a command that simulates; {_EXPECTED}",
            hint="commands: rankwise run --on sim:MACHINE …, or rankwise sim run or bench …",
        )
    with tempfile.TemporaryDirectory(prefix="rankwise-compare-") as folder:
        path = str(Path(folder, "result"))
        place, option = len(form), _FORMS[form]
        if form == ("run",) and not any(word.startswith(("--on", "sim:")) for word in words):
            option = "--log-dir"
        command = [*words[:place], option, path, *words[place:]]
        done = subprocess.run(
            command_line(command),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        if done.returncode or not Path(path).exists():
            raise CommandFailed(_why_failed(word, done.returncode, done.stderr))
        return breakdown_of(path)


def _split(word: str) -> Sequence[str]:
    try:
        words = shlex.split(word)
    except ValueError as error:
        raise ConfigError(f"{word!r} cannot be split into words: {error}") from None
    if words[:3] == ["python", "-m", "rankwise"]:
        return words[3:]
    return words[1:] if words and Path(words[0]).name == "rankwise" else words


def _why_failed(word: str, code: int, stderr: str) -> str:
    if not code:
        return f"{word!r} left no file to compare"
    lines = [line for line in stderr.splitlines() if line.strip()][-_LINES_SHOWN:]
    return "\n  ".join([f"{word!r} failed with exit code {code}", *lines])
