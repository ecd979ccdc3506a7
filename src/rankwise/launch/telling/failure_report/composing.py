"""From an outcome to a report: what to tell, in which order, and what to fold.

The order is that of the reader's eye, which falls on the end of the screen: first the summary and
whatever else failed, one line each, and last the root cause in full. Failures that tell the same
story as the root cause are one line with their ranks; those that differ get a line each up to a
bound; workers that only were told to stop are folded.
"""

import datetime as dt
from collections.abc import Iterable, Sequence

from rankwise.base.failure import (
    NO_RANK,
    TIME_LIMIT_SIGNAL,
    EarlierAttempt,
    Failure,
    FailureCause,
    Outcome,
    OutcomeStatus,
    Stood,
    signal_name,
)
from rankwise.base.units import MICROSECOND, Duration, format_duration
from rankwise.base.wording import BY_SIGNAL, ranks_in_words
from rankwise.launch.telling.failure_report.hints import hint_for, is_peer_gone
from rankwise.launch.telling.failure_report.model import (
    Block,
    FailureReport,
    Field,
    ReportContext,
    RootCause,
)
from rankwise.launch.telling.failure_report.rendering import lines_of_blocks
from rankwise.launch.telling.failure_report.sentences import (
    describe_signal,
    exit_in_words,
    headline,
    rank_of,
)
from rankwise.launch.telling.failure_report.stacks import (
    fatal_lines,
    frames_of_rank,
    innermost_frames,
    place_in_program,
)
from rankwise.launch.telling.failure_report.text import (
    as_on_terminal,
    first_line,
    printable,
    printable_lines,
)
from rankwise.launch.telling.failure_report.tracebacks import (
    stack_of,
    traceback_lines,
    what_is_the_same,
    without_traceback,
)

OTHERS_SHOWN_MAX = 8
EARLIER_SHOWN_MAX = 8
STDERR_LINES_MAX = 20
STDOUT_LINES_MAX = 5

_SIGTERM, _SIGKILL = 15, 9
_PATH_LENGTH_MAX = 4_096
_PIDS_SHOWN_MAX = 16
_ROLES_UNNAMED = ("default", "rank")
"""What roles are called unless they are named: by `rankwise run`, and by `rankwise.run`."""
_OF_NO_COUNT = (FailureCause.HUNG, FailureCause.OUT_OF_STEP, FailureCause.STORE_LOST)
"""Causes of which it tells nothing how many ranks have failed."""
_SHARED_CAUSES = (FailureCause.HUNG, FailureCause.GUARDIAN_LOST)
"""Causes that strike the gang as a whole."""


def compose_report(outcome: Outcome, context: ReportContext) -> FailureReport:
    """Say what became of a gang. Meant for failures, and right for any outcome."""
    failures = outcome.failures
    root = failures[0] if failures and outcome.status is OutcomeStatus.FAILED else None
    others = failures if root is None else failures[1:]
    stopped = [failure for failure in others if failure.cause is FailureCause.STOPPED]
    together, apart = ([], [*others]) if root is None else _blamed_together(root, others)
    failed = [failure for failure in apart if failure.cause is not FailureCause.STOPPED]
    return FailureReport(
        summary=_summary(outcome, context),
        notes=(
            *_notes_on_earlier(outcome, context.timezone),
            *_notes_on_failed(root, failed),
            *_notes_on_stopped(stopped, _signal_of_ranks(outcome)),
            *_notes_on_end(outcome),
        ),
        root_cause=None if root is None else _root_cause(root, together, outcome, context),
    )


def _summary(outcome: Outcome, context: ReportContext) -> str:
    match outcome.status:
        case OutcomeStatus.SUCCEEDED:
            verb = "succeeded"
        case OutcomeStatus.STOPPED if outcome.stop_signal is not None:
            verb = f"was stopped by {describe_signal(outcome.stop_signal)}"
        case OutcomeStatus.STOPPED:
            verb = "was stopped"
        case OutcomeStatus.FAILED:
            verb = "failed"
    text = f"{printable(context.program)} {verb}"
    if context.duration is not None:
        text += f" after {format_duration(context.duration)}"
        text += " of virtual time" if context.is_simulated else ""
    failed = sum(failure.cause is not FailureCause.STOPPED for failure in outcome.failures)
    causes = {failure.cause for failure in outcome.failures[:1]}
    if outcome.status is OutcomeStatus.FAILED and failed and causes.isdisjoint(_OF_NO_COUNT):
        count, size = outcome.failed or failed, outcome.size or context.nprocs
        text += f": {count} of {size} ranks failed"
    elif FailureCause.STORE_LOST in causes:
        text += ": the store was lost"
    if outcome.attempts > 1:
        text += f" in {_last_attempt_in_words(outcome, context)}"
    return f"{text} (run {printable(context.run_id)})" if context.run_id else text


