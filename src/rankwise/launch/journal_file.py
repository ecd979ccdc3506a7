"""Where a run's journal goes: beside its logs, when the user has named a place for logs."""

import os
from contextlib import ExitStack

from rankwise.drivers.real.journal import FileJournal, NullJournal
from rankwise.drivers.real.logs.file import DiskComplaints
from rankwise.launch.job import Job
from rankwise.launch.log_layout import LogPlaces


def open_journal(
    job: Job, places: LogPlaces, complaints: DiskComplaints, stack: ExitStack
) -> FileJournal | NullJournal:
    """Open the journal of a run; `stack` closes it. A disk that refuses it does not end the run."""
    if not job.logs.directory or job.logs.directory == os.devnull:
        return NullJournal()
    directory = places.directory
    if directory is None:
        return NullJournal()
    path = os.path.join(directory, "journal.jsonl")  # pathlib costs milliseconds
    try:
        journal = FileJournal(path, complaints.complain)
    except OSError as error:
        complaints.complain(path, error)
        return NullJournal()
    stack.callback(journal.close)
    return journal
