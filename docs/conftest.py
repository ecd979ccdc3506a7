"""Runs the examples of the documentation as tests, in the order in which a reader meets them.

- A Python block is executed; names live on through the page.
- A Python block that begins with `# file: NAME` is saved under that name instead.
- A `console` block is executed by bash where those files were saved; `$ ` begins a command, and
  each line between is expected somewhere in its output, `…` standing for anything. Order is not
  checked, since ranks have none among each other.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

FILE_MARK = "# file: "
PROMPT = "$ "
PATIENCE_S = 120


class PythonBlocks(CodeBlockParser):
    language = "python"

    def __init__(self) -> None:
        super().__init__()
        self._run = PythonEvaluator()

    def evaluate(self, example: Example) -> str | None:
        source = str(example.parsed)
        if not source.startswith(FILE_MARK):
            self._run(example)
            return None
        name = source.partition("\n")[0].removeprefix(FILE_MARK)
        (example.namespace["folder"] / name).write_text(source)
        return None


class ConsoleBlocks(CodeBlockParser):
    language = "console"

    def evaluate(self, example: Example) -> str | None:
        lines = str(example.parsed).splitlines()
        command = "\n".join(line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT))
        wanted = [line for line in lines if not line.startswith(PROMPT)]
        output = run_in_shell(command, example.namespace["folder"])
        missing = [line for line in wanted if not is_among(line, output.splitlines())]
        if not missing:
            return None
        return "\n".join([command, "misses:", *missing, "in its output:", output])


def run_in_shell(command: str, folder: Path) -> str:
    """Run commands as a reader would, with the environment of this interpreter in PATH."""
    binaries = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": os.pathsep.join([binaries, os.environ["PATH"]])}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.stdout


def is_among(wanted: str, lines: list[str]) -> bool:
    """Whether one of the lines looks like the wanted one."""
    pattern = ".*".join(re.escape(part) for part in wanted.split("…"))
    return any(re.fullmatch(pattern, line) for line in lines)


def begin_page(namespace: dict[str, Any]) -> None:
    # Some pages fork, which a process with threads must not: those of earlier pages end first.
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(PATIENCE_S)
    namespace["folder"] = Path(tempfile.mkdtemp(prefix="documentation-"))


def remove_folder(namespace: dict[str, Any]) -> None:
    shutil.rmtree(namespace["folder"])


pytest_collect_file = Sybil(
    parsers=[PythonBlocks(), ConsoleBlocks()],
    patterns=["*.md"],
    setup=begin_page,
    teardown=remove_folder,
).pytest()