def _restart_in_words(outcome: Outcome, context: ReportContext) -> str:
    """Among several nodes: how many restarts are used. Rounds that others end cost none."""
    spent = outcome.attempts - 1
    return f"restart {spent} of {max(context.attempts_max - 1, spent)}"


def _last_attempt_in_words(outcome: Outcome, context: ReportContext) -> str:
    if outcome.size is None:
        return f"attempt {outcome.attempts} of {max(context.attempts_max, outcome.attempts)}"
    restart = _restart_in_words(outcome, context)
    return f"round {outcome.failures[0].attempt}, {restart}" if outcome.failures else restart


def _notes_on_earlier(outcome: Outcome, timezone: dt.tzinfo | None) -> list[str]:
    """Why each attempt before the last one ended: those that ended alike in a row together."""
    groups: list[list[EarlierAttempt]] = []
    for attempt in outcome.earlier:
        if groups and groups[-1][0].why == attempt.why:
            groups[-1].append(attempt)
        else:
            groups.append([attempt])
    hidden = len(groups) - EARLIER_SHOWN_MAX
    # Rounds are called by the numbers that lines have told, and attempts counted by people.
    what, first_number = ("attempt", 1) if outcome.size is None else ("round", 0)
    notes = []
    for group in groups[max(hidden, 0) :]:
        numbers = [first_number + attempt.number for attempt in group]
        notes.append(f"{_with_numbers(what, numbers)}, {_note_on_alike(group, timezone)}")
    if hidden > 0:
        count = sum(map(len, groups[:hidden]))
        notes.insert(0, f"{count} earlier {what}s are in the journal, if there is one")
    return notes


def _with_numbers(what: str, numbers: Sequence[int]) -> str:
    return f"{what} {numbers[0]}" if len(numbers) == 1 else f"{what}s {numbers[0]}-{numbers[-1]}"


def _note_on_alike(group: Sequence[EarlierAttempt], timezone: dt.tzinfo | None) -> str:
    first, last = group[0], group[-1]
    since, until = (_moment(attempt.wall_ns, timezone)[:19] for attempt in (first, last))
    if since[:10] == until[:10]:
        until = until[11:]  # the date is the same
    span = since if first is last else f"{since} to {until}"
    return f"ended {span}: {printable(first.why)}"


def _notes_on_failed(root: Failure | None, failed: Sequence[Failure]) -> list[str]:
    """One line for those like the root cause, then the others, alike ones together."""
    alike: dict[object, list[Failure]] = {}
    for failure in failed:
        alike.setdefault(what_is_the_same(failure), []).append(failure)
    notes: list[str] = []
    if root is not None and alike and (same := alike.pop(what_is_the_same(root), [])):
        notes.append(_note_on_same(root, same))
    groups = list(alike.values())
    notes += [_note_on_other(root, group) for group in groups[:OTHERS_SHOWN_MAX]]
    unshown = [rank_of(failure) for group in groups[OTHERS_SHOWN_MAX:] for failure in group]
    if unshown:
        notes.append(f"and {len(unshown)} more: {ranks_in_words(unshown)}")
    return notes


def _blamed_together(
    root: Failure, others: Iterable[Failure]
) -> tuple[list[Failure], list[Failure]]:
    """The root cause with those for which its box speaks too; and the others."""
    together: list[Failure] = [root]
    apart: list[Failure] = []
    is_shared = root.cause in _SHARED_CAUSES
    for each in others:
        is_in = each.cause is root.cause if is_shared else each.is_as_much_to_blame_as(root)
        (together if is_in else apart).append(each)
    return together, apart


def _note_on_same(root: Failure, same: Sequence[Failure]) -> str:
    ranks = ranks_in_words(map(rank_of, same))
    if root.error is not None and root.error.traceback:
        return f"same traceback on {ranks}"
    return f"the same happened to {ranks}"


