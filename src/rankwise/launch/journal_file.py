"""Where a run's journal goes: beside its logs, when the user has named a place for logs."""

import os
from contextlib import ExitStack

from rankwise.drivers.real.journal import FileJournal
from rankwise.drivers.real.logs.file import DiskComplaints
from rankwise.launch.job import Job
from rankwise.launch.log_layout import LogPlaces
from rankwise.ports.clock import Clock


def open_journal(
    job: Job, places: LogPlaces, complaints: DiskComplaints, stack: ExitStack, clock: Clock
) -> FileJournal | None:
    """Open a run's journal, if it has one; `stack` closes it. A disk that refuses ends no run."""
    if not job.logs.directory or job.logs.directory == os.devnull:
        return None
    directory = places.directory
    if directory is None:
        return None
    path = os.path.join(directory, "journal.jsonl")  # pathlib costs milliseconds
    try:
        journal = FileJournal(path, complaints.complain, clock.wall_ns)
    except OSError as error:
        complaints.complain(path, error)
        return None
    stack.callback(journal.close)
    return journal
