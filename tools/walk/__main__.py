"""Records a run, and lists the modules and calls that one thing passes through on its way.

    python tools/walk rank
    python tools/walk line --calls
    python tools/walk launch --source ../other/src

Things: `rank` (from the command line to the exit code), `line` and `simulated-line` (of output),
`failure` (to the report), `all-reduce` (of torch on simulated ranks), `launch` (of a kernel in
simulated time). A call is on the way if an argument or its result has what is followed: the name of
the script and the exit code, the text of the line, the message of the error. For `all-reduce` and
`launch`, the calls count that the threads of the ranks make meanwhile: docs/development/walks.md.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
TIMEOUT_S = 120


class Walk(NamedTuple):
    """What is run, and what is followed.

    Attributes:
        words: of `rankwise`; `{script}` is the file with `program`.
        program: its text. A followed text is put together there, so that it is not in the file.
        marks: what is followed; None for the calls between `begin()` and `end()`.
        code: the exit code of the run.
    """

    words: tuple[str, ...]
    program: str
    marks: tuple[str | int, ...] | None
    code: int = 0


_EXIT_CODE = 113
_REAL = ("run", "--quiet", "--nproc-per-node", "1", "--start-method", "subprocess", "{script}")
_SIMULATED = ("run", "--on", "sim", "--nproc-per-node", "2", "{script}")
_LINE = """\
import os, sys
if os.environ["RANK"] == "0":  # in one write: `print` makes several, which may be read apart
    sys.stdout.write("-".join(["walk", "of", "a", "line"]) + "\\n")
    sys.stdout.flush()
"""

WALKS = {
    "rank": Walk(
        _REAL,
        f"import os\nos._exit({_EXIT_CODE})\n",
        # As `os.waitid` and `os.wait` give it.
        ("walked_script.py", _EXIT_CODE, _EXIT_CODE << 8),
        _EXIT_CODE,
    ),
    "line": Walk(_REAL, _LINE, ("walk-of-a-line",)),
    "simulated-line": Walk(_SIMULATED, _LINE, ("walk-of-a-line",)),
    "failure": Walk(
        tuple(word for word in _REAL if word != "--quiet"),
        # What Python prints of it would be a line of output.
        """\
import os
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
raise ValueError("-".join(["walk", "of", "a", "failure"]))
""",
        ("walk-of-a-failure",),
        1,
    ),
    "all-reduce": Walk(
        _SIMULATED,
        """\
import builtins
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.ones(4)
dist.all_reduce(tensor)
builtins.rankwise_walk.begin()
dist.all_reduce(tensor)
builtins.rankwise_walk.end()
assert tensor[0] == 4
""",
        None,
    ),
    "launch": Walk(
        ("sim", "run", "--triton", "--topology", "default", "{script}"),
        """\
import builtins
import numpy as np
import triton
import triton.language as tl


@triton.jit
def fill(x):
    tl.store(x, 4.0)


values = np.ones(1, dtype=np.float32)
fill[(1,)](values)
builtins.rankwise_walk.begin()
fill[(1,)](values)
builtins.rankwise_walk.end()
assert values[0] == 4
""",
        None,
    ),
}  # fmt: skip


class Call(NamedTuple):
    """The first call of one function by another in one process; `caller` is empty at the bottom."""

    instant: int
    module: str
    function: str
    calling_module: str
    caller: str


def record(walk: Walk, source: Path = SOURCE) -> list[Call]:
    """Run a walk, and return its calls in the order in which they were first made.

    Raises:
        RuntimeError: the run ended in another way than it should.
    """
    with tempfile.TemporaryDirectory(prefix="walk-") as name:
        folder = Path(name)
        calls = folder / "calls"
        calls.mkdir()
        script = folder / "walked_script.py"
        script.write_text(walk.program)
        _write_starters(folder, source, calls, walk.marks)
        environ = {**os.environ, "PYTHONPATH": f"{folder}:{source}", "PYTHONDONTWRITEBYTECODE": "1"}
        words = [word.format(script=script) for word in walk.words]
        command = [sys.executable, "-m", "rankwise", *words]
        done = subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S,
            check=False,
        )  # fmt: skip
        if done.returncode != walk.code:
            raise RuntimeError(
                f"{shlex.join(command)} ended with {done.returncode}, expected {walk.code}:\n"
                f"{done.stdout}{done.stderr}"
            )
        return sorted(_read(calls))


def _write_starters(
    folder: Path, source: Path, calls: Path, marks: tuple[str | int, ...] | None
) -> None:
    """Write what makes interpreters begin with the hook: `sitecustomize`, and for those without.

    The guardian is started as `python -I -S FILE`, which reads no variable and no `site`: what it
    is started with is a shell that inserts another program.
    """
    hook = f"""\
import sys
sys.path.append({str(HERE)!r})
import hook
sys.path.remove({str(HERE)!r})
hook.install({f"{source}/"!r}, {str(calls)!r}, {None if marks is None else list(marks)!r})
"""
    starter, isolated = folder / "python", folder / "isolated.py"
    (folder / "sitecustomize.py").write_text(f"{hook}sys.executable = {str(starter)!r}\n")
    isolated.write_text(f"{hook}hook.run_file(sys.argv[1], sys.argv[2:])\n")
    python = shlex.quote(sys.executable)
    starter.write_text(
        f"""#!/bin/sh
if [ "$1 $2" = "-I -S" ]; then
    shift 2
    exec {python} -I -S {shlex.quote(str(isolated))} "$@"
fi
exec {python} "$@"
"""
    )
    starter.chmod(0o700)


def _read(folder: Path) -> Iterator[Call]:
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            yield Call(*json.loads(line))


def modules(calls: list[Call]) -> list[str]:
    """The modules, in the order in which they were entered first.

    The caller counts as well: it has what it passes on, or gets.
    """
    passed = (name for call in calls for name in (call.calling_module, call.module) if name)
    return list(dict.fromkeys(passed))


def hops(calls: list[Call]) -> list[Call]:
    """The calls from one module to another, each pair of functions once."""
    between = [call for call in calls if call.calling_module not in {"", call.module}]
    return list({call[1:]: call for call in reversed(between)}.values())[::-1]


def main() -> None:
    """Print a walk."""
    parser = argparse.ArgumentParser(prog="tools/walk", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("walk", choices=[*WALKS, "all"], help="what is followed")
    parser.add_argument("--source", type=Path, default=SOURCE, help="the src folder of a checkout")
    parser.add_argument("--calls", action="store_true", help="list the calls between modules, too")
    given = parser.parse_args()
    if not (given.source / "rankwise" / "__init__.py").is_file():
        # Python would find the installed package instead, whose calls are not from there.
        parser.error(f"--source is {given.source}, expected the src folder of a checkout")
    for name in WALKS if given.walk == "all" else [given.walk]:
        calls = record(WALKS[name], given.source.resolve())
        passed, between = modules(calls), hops(calls)
        print(f"{name}: {len(passed)} modules, {len(between)} hops")
        for module in passed if given.walk != "all" else []:
            print(f"  {module}")
        for call in between if given.calls else []:
            print(f"  {call.calling_module}:{call.caller} -> {call.module}:{call.function}")


if __name__ == "__main__":
    main()