def _note_on_other(root: Failure | None, group: Sequence[Failure]) -> str:
    first = group[0]
    text = headline(first)
    if root is not None:
        text = f"{_distance(root, first)}{text}"
        if root.cause in (FailureCause.OUT_OF_STEP, FailureCause.STORE_LOST):
            text += " (a consequence)"
        elif is_peer_gone(first):
            text += " (a consequence: its peer was gone)"
    if len(group) > 1:
        text += f"; the same on {ranks_in_words(map(rank_of, group[1:]))}"
    return text


def _distance(root: Failure, other: Failure) -> str:
    """How long after the root cause, or before it: the root cause need not be the earliest.

    At one instant of virtual time, nanoseconds are there for the order, and tell people nothing.
    """
    nanoseconds = other.at - root.at
    if abs(nanoseconds) < MICROSECOND:
        return ""
    text = format_duration(Duration(abs(nanoseconds)))
    return f"{text} {'after' if nanoseconds > 0 else 'before'} the root cause, "


def _signal_of_ranks(outcome: Outcome) -> int:
    """The signal that asked ranks to stop."""
    asked_by = outcome.stop_signal
    return _SIGTERM if asked_by in (None, TIME_LIMIT_SIGNAL) else asked_by


def _notes_on_stopped(stopped: Iterable[Failure], stop_signal: int) -> list[str]:
    obedient: list[int] = []
    killed: dict[str, list[int]] = {}
    killed_by_others: list[int] = []
    suspended: list[int] = []
    for failure in stopped:
        if failure.was_stopped:
            suspended.append(rank_of(failure))
        is_of_kill = failure.exit is not None and failure.exit.signal_number == _SIGKILL
        # A rank that uses `should_stop` is sent SIGKILL at once: it would not end by SIGTERM.
        if not is_of_kill or (failure.ended_by_us and not failure.detail):
            obedient.append(rank_of(failure))
        elif failure.ended_by_us:
            # Ranks that ended alike share a line: they take the place of the sentence's subject.
            killed.setdefault(failure.detail.removeprefix("it "), []).append(rank_of(failure))
        else:
            killed_by_others.append(rank_of(failure))
    told = f"after the request to stop ({signal_name(stop_signal)})"
    notes: list[str] = []
    if suspended:
        verb = "was" if len(suspended) == 1 else "were"
        notes.append(f"{ranks_in_words(suspended)} {verb} {BY_SIGNAL} until then")
    if obedient:
        notes.append(f"{ranks_in_words(obedient)} ended {told}")
    for how, ranks in killed.items():
        notes.append(f"{ranks_in_words(ranks)} {how}: killed (SIGKILL)")
    if killed_by_others:
        whose = "by a SIGKILL that rankwise did not send"
        notes.append(f"{ranks_in_words(killed_by_others)} ended {told}, {whose}")
    return notes


def _notes_on_end(outcome: Outcome) -> list[str]:
    notes = [printable(outcome.detail)] if outcome.detail else []
    if outcome.survivors:
        pids = ", ".join(map(str, outcome.survivors[:_PIDS_SHOWN_MAX]))
        more = ", ..." if len(outcome.survivors) > _PIDS_SHOWN_MAX else ""
        notes.append(f"these processes survive SIGKILL: {pids}{more}")
    return [*notes, outcome.lateness] if outcome.lateness else notes


def _root_cause(
    root: Failure, together: Sequence[Failure], outcome: Outcome, context: ReportContext
) -> RootCause:
    """The root cause in full, with all that its box speaks for."""
    failures = outcome.failures
    hint = hint_for(root)
    if root.cause is FailureCause.HUNG:
        hung = [failure for failure in failures if failure.cause is FailureCause.HUNG]
        blocks = blocks_of_standing(hung)
        is_known = any(failure.waits_for for failure in hung)
        if not is_known and sum(bool(block.lines) for block in blocks) > 1:
            hint = "the others may be waiting for the rank that is elsewhere"
    elif root.is_shared:
        blocks = blocks_of_standing(together)
    else:
        # On several nodes, another one may have printed it.
        seen = context.stderr_shown if outcome.size is None else ()
        blocks = _blocks_of(root, is_seen=root.local_rank in seen)
        if (ended := _ended_well(outcome, context)) and is_peer_gone(root):
            who = ranks_in_words(ended)
            hint = f"{who} ended with exit code 0: look for a missing collective there"
    return RootCause(
        headline=headline(root),
        fields=tuple(_fields(root, together, outcome, context)),
        blocks=(*_block_of_detail(root), *_blocks_of_threads(together), *blocks),
        hint=hint,
    )


