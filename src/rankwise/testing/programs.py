"""What workers of test gangs do, as values: for simulated processes and for real ones.

A simulated world takes a `WorkerProgram` as it is. A real one runs `WORKER_SCRIPT` in every worker,
with `script_arguments(lives)`: the script finds its rank and attempt in its environment, and acts
out the program that is meant for it. Fields which only a simulation can arrange are refused.
"""

from pathlib import Path

import msgspec

from rankwise.drivers.virtual.worker_behaviour import (
    Dies,
    Ending,
    Exits,
    Lives,
    Raises,
    RunsForever,
    WorkerProgram,
    program_of,
)

__all__ = [
    "WORKER_SCRIPT",
    "Dies",
    "Ending",
    "Exits",
    "Lives",
    "Raises",
    "RunsForever",
    "WorkerProgram",
    "program_of",
    "script_arguments",
]

WORKER_SCRIPT = Path(__file__).with_name("worker_script.py")
"""The script that acts out a program in a real process; needs Python's standard library only."""


def script_arguments(lives: Lives) -> tuple[str, ...]:
    """The command line with which `WORKER_SCRIPT` knows what to do in each rank and attempt.

    Raises:
        ValueError: a program asks for what no real process can do.
    """
    for attempt, life in enumerate(lives):
        for local_rank, program in enumerate(life):
            if not program.is_realizable:
                raise ValueError(
                    f"the program of worker {local_rank} in attempt {attempt} can only be "
                    f"simulated: {program}"
                )
    # With all defaults, which the script does not know.
    programs = [[msgspec.structs.asdict(program) for program in life] for life in lives]
    return (msgspec.json.encode(programs).decode(),)
