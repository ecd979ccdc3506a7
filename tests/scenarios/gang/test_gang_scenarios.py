"""Gangs in short plays: what everybody does, and the journal that comes of it, as a transcript.

A transcript is a text file: commands, a line `----`, and the story of the run. `--rewrite` writes
the story anew, so that a change of behaviour is reviewed as a change of these files.

    gang size=2 grace=30                    fields of GangSpec; times in seconds
    restarts restarts_max=1                 fields of RestartPolicy
    worker 1 raises "loss is NaN" after=3   also: exits 3, dies SIGSEGV, runs; fields of Program
    worker 1 raises "no" exit_takes=0.02    how long the interpreter takes to end after it
    worker 0 attempt=1 exits 0              for that attempt and those after it
    stop SIGINT at=2                        somebody asks for an end
    guardian_lost at=4

Workers of whom nothing is said exit with 0 after 1 s.
"""

import re
import shlex
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import msgspec
import pytest

from rankwise.base.failure import SIGNAL_NAMES
from rankwise.base.units import SECOND, Duration, Instant, duration_from_seconds
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.core.rendezvous.configuration import RestartPolicy
from rankwise.drivers.virtual.gang_simulator import GangSimulator
from rankwise.drivers.virtual.story import story
from rankwise.drivers.virtual.worker_behaviour import (
    Dies,
    Ending,
    Exits,
    Raises,
    RunsForever,
    WorkerProgram,
)
from rankwise.sim.faults.vocabulary import FaultOfCluster, LoseGuardian, Preempt

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))
RULE = "----\n"
SIGNALS = {name: number for number, name in SIGNAL_NAMES.items()}


class Play:
    """What the commands of a transcript say."""

    def __init__(self, commands: str) -> None:
        self.spec = GangSpec(size=1)
        self.policy = RestartPolicy()
        self.faults: tuple[FaultOfCluster, ...] = ()
        self.programs: dict[tuple[int, int], WorkerProgram] = {}
        for line in commands.splitlines():
            if line and not line.startswith("#"):
                self._take(shlex.split(line))

    def story(self) -> str:
        attempts = range(1 + max((attempt for _, attempt in self.programs), default=0))
        lives = [
            [self._program_of(local_rank, attempt) for local_rank in range(self.spec.size)]
            for attempt in attempts
        ]
        world = GangSimulator(faults=self.faults)
        return story(world.run(self.spec, lives, self.policy).journal)

    def _program_of(self, local_rank: int, attempt: int) -> WorkerProgram:
        for known in range(attempt, -1, -1):
            if (local_rank, known) in self.programs:
                return self.programs[local_rank, known]
        return WorkerProgram(after=Duration(SECOND))

    def _take(self, tokens: list[str]) -> None:
        words = [token for token in tokens if "=" not in token]
        options = dict(token.split("=", 1) for token in tokens if "=" in token)
        match words:
            case ["gang"]:
                self.spec = GangSpec(**fields(GangSpec, options))
            case ["restarts"]:
                self.policy = RestartPolicy(**fields(RestartPolicy, options))
            case ["worker", local_rank, *ending]:
                attempt = int(options.pop("attempt", "0"))
                exit_takes = duration_from_seconds(float(options.pop("exit_takes", "0")))
                program = WorkerProgram(
                    ending=ending_of(ending, exit_takes), **fields(WorkerProgram, options)
                )
                self.programs[int(local_rank), attempt] = program
            case ["stop", signal]:
                at = instant(options["at"])
                self.faults += (Preempt(at=at, node=0, signal=SIGNALS[signal]),)
            case ["guardian_lost"]:
                self.faults += (LoseGuardian(at=instant(options["at"])),)
            case _:
                raise AssertionError(f"no such command: {tokens}")


def ending_of(words: list[str], exit_takes: Duration) -> Ending:
    match words:
        case ["exits", code]:
            return Exits(int(code))
        case ["dies", signal]:
            return Dies(SIGNALS[signal])
        case ["raises", message]:
            return Raises(message, exit_takes=exit_takes)
        case ["runs"]:
            return RunsForever()
        case _:
            raise AssertionError(f"no worker ends like this: {words}")


def fields(struct: type[msgspec.Struct], options: dict[str, str]) -> dict[str, Any]:
    """Option texts as values of the struct's fields; durations are given in seconds."""
    types = {field.name: field.type for field in msgspec.structs.fields(struct)}
    return {name: value_of(types[name], text) for name, text in options.items()}


def value_of(kind: Any, text: str) -> Any:
    if text == "never":
        assert NoneType in get_args(kind), "only what is optional can be never"
        return None
    if Duration in (kind, *get_args(kind)):
        return duration_from_seconds(float(text))
    return text if kind is str else int(text)


def instant(text: str) -> Instant:
    return Instant(duration_from_seconds(float(text)))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_a_gang_acts_as_its_transcript_says(path: Path, *, rewrite: bool) -> None:
    commands, _, expected = path.read_text(encoding="utf-8").partition(RULE)

    told = Play(commands).story()

    if rewrite:
        path.write_text(f"{commands}{RULE}{told}", encoding="utf-8")
        expected = told
    assert told == expected


def test_every_transcript_says_what_it_shows() -> None:
    for path in TRANSCRIPTS:
        assert re.match(r"# .+\n", path.read_text(encoding="utf-8")), path.name
