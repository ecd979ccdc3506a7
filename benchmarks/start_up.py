"""How long until N ranks have run: scripts, functions, programs with torch.

    python benchmarks/start_up.py [--repetitions 7] [--quick]

Times are of the whole command, its own start and end included; for functions, of the call.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial

from measuring import (
    HAS_TORCH,
    PROGRAMS,
    RANKWISE,
    TORCHRUN,
    Table,
    arguments,
    describe_machine,
    environment,
    ratio,
    seconds,
    seconds_of,
    take_turns,
)

NOTHING = str(PROGRAMS / "nothing.py")
ALL_REDUCE = str(PROGRAMS / "torch_all_reduce.py")


def rankwise(count: int, script: str, *flags: str) -> Callable[[], float]:
    command = [*RANKWISE, "run", "--standalone", "--nproc-per-node", str(count), *flags, script]
    return partial(seconds_of, command)


def torchrun(count: int, script: str) -> Callable[[], float]:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(count), script]
    return partial(seconds_of, command)


def popen(count: int, script: str) -> Callable[[], float]:
    return partial(seconds_of, [sys.executable, str(PROGRAMS / "popen.py"), str(count), script])


def function_seconds(how: str, count: int) -> float:
    """What a program that starts N functions says that the call took."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "spawners.py"), how, str(count)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout)


def main() -> None:
    options = arguments(__doc__, repetitions=7)
    describe_machine()

    columns = ("N", "N x Popen", "subprocess", "minus Popen", "fork server", "/ Popen")
    table = Table(
        "Trivial scripts, whole command", (*columns, "torchrun", "/ torchrun"), options.json
    )
    for count in (4, 16) if options.quick else (4, 16, 64, 256):
        peers = {
            "popen": popen(count, NOTHING),
            "subprocess": rankwise(count, NOTHING),
            "forkserver": rankwise(count, NOTHING, "--start-method", "forkserver"),
        }
        if HAS_TORCH and count <= 64:
            peers["torchrun"] = torchrun(count, NOTHING)
        median = take_turns(peers, options.repetitions)
        table.row(
            str(count),
            seconds(median["popen"]),
            seconds(median["subprocess"]),
            f"{(median['subprocess'] - median['popen']) * 1000:+.0f} ms",
            seconds(median["forkserver"]),
            ratio(median["forkserver"], median["popen"]),
            seconds(median.get("torchrun")),
            ratio(median["forkserver"], median.get("torchrun")),
        )

    table = Table(
        "Trivial functions, the call",
        (
            "N",
            "spawn",
            "fork server",
            "torch.multiprocessing.spawn",
            "spawn / torch",
            "warm fork server",
            "N x fork",
            "warm / fork",
        ),
        options.json,
    )
    for count in (4,) if options.quick else (4, 16, 64):
        functions = {
            how: partial(function_seconds, how, count)
            for how in ("spawn", "forkserver", "warm", "fork", *(["torch"] if HAS_TORCH else []))
        }
        # The peer needs a minute at 64: one sample of it is enough.
        median = take_turns(functions, options.repetitions, once=["torch"])
        table.row(
            str(count),
            seconds(median["spawn"]),
            seconds(median["forkserver"]),
            seconds(median.get("torch")),
            ratio(median["spawn"], median.get("torch")),
            seconds(median["warm"]),
            seconds(median["fork"]),
            ratio(median["warm"], median["fork"]),
        )

    if HAS_TORCH:
        table = Table(
            "16 ranks that import torch and all_reduce over gloo",
            ("fork server, torch preloaded", "torchrun", "ratio", "one import of torch"),
            options.json,
        )
        count = 4 if options.quick else 16
        median = take_turns(
            {
                "forkserver": rankwise(
                    count, ALL_REDUCE, "--start-method", "forkserver", "--preload", "torch"
                ),
                "torchrun": torchrun(count, ALL_REDUCE),
                "import": partial(seconds_of, [sys.executable, "-c", "import torch.distributed"]),
            },
            min(options.repetitions, 3),
        )
        table.row(
            seconds(median["forkserver"]),
            seconds(median["torchrun"]),
            ratio(median["forkserver"], median["torchrun"]),
            seconds(median["import"]),
        )


if __name__ == "__main__":
    main()
