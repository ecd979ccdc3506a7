"""`rankwise.section`: parts of a program that tell how long they usually take, and end when stuck.

Runs inside workers. A section that takes much longer than it ever did is stuck: a peer is gone, a
file system hangs. faulthandler's own watchdog thread then writes the stacks of all threads to
stderr and ends the process; it needs neither the interpreter's lock nor this module, so that it
works when the program is stuck in foreign code. The rank fails, and its agent does what it does
after every failure.

It is one watchdog per process: a program that calls `faulthandler.dump_traceback_later` itself
must not use sections.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from rankwise.base.errors import ConfigError
from rankwise.base.units import SECOND, parse_duration
from rankwise.drivers.real.segments import (
    LEDGER_SECTION_RUNS,
    LEDGER_SECTION_STUCK,
    LEDGER_SECTION_TIME,
    LEDGER_SECTIONS,
    LEDGER_WORDS,
    SEGMENT_VARIABLE,
    Segment,
)

if TYPE_CHECKING:
    from rankwise.drivers.real.section_ring import SectionWriter

LEARNING_RUNS = 3
"""How often a section runs before its limit is learned: the first ones compile and connect."""
FACTOR = 10.0
LEAST_S = 30.0
LINGER_S = 1.0
"""How long the thread that tells waits for a next section, so that not each one starts a thread."""
_LIMIT_MAX_S = 1e9
"""30 years: `faulthandler` refuses what its clock cannot count, 292 years."""
HEAD_START_S = 3.0
"""How long before the watchdog bites the section is named, on a busy machine too: frames that
change while faulthandler reads them, without the interpreter's lock, may crash it."""

_borders = count(1)
_longest_s: dict[str, float] = {}
_runs: dict[str, int] = {}
_open: list[tuple[str, float]] = []
"""The sections that we are in, with the instant at which each is stuck."""


@contextmanager
def section(name: str, *, timeout: float | str | None = None) -> Iterator[None]:
    """Let this process fail if the block gets stuck.

    Without `timeout` the limit is learned: after three runs it is ten times the longest run so far,
    but at least 30 s. A run may always take as long as the longest one before.

    Args:
        name: what the block is, such as `"step"`; runs of one name are compared.
        timeout: how long each run may take, from the first one on: seconds, or `"5m"`.

    Raises:
        ConfigError: `timeout` is no time, or not positive; or `name` is no text.
    """
    given: object = name
    if not isinstance(given, str):
        from rankwise.launch.limits import shown  # noqa: PLC0415  # only for what is wrong

        raise ConfigError(f"the name of a section is {shown(name)}, expected a text such as 'step'")
    own_limit_s = None if timeout is None else _seconds_of(timeout, name)
    if "RANKWISE_SIMULATED" in os.environ:
        # The watchdog would end all ranks, and simulated ones that hang are found at once anyway.
        from rankwise.simranks.world.world import note_section  # noqa: PLC0415  # only there

        note_section()
        yield
        note_section()
        return
    began_at = time.monotonic()
    limit_s = _limit_of(name) if own_limit_s is None else own_limit_s
    _open.append((name, began_at + limit_s))
    _arm(began_at)
    borders = _borders_of_rank()
    if borders is not None:
        borders.pass_one()
        longest = round(_longest_s.get(name, 0.0) * SECOND)
        borders.sections.begin(name, round(began_at * SECOND), longest)
    try:
        yield
    finally:
        _open.pop()
        now = time.monotonic()
        _longest_s[name] = max(_longest_s.get(name, 0.0), now - began_at)
        _runs[name] = _runs.get(name, 0) + 1
        _arm(now)
        if borders is not None:
            borders.pass_one()
            late = (level for level, (_, stuck_at) in enumerate(_open) if stuck_at <= now)
            borders.be_stuck(next(late, None))
            borders.sections.end(name, round(began_at * SECOND), round(now * SECOND))
            if not _open:
                borders.count_run(now - began_at)


