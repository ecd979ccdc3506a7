"""A failure report as a value: every word chosen, nothing laid out yet.

All text in it is printable and of bounded length. The renderings differ in rules, indents and
colours only, so what one of them tells, the other tells, too.
"""

import datetime as dt

import msgspec

from rankwise.base.units import Duration


class ReportContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the report tells about the run as a whole.

    Attributes:
        program: how the user calls the program: `train.py`.
        nprocs: how many workers the gang has.
        run_id: the run's name.
        duration: how long the run took.
        is_simulated: whether that is virtual time.
        attempts_max: how many times the gang could have been started: 1 without restarts.
        log_directory: where log files are, if there are any.
        stderr_shown: local ranks whose stderr the reader of the report has seen.
        timezone: for times of day; None means the machine's own.
    """

    program: str
    nprocs: int
    run_id: str = ""
    duration: Duration | None = None
    is_simulated: bool = False
    attempts_max: int = 1
    log_directory: str = ""
    stderr_shown: frozenset[int] = frozenset()
    timezone: dt.tzinfo | None = None


class Field(msgspec.Struct, frozen=True):
    """A named fact; long values such as paths are never broken into pieces."""

    name: str
    values: tuple[str, ...]


class Block(msgspec.Struct, frozen=True):
    """Lines to be shown as they are: a traceback, stacks, the end of stderr."""

    title: str
    lines: tuple[str, ...]


class RootCause(msgspec.Struct, frozen=True, kw_only=True):
    """The failure that explains the others, in full."""

    headline: str
    fields: tuple[Field, ...] = ()
    blocks: tuple[Block, ...] = ()
    hint: str = ""


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report, in the order in which it is read: the root cause comes last."""

    summary: str
    notes: tuple[str, ...] = ()
    root_cause: RootCause | None = None
