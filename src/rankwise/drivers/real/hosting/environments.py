"""The environments of processes that are made for a run or for a pool."""

import os
import sys
from collections.abc import Sequence

LISTENER_VARIABLE = "RANKWISE_COLLECTIVES_FD"
VARIABLES_AMONG_NODES = ("RANKWISE_COLLECTIVES_KEY", LISTENER_VARIABLE)
"""What workers find only where they have peers on other nodes."""


def inherited_environment() -> dict[str, str]:
    """This process's own environment, less what belongs to an outer worker.

    A worker may itself start gangs: then it must not pass on its own descriptors and error file.
    """
    own = {
        "RANKWISE_REPORT_FD",
        "RANKWISE_RESULT_FD",
        "RANKWISE_PAYLOAD_FD",
        "RANKWISE_SEGMENT_FD",
        "RANKWISE_STOP_FD",
        "RANKWISE_RECOVER_FD",
        "RANKWISE_MASTER_FD",
        *VARIABLES_AMONG_NODES,
        "TORCHELASTIC_ERROR_FILE",
    }
    return {name: value for name, value in os.environ.items() if name not in own}


def server_environment(path: Sequence[str] = ()) -> dict[str, str]:
    """What a fork server's imports see: our own, with a `sys.path` and one thread per pool.

    Numeric libraries start their thread pools while they are imported, and a process with
    threads should not fork.
    """
    return {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **os.environ,
        "RANKWISE_SYS_PATH": os.pathsep.join(path or sys.path),
    }
