"""What rankwise says on stderr while a run goes on: one line each, and nothing else."""

from collections.abc import Mapping, Sequence

from rankwise.base.failure import SIGNAL_NAMES, Failure, Stood, signal_name
from rankwise.base.units import Duration, format_duration
from rankwise.base.wording import counted, ranks_in_words
from rankwise.core.agent.vocabulary import AnnounceRestart
from rankwise.core.gang.vocabulary import AnnounceKill, AnnounceStuck
from rankwise.launch.telling.failure_report.composing import blocks_of_ranks, lines_of_standing
from rankwise.launch.telling.failure_report.rendering import lines_of_blocks
from rankwise.launch.telling.failure_report.sentences import one_line
from rankwise.launch.telling.failure_report.stacks import fatal_lines
from rankwise.launch.telling.failure_report.text import printable

_OUR_PROGRAMS = "rankwise/drivers/real/"
LEFT_BEHIND_SHOWN = 3
"""How many processes a line names."""


def restart_line(
    announcement: AnnounceRestart, failures: tuple[Failure, ...], restarts_max: int
) -> str:
    """Say which rank failed and that all start again, now or after a pause."""
    restart = restarts_max - announcement.restarts_left
    when = f" in {format_duration(announcement.pause)}" if announcement.pause else ""
    return (
        f"{one_line(failures[0])}; {_what_follows(announcement.kept)}{when} "
        f"(restart {restart} of {restarts_max})"
    )


def _what_follows(kept: int) -> str:
    if not kept:
        return "restarting all ranks"
    return f"calling {counted(kept)} again and restarting the rest"


def details_of(failures: Sequence[Failure]) -> str:
    """What failures that are not the last ones have to tell: no report will tell it later."""
    failure = failures[0]
    if lines := lines_of_standing(failures):
        return "\n".join(["where they stood:", *lines])
    if failure.stacks:
        return stacks_of_rank(failure.rank, failure.stacks)
    if failure.error is not None and failure.log_paths:
        return f"the whole traceback of rank {failure.rank} is in {failure.log_paths[-1]}"
    return ""


def kill_line(announcement: AnnounceKill, first_rank: int, grace: str) -> str:
    """Say which ranks are killed: they did not end in time, or the user would not wait."""
    ranks = announcement.local_ranks
    who = ranks_in_words(first_rank + each for each in ranks)
    if announcement.asked_again:
        return f"{who} {'is' if len(ranks) == 1 else 'are'} killed immediately"
    return f"{who} did not end within {grace}: killed"


def stuck_line(announcement: AnnounceStuck, first_rank: int) -> str:
    """Say which ranks are killed because they could not be interrupted."""
    who = ranks_in_words(first_rank + each for each in announcement.local_ranks)
    return f"{who} did not leave the function of recover in time: killed, and started again"


def left_behind_line(
    left: Mapping[int, str], *, are_kept: bool = False, may_be_kept: bool = True
) -> str:
    """Say that ranks have ended well and left processes running, and what became of these."""
    named = [f"{_process_in_words(words)} (pid {pid})" for pid, words in left.items()]
    more = f" and {len(named) - LEFT_BEHIND_SHOWN} more" if len(named) > LEFT_BEHIND_SHOWN else ""
    what = "a process that a rank" if len(named) == 1 else f"{len(named)} processes that ranks"
    fate = "was killed" if len(named) == 1 else "were killed"
    advice = "let the rank wait for work that must finish"
    if may_be_kept:
        advice += ", or give --keep-children"
    if are_kept:
        fate = "lives on" if len(named) == 1 else "live on"
        advice = "their output is discarded from now on"
    return f"{what} had left running {fate}: {', '.join(named[:LEFT_BEHIND_SHOWN])}{more}; {advice}"


def _process_in_words(words: str) -> str:
    """A command line; that of a process that a rank has forked is the rank's own, and ours."""
    if "from multiprocessing." in words:
        return "a process of multiprocessing"
    return "a fork of a rank" if _OUR_PROGRAMS in words else printable(words, 80)


def stopping_line(signum: int, ranks_left: int, rest: Duration) -> str:
    """Say that ranks which were told to stop have not ended yet, and how to wait no longer."""
    name = SIGNAL_NAMES.get(signum, f"signal {signum}")
    who, patience = counted(ranks_left), format_duration(rest)
    return f"stopping {who} ({name}) for up to {patience}; a second signal kills them now"


def as_sigterm_line(signum: int, *, begins: bool = True) -> str:
    """Say that a signal of which the user has said nothing stops the run, or finds it stopping."""
    if not begins:
        return f"{signal_name(signum)}: the run is already stopping"
    return f"{signal_name(signum)}: the run is stopped as by SIGTERM"


def passed_on_line(signum: int, reached: Sequence[int], others: Sequence[int]) -> str:
    """Say which ranks were sent a signal that rankwise itself outlives."""
    name = signal_name(signum)
    if not reached:
        return f"{name}: not passed on, since no rank catches it"
    line = f"{name}: passed on to {ranks_in_words(reached)}"
    if not others:
        return line
    verb = "does" if len(others) == 1 else "do"
    return f"{line}; {ranks_in_words(others)} {verb} not catch it"


def suspension_line(lease: Duration) -> str:
    """Say what follows when an agent among others stops with its ranks."""
    return (
        "stopping this node's ranks with their agent (Ctrl-Z): after "
        f"{format_duration(lease)} the other nodes treat it as lost, and continue or restart"
    )


def time_limit_line(timeout: Duration, grace: Duration) -> str:
    """Say that the run has taken as long as it may, and what follows."""
    return (
        f"the time limit of {format_duration(timeout)} is over: stopping all ranks for up to "
        f"{format_duration(grace)}"
    )


def hang_line(hang_timeout: Duration | None, stood: Sequence[Stood], *, has_report: bool) -> str:
    """Say that the gang has hung, and what follows.

    Args:
        hang_timeout: the time without progress.
        stood: where the ranks of this node stand.
        has_report: whether that will be told later; on several nodes the root cause may be
            elsewhere.
    """
    silence = "" if hang_timeout is None else f" for {format_duration(hang_timeout)}"
    lines: list[str] = []
    if not any(each.stacks for each in stood):
        follows = "all ranks are stopped; no Python stacks are available"
    elif has_report:
        follows = "all ranks are stopped; a report with their stacks follows"
    else:
        follows = "all ranks are stopped; their stacks:"
        lines = lines_of_blocks(blocks_of_ranks(stood))
    return "\n".join([f"no rank has made progress{silence}: {follows}", *lines])


def hang_warning(still: Duration, hang_timeout: Duration, verdict: str) -> str:
    """Say that half of the hang timeout is over, and what is known by then."""
    rest = max(Duration(hang_timeout - still), Duration(0))
    why = f" ({verdict})" if verdict else ""
    return (
        f"no rank has made progress for {format_duration(still)}{why}; the hang timeout ends the "
        f"run in {format_duration(rest)}"
    )


def stacks_of_rank(rank: int, text: str) -> str:
    """The Python stacks of a hanging rank, as several lines."""
    lines = "\n".join(f"  {line}" for line in fatal_lines(text))
    return f"rank {rank}:\n{lines}"
