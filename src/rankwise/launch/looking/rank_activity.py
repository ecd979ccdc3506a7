"""From the kernel's counts of a rank's processes to the activity that hangs are judged by."""

from rankwise.core.gang.progress import Activity
from rankwise.drivers.real.process_work import ProcessWork


def activity_of(pid: int, work: ProcessWork) -> Activity:
    """The activity of a process and its descendants, as far as the kernel counts it."""
    return Activity(
        pid=pid,
        main_time=work.main_time,
        main_waited=work.main_waited,
        main_runs=work.main_runs,
        helper_times=work.helper_times,
        helper_waits=work.helper_waits,
        byte_count=work.byte_count,
    )
