"""The page and the timeline that a run leaves: `--report` and `--trace`.

Both are made of the run's journal when it is over. Without `--log-dir` the journal is a file
without a name among the temporary ones, which is gone with this process, however that ends.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from rankwise.base.errors import ConfigError, RankwiseError
from rankwise.cli.journals import lines_of
from rankwise.launch.run.log_layout import LogLayout, LogPlaces

if TYPE_CHECKING:
    from rankwise.cli.run_job import RunOptions
    from rankwise.launch.run.job import Job
    from rankwise.observe.timeline import RunTimeline


class RunFiles:
    """What was asked for, and the journal that it will be made of.

    Args:
        options: `--report` and `--trace`, one of them at least.
        job: what is to be run.

    Attributes:
        job: the same, with a journal.
        places: where its log files go; None where a plug-in decides.

    Raises:
        ConfigError: a file cannot be written, so that nothing should be run.
    """

    def __init__(self, options: "RunOptions", job: "Job") -> None:
        check_files(options)
        self._report, self._trace = options.report, options.trace
        self._file: IO[bytes] | None = None
        self.job = job
        self.places: LogPlaces | None = None
        is_ours = job.logs.log_specs is None
        if is_ours and job.logs.directory and job.logs.directory != os.devnull:
            self.places = LogLayout(job.logs, size=job.gang.size, run_id=job.run_id)
        else:
            try:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115  # as long as we live
            except OSError as error:
                raise ConfigError(
                    f"no temporary file can be made for the run's record: {error.strerror}",
                    hint="give --log-dir, and the record goes there",
                ) from error
            self.job = msgspec.structs.replace(job, journal_fd=self._file.fileno())

    def write(self, places: LogPlaces | None = None) -> None:
        """Write them, and say where they are; if that fails, say why: the run is over anyway.

        `places` are those that the run has had, if it has made its own.
        """
        from rankwise.observe.timeline import timeline_of  # noqa: PLC0415  # not for --help

        if self.places is not None and places is not None:
            self.places = places
        try:
            timeline = timeline_of([(self._name, self._lines())])
        except RankwiseError as error:
            self._say(f"{'report' if self._report else 'trace'}: {error}")
            return
        node = timeline.nodes[0]
        if not node.is_alone and (node.node_rank or not node.worlds):
            self._say("the node of rank 0 writes the files of --report and --trace")
            return
        self._write_one("report", timeline, self._report, None)
        self._write_one("trace", timeline, None, self._trace)

    def _write_one(
        self, kind: str, timeline: "RunTimeline", report: str | None, trace: str | None
    ) -> None:
        try:
            for name, path, more in write_run_files(timeline, report, trace):
                self._say(tell_file(name, path, more))
        except RankwiseError as error:
            self._say(f"{kind}: {error}")

    @property
    def _name(self) -> str:
        directory = None if self.places is None else self.places.directory
        return "of this run" if directory is None else str(Path(directory, "journal.jsonl"))

    def _lines(self) -> Iterator[bytes]:
        if self._file is None:
            yield from lines_of(self._name)
        else:
            self._file.seek(0)
            yield from self._file

    def _say(self, text: str) -> None:
        if not self.job.console:
            return
        from rankwise.launch.telling.notices import notice  # noqa: PLC0415  # not for --help

        with suppress(OSError):  # the reader of stderr has gone
            sys.stderr.write(notice(self.job, text, "file"))
            sys.stderr.flush()


def check_files(options: "RunOptions") -> None:
    """Refuse files that cannot be written before anything runs.

    Raises:
        ConfigError: names the option and why.
    """
    from rankwise.sim.reporting.files import check_writable  # noqa: PLC0415  # not for --help

    for name in ("trace", "report", "prediction", "record_values"):
        path: str | None = getattr(options, name)
        if path is not None:
            try:
                check_writable(path)
            except ConfigError as error:
                raise ConfigError(f"{options.label(name)}: {error}") from None
    if options.trace is not None and options.trace == options.report:
        raise ConfigError(
            f"--trace and --report are both {options.trace!r}, and would overwrite each other"
        )


def write_run_files(
    timeline: "RunTimeline", report: str | None, trace: str | None
) -> Iterator[tuple[str, str, str]]:
    """Write what is asked for; yield of each file its kind, its name, and what to say of it.

    Raises:
        ConfigError: the place is none that can be written to.
        NotWritten: writing failed; nothing of that file is left.
    """
    from rankwise.observe.timeline import clocks_in_words  # noqa: PLC0415  # not for --help
    from rankwise.sim.reporting.files import write_text  # noqa: PLC0415  # the same

    clocks = clocks_in_words(timeline)
    if report is not None:
        from rankwise.report.run_page import run_page  # noqa: PLC0415  # the same

        write_text(report, run_page(timeline))
        missing = timeline.node_count - len(timeline.nodes)
        held = f"holds {len(timeline.nodes)} of {timeline.node_count} nodes" if missing > 0 else ""
        yield "report", report, held or clocks
    if trace is not None:
        from rankwise.observe.trace import trace_text  # noqa: PLC0415  # the same

        write_text(trace, trace_text(timeline))
        yield "trace", trace, clocks


def tell_file(name: str, path: str, more: str) -> str:
    """The line that says where a file is: `trace: run.json.gz (open it at …)`."""
    where = " (open it at https://ui.perfetto.dev)" if name == "trace" else ""
    return f"{name}: {path}{where}{f'; {more}' if more else ''}"
