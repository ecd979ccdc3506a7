"""A function worker by hand, in a process that other code has made.

rankwise's own function workers are `drivers/real/worker/function.py`. This is for programs that
start processes with `multiprocessing`, and let each of them do what a worker of torch's does.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from rankwise.compat.torch.elastic.multiprocessing.api import get_std_cm
from rankwise.compat.torch.elastic.multiprocessing.errors import record
from rankwise.compat.torch.elastic.multiprocessing.numa import cpus_for
from rankwise.compat.torch.elastic.multiprocessing.redirects import (
    redirect_stderr,
    redirect_stdout,
)


def _wrap(
    local_rank: int,
    fn: Callable[..., Any],
    args: Mapping[int, tuple[Any, ...]],
    envs: Mapping[int, Mapping[str, str]],
    stdout_redirects: Mapping[int, str],
    stderr_redirects: Mapping[int, str],
    ret_vals: Mapping[int, Any],
    queue_finished_reading_event: Any,
    numa_options: Any = None,
) -> None:
    """Call `fn` in this process as one of several local ranks, and hand over what it returns.

    Args:
        local_rank: which of them; the mappings have an entry for each.
        fn: the function.
        args: what it is called with.
        envs: variables, set here and not taken back.
        stdout_redirects: files for stdout; "" for the console.
        stderr_redirects: files for stderr; "" for the console.
        ret_vals: queues, which the value is put into.
        queue_finished_reading_event: what is waited for then, since a queue loses what its
            process has not handed over when it ends.
        numa_options: which CPUs this process is bound to.

    Raises:
        Exception: what `fn` raised; it is in TORCHELASTIC_ERROR_FILE too.
    """
    os.environ.update(envs[local_rank])
    cpus = cpus_for(numa_options, len(args))
    if cpus is not None:
        os.sched_setaffinity(0, cpus[local_rank])
    with (
        get_std_cm(stdout_redirects[local_rank], redirect_stdout),
        get_std_cm(stderr_redirects[local_rank], redirect_stderr),
    ):
        value = record(fn)(*args[local_rank])
    ret_vals[local_rank].put(value)
    queue_finished_reading_event.wait()