def _block_of_detail(root: Failure) -> list[Block]:
    """What the headline leaves out: of simulated ranks all that waits on their machine."""
    more = printable_lines(root.detail)[1:]
    has_own_block = root.cause in (FailureCause.HUNG, FailureCause.OUT_OF_STEP)
    return [Block("what else waits", tuple(more))] if more and has_own_block else []


def _ended_well(outcome: Outcome, context: ReportContext) -> list[int]:
    """The ranks that did not fail; none on several nodes, where not all failures are here."""
    if outcome.size is not None:
        return []
    failed = {rank_of(failure) for failure in outcome.failures}
    return [rank for rank in range(context.nprocs) if rank not in failed]


def _fields(
    root: Failure, known: Sequence[Failure], outcome: Outcome, context: ReportContext
) -> list[Field]:
    """What is known of the root cause, or of all that its box speaks for."""
    failures = outcome.failures
    together = root.accused if root.is_shared else [*map(rank_of, known)]
    is_shared = len(together) > 1
    fields: list[Field] = []

    def add(name: str, *values: str) -> None:
        shown = tuple(printable(value, _PATH_LENGTH_MAX) for value in values if value.strip())
        if shown:
            fields.append(Field(name, shown))

    if is_shared:
        hosts = ", ".join(dict.fromkeys(each.host for each in known))
        # Of ranks that are accused together, some may be on nodes that have told nothing.
        whose = "" if len(known) == len(together) else f" ({ranks_in_words(map(rank_of, known))})"
        add("ranks", ranks_in_words(together).removeprefix("ranks "))
        add("host", f"{hosts}{whose}")
    elif root.local_rank == NO_RANK:
        add("noticed on", root.host)
    else:
        rank = rank_of(root)
        is_local_shown = root.local_rank != rank
        add("rank", f"{rank} (local rank {root.local_rank})" if is_local_shown else f"{rank}")
        add("host", root.host)
        add("pid", "" if root.pid is None else str(root.pid))
        add("role", "" if root.role in _ROLES_UNNAMED else root.role)
        # A hung worker was ended by us, so how it ended tells nothing.
        is_of_use = root.cause is not FailureCause.HUNG and not (
            root.cause is FailureCause.OUT_OF_STEP and root.ended_by_us
        )
        if root.exit is not None and is_of_use:
            # A worker that raised may have been ended by us too, and then the detail says why.
            was_asked = "it was asked to stop" if root.ended_by_us else ""
            why = root.detail or was_asked if root.cause is FailureCause.RAISED else ""
            add("ended", f"{exit_in_words(root.exit)}{f': {first_line(why)}' if why else ''}")
    add("time", _time_of_day(root, context.timezone))
    if context.attempts_max > 1:
        count = f"{root.attempt + 1} of {max(context.attempts_max, root.attempt + 1)}"
        if outcome.size is not None:
            count = f"{root.attempt}, {_restart_in_words(outcome, context)}"
        folder = f" (attempt_{root.attempt} in paths)" if context.log_directory else ""
        add("attempt" if outcome.size is None else "round", count + folder)
    if root.error is not None and "CUDA out of memory" in root.error.message:
        from rankwise.launch.telling.failure_report.gpu_errors import memory_lines  # noqa: PLC0415  # rare

        ranks = {each.pid: rank_of(each) for each in failures if each.pid is not None}
        add("gpu memory", *memory_lines(root.error, ranks))
    add("gpu", *root.gpus)
    # Of several ranks together no file is the one to look at first.
    if not is_shared:
        add("logs", *(root.log_paths or (context.log_directory,)))
        add("error file", root.error_file)
    else:
        add("logs", context.log_directory)
    return fields


def _time_of_day(failure: Failure, timezone: dt.tzinfo | None) -> str:
    """`2026-11-21 03:14:15.926 +01:00`: what the user's clock showed, unambiguous elsewhere."""
    wall_ns = failure.wall_ns or (failure.error.wall_ns if failure.error is not None else 0)
    return _moment(wall_ns, timezone) if wall_ns else ""


def _moment(wall_ns: int, timezone: dt.tzinfo | None) -> str:
    seconds, nanoseconds = divmod(wall_ns, 1_000_000_000)
    try:
        utc = dt.datetime.fromtimestamp(seconds, tz=dt.UTC)
        moment = utc.astimezone(timezone)
    except (OverflowError, ValueError, OSError):
        # The figure came from a file that the program wrote: it may be no moment at all.
        return ""
    offset = moment.isoformat()[19:]
    return f"{moment:%Y-%m-%d %H:%M:%S}.{nanoseconds // 1_000_000:03d} {offset}"


