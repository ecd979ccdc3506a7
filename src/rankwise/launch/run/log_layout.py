"""Where a run's log files are, and which stream goes where.

The layout is torchelastic's, so that what reads its logs reads ours:

    <directory>/<run id>_<random>/attempt_<n>/<local rank>/stdout.log, stderr.log, error.json
    <directory>/<run id>_<random>/attempt_<n>/filtered_stdout.log, filtered_stderr.log

Nothing is created before the first attempt is prepared. Without a directory of the user's a
private one is made among the system's temporary files; it holds the error files at least, and
`keep` says whether it must survive the run.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.logs.stamps import DATE_MARK, TIME_MARK, stamped
from rankwise.launch.run.job import LogPlan, StreamChoice, Streams
from rankwise.launch.run.private_places import (
    OF_RUN,
    held_folder,
    make_private_directory,
    new_private_path,
    remove_tree,
)

_TIME_MARKS = {"date": DATE_MARK, "time": TIME_MARK}
PLACEHOLDERS = ("role_name", "local_rank", "rank", *_TIME_MARKS)
"""What a prefix may name."""
_FILE_NAMES = {Streams.OUT: "stdout.log", Streams.ERR: "stderr.log"}


class Destinations(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one attempt, by local rank. Ranks and streams without a file are missing.

    Attributes:
        stdouts, stderrs: every log file that a stream goes to.
        tee_stdouts, tee_stderrs: those of them whose stream goes to the console too.
        error_files: where a worker leaves its exception for `record`.
        filtered_stdout, filtered_stderr: duplicates of chosen lines; empty for no file.
    """

    stdouts: Mapping[int, str] = {}
    stderrs: Mapping[int, str] = {}
    tee_stdouts: Mapping[int, str] = {}
    tee_stderrs: Mapping[int, str] = {}
    error_files: Mapping[int, str] = {}
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogPlaces(Protocol):
    """What decides where log files go: a `LogLayout`, or the adapter of a plug-in."""

    @property
    def directory(self) -> str | None:
        """The run's own directory; None when there is none, or not yet."""
        ...

    @property
    def root(self) -> str | None:
        """What to remove when the run leaves nothing, made or not; None when that is not ours."""
        ...

    @property
    def keep(self) -> bool:
        """Whether the directory must survive the run."""
        ...

    def prepare(self, attempt: int) -> Destinations:
        """Make the directories of an attempt, empty, and say which files go there."""
        ...

    def discard(self) -> None:
        """Remove the run's directory, unless it is to be kept."""
        ...


