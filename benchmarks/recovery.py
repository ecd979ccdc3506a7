"""How long ranks that train are held up by the death of one of them.

    python benchmarks/recovery.py [--repetitions 5]

From the SIGKILL of a rank to the end of the first step after it, on all of 8 ranks with a DDP model
on gloo: recovered by `rankwise.recover`, and all started again. Instants are taken with the
machine's monotonic clock by the ranks themselves.
"""

import subprocess
from collections.abc import Sequence
from functools import partial

from measuring import (
    HAS_TORCH,
    PROGRAMS,
    RANKWISE,
    Table,
    arguments,
    describe_machine,
    environment,
    ratio,
    scratch_directory,
    seconds,
    take_turns,
)

RANKS = 8
PROGRAM = str(PROGRAMS / "recovering.py")
PATIENCE = 120.0
WARM = ("--start-method", "forkserver", "--preload", "torch,torch._dynamo")


def held_up(launcher: Sequence[str], how: str) -> float:
    """Seconds from the death of a rank until all have done a step again."""
    flags = ("--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "1")
    with scratch_directory() as directory:
        done = subprocess.run(
            [*launcher, *flags, PROGRAM, str(directory), how],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(launcher)} {how} failed:\n{done.stderr}")
        last = max(int((directory / f"step.1.{rank}").read_text()) for rank in range(RANKS))
        return (last - int((directory / "killed").read_text())) / 1e9


def main() -> None:
    options = arguments(__doc__, repetitions=5)
    if not HAS_TORCH:
        raise SystemExit("this benchmark needs torch")
    describe_machine()
    launchers: dict[str, tuple[Sequence[str], str]] = {
        "rankwise.recover, torch preloaded": ((*RANKWISE, "run", *WARM), "recover"),
        "all ranks start again, torch preloaded": ((*RANKWISE, "run", *WARM), "restart"),
        "all ranks start again": ((*RANKWISE, "run"), "restart"),
    }
    measured = take_turns(
        {name: partial(held_up, *each) for name, each in launchers.items()}, options.repetitions
    )
    table = Table(
        f"From the kill of a rank to the next step of all {RANKS}",
        ("what", "time", "of a whole restart's"),
        options.json,
    )
    for name, taken in measured.items():
        table.row(name, seconds(taken), ratio(taken, measured["all ranks start again"]))


if __name__ == "__main__":
    main()
