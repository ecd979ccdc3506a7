"""An agent's journal as a story of its workers: one line per fact or order, alike ones gathered.

`<` is what the agent was told, `>` what it ordered; instants count from the journal's first line.
The agent's exchanges with its node and with the others are left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from rankwise.base.failure import SIGNAL_NAMES, Failure, FailureCause, Outcome
from rankwise.base.machine import Ticked
from rankwise.base.units import SECOND, Instant, format_duration
from rankwise.core.agent.vocabulary import (
    AgentStarted,
    AnnounceRestart,
    Effect,
    FinishRun,
    Stimulus,
)
from rankwise.core.gang.vocabulary import (
    AnnounceKill,
    DumpsLooked,
    DumpStacks,
    GuardianLost,
    LookForDumps,
    LookForProgress,
    ProgressLooked,
    RanksBlamed,
    SignalWorker,
    SpawnWorker,
    StacksDumped,
    StopRequested,
    Suspended,
    Sweep,
    Swept,
    WorkerExited,
    WorkerRefused,
    WorkerReported,
    WorkerSpawned,
)
from rankwise.core.watch.vocabulary import NoteHold
from rankwise.core.watch.wording import hold_in_words

ShownLine = tuple[str, int | None, str]
"""A line in parts: before the worker's rank, the rank if there is one, after it."""


class StoryLine(msgspec.Struct, frozen=True):
    """One line of an agent's journal; either `stimulus` or `effect` is there."""

    at: Instant
    machine: str
    stimulus: Stimulus | None = None
    effect: Effect | None = None


def read_journal(journal: bytes) -> list[StoryLine]:
    """The entries of an agent's journal, as JSON lines or a file's content."""
    decode = msgspec.json.Decoder(StoryLine).decode
    return [decode(line) for line in journal.splitlines() if line]


def story(journal: bytes) -> str:
    """The journal's entries in words, a line each."""
    entries = read_journal(journal)
    return "".join(f"{line}\n" for line in _lines(entries))


def _lines(entries: list[StoryLine]) -> Iterator[str]:
    begun_at = entries[0].at if entries else 0
    lines = ((entry.at, *told) for entry in entries if (told := _tell(entry)) is not None)
    for (at, before, after), alike in groupby(lines, key=lambda line: (line[0], line[1], line[3])):
        stamp = f"{(at - begun_at) / SECOND:12.6f} s"
        ranks = [rank for _, _, rank, _ in alike if rank is not None]
        yield f"{stamp}  {before}{_ranks(ranks)}{after}"


def _tell(entry: StoryLine) -> ShownLine | None:
    if entry.stimulus is not None:
        told, mark = _tell_stimulus(entry.stimulus, entry.at), "<"
    else:
        assert entry.effect is not None, "a journal's line has a stimulus or an effect"
        told, mark = _tell_effect(entry.effect), ">"
    return told and (f"{mark} {told[0]}", told[1], told[2])


def _tell_stimulus(stimulus: Stimulus, now: Instant) -> ShownLine | None:
    match stimulus:
        case AgentStarted():
            return "started", None, ""
        case WorkerSpawned(rank, attempt):
            return "", rank, f" spawned, attempt {attempt}"
        case WorkerRefused(rank, _, reason):
            return "", rank, f" refused: {reason}"
        case WorkerReported(rank, _, error):
            return "", rank, f" reported {error.type}: {error.message}"
        case WorkerExited(rank, _, status):
            return "", rank, f" exited: {status}"
        case Swept(attempt, survivors):
            left = f"; SIGKILL does not end pids {_join(survivors)}" if survivors else ""
            return f"swept, attempt {attempt}{left}", None, ""
        case StopRequested(signal):
            by = "the program" if signal is None else SIGNAL_NAMES.get(signal, f"signal {signal}")
            return f"stop requested by {by}", None, ""
        case ProgressLooked(_, last_progress):
            return f"last progress {(now - last_progress) / SECOND:.6f} s ago", None, ""
        case RanksBlamed(ranks, _, reason):
            return "", ranks[0], f" blamed: {reason}"
        case DumpsLooked(_, dumping):
            return f"cores written of workers: {_join(dumping) or 'none'}", None, ""
        case StacksDumped():
            return "stacks dumped", None, ""
        case Suspended(duration):
            return f"was suspended for {format_duration(duration)}", None, ""
        case GuardianLost(reason):
            return f"guardian lost: {reason}", None, ""
        case Ticked():
            return "a deadline has come", None, ""
        case _:
            return None


def _tell_effect(effect: Effect) -> ShownLine | None:
    match effect:
        case SpawnWorker(rank, attempt):
            return "spawn ", rank, f", attempt {attempt}"
        case SignalWorker(rank, _, signal):
            return f"send {SIGNAL_NAMES.get(signal, f'signal {signal}')} to ", rank, ""
        case LookForProgress():
            return "look for progress", None, ""
        case LookForDumps():
            return "look for cores that are written", None, ""
        case DumpStacks():
            return "dump stacks", None, ""
        case Sweep(attempt):
            return f"sweep, attempt {attempt}", None, ""
        case AnnounceRestart(_, left, pause, failures):
            wait = f"after {format_duration(pause)}" if pause else "at once"
            return f"announce restart {wait}, {left} left; {_failures(failures)}", None, ""
        case AnnounceKill():
            return f"announce the kill of {_ranks(list(effect.local_ranks))}", None, ""
        case NoteHold():
            return f"note: {hold_in_words(effect, 0)}", None, ""
        case FinishRun():
            return f"finish: {_outcome(effect.as_outcome())}", None, ""
        case _:
            return None


def _outcome(outcome: Outcome) -> str:
    parts = [f"{outcome.status}, attempts {outcome.attempts}"]
    if outcome.failures:
        parts.append(_failures(outcome.failures))
    if outcome.survivors:
        parts.append(f"pids {_join(outcome.survivors)} live on")
    if outcome.detail:
        parts.append(outcome.detail)
    return "; ".join(parts)


def _failures(failures: Sequence[Failure]) -> str:
    explaining = [failure for failure in failures if failure.cause is not FailureCause.STOPPED]
    told = [_failure(failure) for failure in explaining]
    if told:
        told[0] = f"root cause {told[0]}"
    stopped = {failure.local_rank for failure in failures} - {f.local_rank for f in explaining}
    if stopped:
        told.append(f"{_ranks(sorted(stopped))} stopped")
    return "; then ".join([told[0], ", ".join(told[1:])] if told[1:] else told)


def _failure(failure: Failure) -> str:
    what = str(failure.cause)
    if failure.error is not None:
        what += f" {failure.error.type}"
    elif failure.detail:
        what += f" ({failure.detail})"
    elif failure.exit is not None:
        what += f" with {failure.exit}"
    return f"worker {failure.local_rank} {what}"


def _ranks(ranks: list[int]) -> str:
    """`worker 3`, `workers 0-63`, `workers 1, 4`; nothing for none."""
    if not ranks:
        return ""
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"workers {ranks[0]}-{ranks[-1]}"
    return f"workers {_join(ranks)}"


def _join(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in numbers)