class LogLayout:
    """The places of one run's log files."""

    def __init__(self, plan: LogPlan, *, size: int, run_id: str) -> None:
        self._plan = plan
        self._size = size
        self._run_id = run_id
        self._directory: str | None = None
        self._private = "" if plan.directory else new_private_path(may_survive=self.keep)
        self._exit = contextlib.ExitStack()

    @property
    def directory(self) -> str | None:
        """The run's own directory, `<directory>/<run id>_<random>`; None before it is made."""
        return self._directory

    @property
    def root(self) -> str | None:
        """What to remove when the run leaves nothing; None when the user has named a directory.

        It is known before it is made, so that another process can be asked in time to remove it.
        """
        return self._private or None

    @property
    def keep(self) -> bool:
        """Whether the user wants to find the directory afterwards."""
        plan = self._plan
        has_filters = bool(plan.stdout_filters or plan.stderr_filters)
        return bool(plan.directory) or has_filters or has_log_files(plan, self._size)

    def prepare(self, attempt: int) -> Destinations:
        """Make the directories of an attempt, empty, and say which files go there.

        Raises:
            ConfigError: the run's directory cannot be made, and files were asked for. Once it
                exists, nothing is raised: a disk that fills up later must not end the job.
        """
        if self._plan.directory == os.devnull:
            return Destinations()
        if self._directory is None:
            try:
                self._directory = self._make_run_directory()
            except ConfigError:
                if self.keep:
                    raise
                # On a read-only root: what ranks tell comes through their pipes, too.
                return Destinations()
        if not self.keep:
            return _private_destinations(self._directory, attempt, self._size)
        attempt_directory = os.path.join(self._directory, f"attempt_{attempt}")
        remove_tree(attempt_directory)
        for local_rank in range(self._size):
            # A missing directory is reported where a file in it cannot be opened.
            with contextlib.suppress(OSError):
                os.makedirs(os.path.join(attempt_directory, str(local_rank)))
        return self._destinations(attempt_directory)

    def discard(self) -> None:
        """Remove the run's directory, unless it is to be kept."""
        if self.root is not None and not self.keep:
            remove_tree(self.root)
            self._exit.close()

    def _make_run_directory(self) -> str:
        parent = self._plan.directory or self._private
        # A run id may be anything, a directory's name may not.
        name = self._run_id.replace("/", "_").replace("\0", "_")[:200]
        try:
            if self._private and not self.keep:
                return self._exit.enter_context(held_folder(self._private, OF_RUN))
            if self._private:
                make_private_directory(self._private)
            else:
                os.makedirs(parent, exist_ok=True)
            return _make_private_directory(parent, f"{name}_")
        except OSError as error:
            raise ConfigError(
                f"cannot make a log directory in {error.filename or parent}: {error.strerror}",
                hint="choose another log directory, or /dev/null for no files",
            ) from error

    def _destinations(self, attempt_directory: str) -> Destinations:
        plan = self._plan
        files: dict[Streams, dict[int, str]] = {stream: {} for stream in _FILE_NAMES}
        tees: dict[Streams, dict[int, str]] = {stream: {} for stream in _FILE_NAMES}
        error_files = {}
        for local_rank in range(self._size):
            directory = os.path.join(attempt_directory, str(local_rank))
            error_files[local_rank] = os.path.join(directory, "error.json")
            for stream, file_name in _FILE_NAMES.items():
                if log_file_streams(plan, local_rank) & stream:
                    path = files[stream][local_rank] = os.path.join(directory, file_name)
                    if console_streams(plan, local_rank) & stream:
                        tees[stream][local_rank] = path
        return Destinations(
            stdouts=files[Streams.OUT],
            stderrs=files[Streams.ERR],
            tee_stdouts=tees[Streams.OUT],
            tee_stderrs=tees[Streams.ERR],
            error_files=error_files,
            filtered_stdout=_filtered_path(attempt_directory, Streams.OUT, plan.stdout_filters),
            filtered_stderr=_filtered_path(attempt_directory, Streams.ERR, plan.stderr_filters),
        )


def _private_destinations(directory: str, attempt: int, size: int) -> Destinations:
    """Place error files that only rankwise reads; they need no directory each.

    For 64 workers, making and removing directories takes longer than starting the workers.
    """
    return Destinations(
        error_files={
            local_rank: os.path.join(directory, f"attempt_{attempt}_rank_{local_rank}_error.json")
            for local_rank in range(size)
        }
    )


def streams_of(choice: StreamChoice, local_rank: int) -> Streams:
    """What a choice says about one rank."""
    if isinstance(choice, Streams):
        return choice
    return choice.get(local_rank, Streams.NONE)


def log_file_streams(plan: LogPlan, local_rank: int) -> Streams:
    """Which of a rank's streams go to a log file."""
    if plan.directory == os.devnull:
        return Streams.NONE
    return streams_of(plan.redirects, local_rank) | streams_of(plan.tee, local_rank)


def has_log_files(plan: LogPlan, size: int) -> bool:
    """Whether a stream of one of `size` workers goes to a log file."""
    is_uniform = all(isinstance(choice, Streams) for choice in (plan.redirects, plan.tee))
    # Of many equal ranks one tells of all.
    ranks_that_may_differ = range(min(size, 1) if is_uniform else size)
    return any(log_file_streams(plan, local_rank) for local_rank in ranks_that_may_differ)


def console_streams(plan: LogPlan, local_rank: int) -> Streams:
    """Which of a rank's streams reach the console."""
    if plan.console_ranks is not None and local_rank not in plan.console_ranks:
        return Streams.NONE
    tee = streams_of(plan.tee, local_rank)
    return Streams.BOTH & ~streams_of(plan.redirects, local_rank) | tee


def line_prefix(
    plan: LogPlan, *, role: str, local_rank: int, rank: int, stream: Streams = Streams.NONE
) -> str:
    """What stands in front of a rank's console lines; placeholders of other names stay.

    The time is filled in where lines are shown: see `drivers.real.logs.stamps`.
    """
    if local_rank in plan.tee_prefixes and stream & streams_of(plan.tee, local_rank):
        return plan.tee_prefixes[local_rank]
    if plan.prefix_template is None:
        return f"[{role}{local_rank}]:"
    from string import Template  # noqa: PLC0415 - rarely needed

    values = {"role_name": role, "local_rank": local_rank, "rank": rank, **_TIME_MARKS}
    return Template(plan.prefix_template).safe_substitute(values)


