"""From a `LogsDest`, which says what goes where, to what rankwise's supervision reads.

torch's specs are reified before the workers are started and may come from a plug-in, so neither
the directories nor the names of files are ours to decide: `ReifiedLogs` hands them on.
"""

import os
from collections.abc import Mapping, Sequence

from rankwise.compat.torch.elastic.multiprocessing.logs_specs import LogsDest
from rankwise.launch.run.job import LogPlan, Streams
from rankwise.launch.run.log_layout import Destinations


class ReifiedLogs:
    """The places of one attempt, made already; a `LogPlaces` of rankwise.launch.

    Args:
        dest: what the specs have reified.
        envs: the workers' variables; TORCHELASTIC_ERROR_FILE in them wins.
    """

    directory: str | None = None
    root: str | None = None
    keep = True

    def __init__(self, dest: LogsDest, envs: Mapping[int, Mapping[str, str]]) -> None:
        error_files = {
            rank: environment.get("TORCHELASTIC_ERROR_FILE", dest.error_files.get(rank, ""))
            for rank, environment in envs.items()
        }
        self._destinations = Destinations(
            stdouts=_real_files(dest.stdouts),
            stderrs=_real_files(dest.stderrs),
            tee_stdouts=_real_files(dest.tee_stdouts),
            tee_stderrs=_real_files(dest.tee_stderrs),
            error_files=_real_files(error_files),
            filtered_stdout=dest.filtered_stdout,
            filtered_stderr=dest.filtered_stderr,
        )

    def prepare(self, attempt: int) -> Destinations:
        """Say which files the workers' output goes to; there is one attempt only."""
        assert attempt == 0, "torch's contexts start their workers once"
        return self._destinations

    def discard(self) -> None:
        """Leave everything where it is: it belongs to the creator of the specs."""


def log_plan(
    dest: LogsDest,
    prefixes: Mapping[int, str],
    stdout_filters: Sequence[str],
    stderr_filters: Sequence[str],
) -> LogPlan:
    """Say what of the output is shown: what has no file, bare, and what is tee'd, with a prefix.

    A stream to `os.devnull` has a file in this sense, and is shown nowhere.
    """
    redirects = {
        rank: (Streams.OUT if dest.stdouts[rank] else Streams.NONE)
        | (Streams.ERR if dest.stderrs[rank] else Streams.NONE)
        for rank in dest.stdouts
    }
    tee_stdouts, tee_stderrs = _real_files(dest.tee_stdouts), _real_files(dest.tee_stderrs)
    tee = {
        rank: (Streams.OUT if rank in tee_stdouts else Streams.NONE)
        | (Streams.ERR if rank in tee_stderrs else Streams.NONE)
        for rank in dest.stdouts
    }
    return LogPlan(
        redirects=redirects,
        tee=tee,
        prefix_template="",
        tee_prefixes=prefixes,
        stdout_filters=tuple(stdout_filters),
        stderr_filters=tuple(stderr_filters),
    )


def _real_files(paths: Mapping[int, str]) -> dict[int, str]:
    return {rank: path for rank, path in paths.items() if path not in ("", os.devnull)}