def _seconds_of(timeout: object, name: str) -> float:
    seconds = 0.0
    if isinstance(timeout, str):
        seconds = (parse_duration(timeout) or 0) / SECOND
    elif not isinstance(timeout, bool):
        with suppress(TypeError, ValueError):
            seconds = float(timeout)  # type: ignore[arg-type]  # numpy's numbers are some, too
    if not seconds > 0:
        from rankwise.launch.limits import shown  # noqa: PLC0415  # only for what is wrong

        raise ConfigError(
            f"the timeout of section {name!r} is {shown(timeout)}, expected more than 0 s: "
            "a number of seconds, or a text such as '5m'"
        )
    return min(seconds, _LIMIT_MAX_S)


class _Borders(NamedTuple):
    """Where the agent sees that sections come and go, and which."""

    words: "memoryview[int]"
    sections: "SectionWriter"

    def pass_one(self) -> None:
        """Let the agent see that the program has gone on: a section has begun or ended."""
        self.words[LEDGER_SECTIONS] = next(_borders)

    def be_stuck(self, level: int | None) -> None:
        """Let the agent see the section whose limit is over: the rank may end of it.

        That may be for another rank's sake. `level` counts the sections around it.
        """
        self.words[LEDGER_SECTION_STUCK] = 0 if level is None else level + 1

    def count_run(self, seconds: float) -> None:
        """Let the agent see how long a section that is in no other one took."""
        self.words[LEDGER_SECTION_TIME] += round(seconds * SECOND)
        self.words[LEDGER_SECTION_RUNS] += 1


@cache
def _borders_of_rank() -> _Borders | None:
    text = os.environ.get(SEGMENT_VARIABLE)
    if text is None:
        return None
    from rankwise.drivers.real.section_ring import SectionWriter  # noqa: PLC0415  # for ranks

    try:
        segment = Segment.attach(int(text))
    except ConfigError:
        return None  # a process that a worker has started: it is no rank
    local_rank = int(os.environ["RANKWISE_LOCAL_RANK"])
    at = local_rank * LEDGER_WORDS
    return _Borders(segment.ledgers[at : at + LEDGER_WORDS], SectionWriter(segment, local_rank))


def forget_segment() -> None:
    """Let the next section be the first one of another world."""
    _borders_of_rank.cache_clear()


def _limit_of(name: str) -> float:
    if _runs.get(name, 0) < LEARNING_RUNS:
        return float("inf")
    return max(LEAST_S, FACTOR * _longest_s[name])


def _arm(now: float) -> None:
    """Let the watchdog bite at the nearest limit of all sections that we are in."""
    level, (name, stuck_at) = min(
        enumerate(_open), key=lambda each: each[1][1], default=(0, ("", float("inf")))
    )
    if stuck_at == float("inf"):
        faulthandler.cancel_dump_traceback_later()
        _teller.expect(None)
        return
    _teller.expect((level, name, stuck_at))
    # A limit that has passed while the section was left bites at once.
    patience = max(stuck_at + HEAD_START_S - now, 1e-3)
    faulthandler.dump_traceback_later(patience, exit=True, file=2)


class _Teller:
    """A thread that tells which section is stuck, shortly before the watchdog bites.

    It needs the interpreter's lock, which the watchdog does not: a program stuck in foreign code
    that holds it ends without these words. It ends when there was nothing to tell of for a while,
    because a process with threads cannot fork trees of workers.
    """

    def __init__(self) -> None:
        self._expected: tuple[int, str, float] | None = None
        self._changed = threading.Condition()
        self._is_started = False

    def expect(self, section: tuple[int, str, float] | None) -> None:
        """Tell of this section (how many are around it, its name, its limit) when it is due."""
        with self._changed:
            self._expected = section
            if section is not None and not self._is_started:
                self._is_started = True
                threading.Thread(target=self._watch, name="rankwise-section", daemon=True).start()
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while True:
                if self._expected is None:
                    self._changed.wait(LINGER_S)
                    if self._expected is None:
                        self._is_started = False
                        return
                level, name, stuck_at = self._expected
                patience = stuck_at - time.monotonic()
                if patience > 0:
                    self._changed.wait(patience)
                    continue
                before = f", its longest run took {_longest_s[name]:.3g} s" if name in _runs else ""
                text = f"rankwise: section {name!r} is stuck{before}; here are its stacks\n"
                os.write(2, text.encode())
                if (borders := _borders_of_rank()) is not None:
                    borders.be_stuck(level)
                self._expected = None


_teller = _Teller()
