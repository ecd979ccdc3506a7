"""Where the workers' output goes: torch's plug-in interface and its default.

A launcher makes one `LogsSpecs` per job and calls `reify` before every attempt; plug-ins under the
entry point `torchrun.logs_specs` have this shape. The default lays files out as

    <log_dir>/<run id>_<random>/attempt_<n>/<local rank>/stdout.log, stderr.log, error.json

A directory among the system's temporary files is made when its name is first read, and goes at the
end of the program if nothing has been written into it.
"""

import atexit
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from rankwise.compat.torch.elastic.multiprocessing.std import Std, to_map

__all__ = ["DefaultLogsSpecs", "LogsDest", "LogsSpecs"]

logger = logging.getLogger(__name__)

StdChoice = Std | dict[int, Std]


@dataclass
class LogsDest:
    """The files of one attempt, by local rank.

    Attributes:
        stdouts, stderrs: the file that the stream goes to; "" lets it go to the console.
        tee_stdouts, tee_stderrs: the files that are shown on the console too.
        error_files: where a worker leaves its exception.
        filtered_stdout, filtered_stderr: for the lines that duplicate filters choose.
    """

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = field(default_factory=str)  # as torch has it, seen by `inspect`
    filtered_stderr: str = field(default_factory=str)


class LogsSpecs(ABC):
    """Decides where output goes.

    Args:
        log_dir: where log files go; subclasses say what None means.
        redirects: the streams that go to files.
        tee: the streams that go to files and to the console.
        local_ranks_filter: the local ranks that are shown on the console; None or empty shows all.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: StdChoice = Std.NONE,
        tee: StdChoice = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the files' places for an attempt.

        Args:
            envs: the workers' variables by local rank; an implementation may add to them.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The directory under which everything is."""


class DefaultLogsSpecs(LogsSpecs):
    """Log files in a directory of their own; see the module's text for the layout.

    Args:
        log_dir: made if missing; None or "" for a temporary one, `os.devnull` for no files at all,
            neither redirected nor tee'd.
        redirects: the streams that go to files.
        tee: the streams that go to files and to the console; wins over `redirects`.
        local_ranks_filter: the local ranks that are shown on the console; what the others do not
            write to files is discarded.

    Raises:
        NotADirectoryError: `log_dir` is a file.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: StdChoice = Std.NONE,
        tee: StdChoice = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if log_dir and log_dir != os.devnull:
            if os.path.isfile(log_dir):
                raise NotADirectoryError(f"log_dir: {log_dir} is a file")
            os.makedirs(log_dir, exist_ok=True)
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        self._run_log_dir: str | None = None

    @property
    def root_log_dir(self) -> str:
        """The directory under which everything is; a temporary one is made now."""
        if not self._root_log_dir:
            self._root_log_dir = _make_temporary_directory()
        return self._root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the directories of an attempt, empty, and say which files go there.

        The run's id and the attempt's number are read from `envs[0]`; TORCHELASTIC_ERROR_FILE is
        written into all of them.
        """
        if not envs:
            logger.warning("no worker's environment was given, so there are no places for its logs")
        if self.root_log_dir == os.devnull:
            return _no_files(envs)
        environment = envs[0] if envs else {}
        attempt_dir = self._make_attempt_dir(
            environment.get("TORCHELASTIC_RUN_ID", "test_run_id"),
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        stdouts, tee_stdouts = self._places(attempt_dir, len(envs), Std.OUT, "stdout.log")
        stderrs, tee_stderrs = self._places(attempt_dir, len(envs), Std.ERR, "stderr.log")
        error_files = {
            rank: os.path.join(attempt_dir, str(rank), "error.json") for rank in range(len(envs))
        }
        for rank, error_file in error_files.items():
            os.makedirs(os.path.dirname(error_file))
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = error_file
        return LogsDest(
            stdouts=stdouts,
            stderrs=stderrs,
            tee_stdouts=tee_stdouts,
            tee_stderrs=tee_stderrs,
            error_files=error_files,
            filtered_stdout=os.path.join(attempt_dir, "filtered_stdout.log"),
            filtered_stderr=os.path.join(attempt_dir, "filtered_stderr.log"),
        )

    def _make_attempt_dir(self, run_id: str, restart_count: str) -> str:
        import shutil  # noqa: PLC0415  # only for jobs, not for those who import a name
        import tempfile  # noqa: PLC0415  # the same

        if self._run_log_dir is None:
            # A run's id may be anything, a directory's name may not.
            name = run_id.replace("/", "_").replace("\0", "_")[:200]
            self._run_log_dir = tempfile.mkdtemp(prefix=f"{name}_", dir=self.root_log_dir)
        attempt_dir = os.path.join(self._run_log_dir, f"attempt_{restart_count}")
        shutil.rmtree(attempt_dir, ignore_errors=True)
        os.makedirs(attempt_dir)
        return attempt_dir

    def _places(
        self, attempt_dir: str, size: int, stream: Std, name: str
    ) -> tuple[dict[int, str], dict[int, str]]:
        """The files that a stream goes to, and those of them that are shown."""
        redirects, tee = to_map(self._redirects, size), to_map(self._tee, size)
        chosen = self._local_ranks_filter or range(size)
        files, shown = {}, {}
        for rank in range(size):
            path = os.path.join(attempt_dir, str(rank), name)
            if stream in redirects[rank] | tee[rank]:
                files[rank] = path
            else:
                files[rank] = "" if rank in chosen else os.devnull
            if stream in tee[rank] and rank in chosen:
                shown[rank] = path
        return files, shown

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, "
            f"tee={self._tee}, local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return id(self)

    def _identity(self) -> tuple[object, ...]:
        return self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter


def _no_files(envs: Mapping[int, dict[str, str]]) -> LogsDest:
    for environment in envs.values():
        environment["TORCHELASTIC_ERROR_FILE"] = ""
    return LogsDest(
        stdouts=dict.fromkeys(envs, ""),
        stderrs=dict.fromkeys(envs, ""),
        tee_stdouts=dict.fromkeys(envs, os.devnull),
        tee_stderrs=dict.fromkeys(envs, os.devnull),
        error_files=dict.fromkeys(envs, os.devnull),
        filtered_stdout=os.devnull,
        filtered_stderr=os.devnull,
    )


def _make_temporary_directory() -> str:
    import tempfile  # noqa: PLC0415  # it takes 15 ms to import, and most never need it

    try:
        directory = tempfile.mkdtemp(prefix="torchelastic_")
    except OSError as error:  # a read-only root without /tmp: a run needs no files
        logger.warning("workers have no files for their errors and logs: %s", error)
        return os.devnull
    atexit.register(_remove_if_without_files, directory, os.getpid())
    return directory


def _remove_if_without_files(directory: str, owner: int) -> None:
    """Remove a tree of empty directories; a forked child leaves its parent's alone."""
    if os.getpid() != owner or any(files for _, _, files in os.walk(directory)):
        return
    import shutil  # noqa: PLC0415  # loaded already wherever a job ran

    shutil.rmtree(directory, ignore_errors=True)