def _blocks_of_threads(failures: Iterable[Failure]) -> list[Block]:
    """What threads beside the main one have raised, alike ones together."""
    ranks: dict[str, list[int]] = {}
    for each in failures:
        if each.thread_error:
            ranks.setdefault(each.thread_error, []).append(rank_of(each))
    blocks = []
    for error, raisers in ranks.items():
        title, *lines = traceback_lines(error)
        of_whom = f" of {ranks_in_words(raisers)}"
        blocks.append(Block(title.removesuffix(":").lower() + of_whom, tuple(lines)))
    return blocks


def _blocks_of(root: Failure, *, is_seen: bool) -> list[Block]:
    """What the worker said, in the order in which it did: last of all what it died of."""
    traceback = root.error.traceback if root.error is not None else ""
    printed = [as_on_terminal(line) for line in root.stderr_tail]
    rest = without_traceback(printed, traceback)
    blocks = [
        *_block_of_stream("stdout", root.stdout_tail, STDOUT_LINES_MAX),
        *_block_of_stream("stderr", without_traceback(rest, root.thread_error), STDERR_LINES_MAX),
    ]
    if root.stacks and root.cause is FailureCause.OUT_OF_STEP:
        if place_in_program(root.stacks) and not traceback:
            blocks.append(
                Block(
                    "where it is, innermost call first",
                    (*_lines_of_wait(root), *innermost_frames(root.stacks)),
                )
            )
    elif root.stacks:
        blocks.append(Block("stacks of all threads", tuple(fatal_lines(root.stacks))))
    if traceback:
        whole_is_in = root.error_file or next(iter(root.log_paths), "")
        whole_is_in = printable(whole_is_in, _PATH_LENGTH_MAX)
        is_shown = is_seen and rest != printed
        lines = traceback_lines(traceback, whole_is_in, is_shown_above=is_shown)
        blocks.append(Block("traceback", tuple(lines)))
    return blocks


def _block_of_stream(name: str, tail: Sequence[str], lines_max: int) -> list[Block]:
    lines = [as_on_terminal(line) for line in tail]
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        return []
    shown = lines[-lines_max:]
    count = f"last {len(shown)} lines" if len(shown) > 1 else "last line"
    return [Block(f"{count} of {name}", tuple(shown))]


def _lines_of_wait(rank: Failure | Stood) -> list[str]:
    if not rank.waits_for:
        return []
    return [f"  {line}" for line in printable_lines(f"waits for {rank.waits_for}")]


def lines_of_standing(failures: Sequence[Failure]) -> list[str]:
    """Where the ranks of the root cause stood that have hung, or are out of step."""
    root = failures[0]
    if root.cause not in (FailureCause.HUNG, FailureCause.OUT_OF_STEP):
        return []
    return lines_of_blocks(blocks_of_standing(_blamed_together(root, failures[1:])[0]))


def blocks_of_standing(failures: Iterable[Failure]) -> list[Block]:
    """Where each of these ranks stands."""
    return blocks_of_ranks(
        Stood(rank=rank_of(each), waits_for=each.waits_for, stacks=_stacks_of(each))
        for each in failures
    )


def _stacks_of(failure: Failure) -> str:
    """Where a rank stands; one that has left its program by an exception, where it raised that."""
    if failure.error is None or place_in_program(failure.stacks):
        return failure.stacks
    return stack_of(failure.error.traceback)


def blocks_of_ranks(ranks: Iterable[Stood]) -> list[Block]:
    """Where every rank stands: ranks at the same place together, the fewest last."""
    places: dict[tuple[str, ...], list[int]] = {}
    for each in ranks:
        lines = (*_lines_of_wait(each), *frames_of_rank(each.stacks))
        places.setdefault(lines, []).append(each.rank)
    if not any(places):
        return []
    unknown = places.pop((), [])
    blocks = [Block(f"no stack is available of {ranks_in_words(unknown)}", ())] if unknown else []
    ordered = sorted(places.items(), key=lambda place: (-len(place[1]), min(place[1])))
    return blocks + [
        Block(f"{ranks_in_words(ranks)}, innermost call first", frames) for frames, ranks in ordered
    ]
