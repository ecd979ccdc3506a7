"""Runs a program with `--start-method auto` and with `subprocess`, and compares what is seen."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
_HOW = re.compile(r"rankwise: (ranks are forked from|each rank starts an interpreter)(.*)\n")
_VARYING = (
    (re.compile(r"0x[0-9a-f]{4,}"), "ADDRESS"),
    (re.compile(r"\bpid(s?[ =]|: +)\d+"), "PID"),
    (re.compile(r"pipe:\[\d+\]|/proc/\d+"), "PROC"),
    # The bottom of a stack, below the program: where ranks begin is no secret.
    (re.compile(r'(?m)^.*File ".*rankwise/drivers/real/(worker|hosting)/\w+\.py", .*\n'), ""),
    (re.compile(r"(process|processes|thread) \(?\d+\)?"), "PROCESS"),
    (re.compile(r"/tmp/rankwise_[0-9a-f]+\S*"), "PRIVATE"),
    (re.compile(r"\b\d+(\.\d+)? ?(ms|s|min|us|KiB|MiB|GiB|%)(?!\w)"), "QUANTITY"),
    (re.compile(r"\b\d\d:\d\d:\d\d([.,]\d+)?"), "CLOCK"),
    (re.compile(r"\b\d{4}-\d\d-\d\d\b"), "DATE"),
    (re.compile(r"('train_(runtime|samples_per_second|steps_per_second)': )'[^']+'"), r"\1SPEED"),
    (re.compile(r"\b\d+:\d+(?= \w+\.cpp)"), "PID"),
    # Whether loky's tracker of resources has ended before the sweep, nobody knows.
    (re.compile(r"(?m)^rankwise: .* left running .*loky.*\n"), ""),
    (re.compile(r"127\.0\.0\.1:\d+"), "PORT"),
)


@dataclass(frozen=True)
class Seen:
    """What a run has shown, without what differs from run to run."""

    code: int
    lines: tuple[str, ...]
    report: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    how: str

    @property
    def is_forked(self) -> bool:
        return self.how.startswith("ranks are forked") and "each rank" not in self.how


def seen(
    words: Sequence[str | Path],
    folder: Path,
    method: str,
    *,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    stdin: bytes = b"",
) -> Seen:
    """Run a program on two ranks in this folder, which is empty afterwards but for its files."""
    before = {path.name for path in folder.iterdir()}
    command = [
        python, "-m", "rankwise", "run", "--nproc-per-node=2", "--rdzv-id=agreement", "--verbose",
        f"--start-method={method}", "--shutdown-timeout=20", *options, *map(str, words),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder.parent / "cache"), **(environment or {})},
        input=stdin,
        capture_output=True,
        check=False,
        timeout=600,
    )
    made = sorted(path for path in folder.iterdir() if path.name not in before)
    files = tuple(
        (path.name, path.read_bytes().decode("utf-8", "replace")) for path in made if path.is_file()
    )
    for path in made:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    errors = done.stderr.decode("utf-8", "replace")
    how = " ".join(match[1] + match[2] for match in _HOW.finditer(errors))
    # Lines of different ranks come in any order, those of one do not.
    lines = sorted(_plain(done.stdout.decode("utf-8", "replace")), key=_rank)
    report = sorted(_plain(_HOW.sub("", errors)), key=_rank)
    return Seen(done.returncode, tuple(lines), tuple(report), files, how)


def _rank(line: str) -> str:
    return line.partition("]:")[0] if line.startswith("[") else ""


def _plain(text: str) -> list[str]:
    for pattern, word in _VARYING:
        text = pattern.sub(word, text)
    return text.splitlines()


def differences(one: Seen, other: Seen) -> str:
    """Say how two runs differ; empty if they do not."""
    told = []
    if one.code != other.code:
        told.append(f"exit codes {one.code} and {other.code}")
    for name in ("lines", "report", "files"):
        ours, theirs = getattr(one, name), getattr(other, name)
        if ours != theirs:
            told += [f"- {line}" for line in theirs if line not in ours]
            told += [f"+ {line}" for line in ours if line not in theirs]
            told.append(f"({name} differ)")
    return "\n".join(told)
