"""Where a run's journal goes: beside its logs, when the user has named a place for logs.

Who wants a report or a timeline without logs hands in a file without a name (`Job.journal_fd`).
"""

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
    if job.journal_fd is not None:
        name = "the record of this run, in the place for temporary files"
        journal = FileJournal(name, complaints.complain, clock.wall_ns, job.journal_fd)
        stack.callback(journal.close)
        return journal
    if not job.logs.directory or job.logs.directory == os.devnull or places.directory is None:
        return None
    path = os.path.join(places.directory, "journal.jsonl")  # pathlib costs milliseconds
    try:
        journal = FileJournal(path, complaints.complain, clock.wall_ns)
    except OSError as error:
        complaints.complain(path, error)
        return None
    stack.callback(journal.close)
    return journal