def check_prefix(template: str | None, label: str) -> None:
    """Refuse a prefix that names in `${...}` what no rank has.

    Raises:
        ConfigError: it does.
    """
    if "$" not in (template or ""):
        return
    from string import Template  # noqa: PLC0415  # rarely needed

    from rankwise.base.suggestions import nearest  # noqa: PLC0415  # the same

    for name in Template(template or "").get_identifiers():
        if name not in PLACEHOLDERS:
            meant = nearest(name, PLACEHOLDERS)
            raise ConfigError(
                f"{label} is {template!r}, and nothing is called {name}; there are "
                + ", ".join(f"${{{known}}}" for known in PLACEHOLDERS),
                hint=f"did you mean ${{{meant}}}?" if meant else "write $$ for a dollar sign",
            )


def notice_stamp(plan: LogPlan) -> str:
    """What stands in front of rankwise's own lines: the time, where ranks' lines have it."""
    if "$" not in (plan.prefix_template or ""):
        return ""
    from string import Template  # noqa: PLC0415  # rarely needed

    wanted = Template(plan.prefix_template or "").get_identifiers()
    marks = [mark for name, mark in _TIME_MARKS.items() if name in wanted]
    return stamped("".join(f"{mark} " for mark in marks).encode()).decode()


def parse_streams(text: str, *, option: str = "--redirects") -> StreamChoice:
    """Read torchrun's notation: `3` for all ranks, or `0:1,12:3` for single ones.

    Raises:
        ConfigError: the text is anything else, or names a rank twice.
    """
    streams = _streams_by_digit(text)
    if streams is not None:
        return streams
    choice: dict[int, Streams] = {}
    for part in text.split(","):
        rank_text, _, digit = part.partition(":")
        streams = _streams_by_digit(digit)
        if streams is None or not (rank_text.isascii() and rank_text.isdigit()):
            found = "" if part == text else f", not {part!r}"
            raise ConfigError(
                f"{option} is {text!r}, expected streams{found}",
                hint="0 none, 1 stdout, 2 stderr, 3 both; for single local ranks 0:1,12:3",
            )
        local_rank = int(rank_text)
        if local_rank in choice:
            raise ConfigError(f"{option} is {text!r}, which names local rank {local_rank} twice")
        choice[local_rank] = streams
    return choice


def log_plan_problems(
    plan: LogPlan, *, size: int, label: Callable[[str], str]
) -> list[ConfigError]:
    """Everything that is wrong with a plan for `size` workers; touches nothing.

    Args:
        plan: what to look at.
        size: how many workers there are.
        label: how messages call an option, from its name in Python (`log_dir`).
    """
    problems = [
        ConfigError(
            f"{name} names local rank {local_rank}, but this node's ranks are 0 to {size - 1}"
        )
        for name, local_ranks in (
            (label("redirects"), () if isinstance(plan.redirects, Streams) else plan.redirects),
            (label("tee"), () if isinstance(plan.tee, Streams) else plan.tee),
            (label("local_ranks_filter"), plan.console_ranks or ()),
        )
        for local_rank in sorted(local_ranks)
        if not 0 <= local_rank < size
    ]
    if plan.directory and plan.directory != os.devnull:
        problem = _directory_problem(plan.directory, label("log_dir"))
        if problem is not None:
            problems.append(problem)
    return problems


def _directory_problem(directory: str, label: str) -> ConfigError | None:
    # The existing part of the path decides: the rest will be made there.
    existing = os.path.abspath(directory)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        return ConfigError(
            f"{label} is {directory}, but {existing} is not a directory",
            hint="choose another place, or /dev/null for no files",
        )
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        return ConfigError(
            f"{label} is {directory}, but nothing can be written in {existing}",
            hint="choose another place, or /dev/null for no files",
        )
    return None


def _filtered_path(attempt_directory: str, stream: Streams, needles: Sequence[str]) -> str:
    return os.path.join(attempt_directory, f"filtered_{_FILE_NAMES[stream]}") if needles else ""


def _streams_by_digit(digit: str) -> Streams | None:
    return Streams(int(digit)) if digit in ("0", "1", "2", "3") else None


def _make_private_directory(parent: str, prefix: str) -> str:
    while True:
        directory = os.path.join(parent, prefix + os.urandom(4).hex())
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            continue
        return directory
