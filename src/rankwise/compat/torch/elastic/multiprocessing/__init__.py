"""Workers as processes of this machine, under torch's names.

`start_processes` starts a function or a program on several local ranks and returns a `PContext`
that is waited for. Underneath are rankwise's own gang, guardian and logs.
"""

from typing import TYPE_CHECKING

from rankwise.compat.torch.lazy_names import lazy_names

if TYPE_CHECKING:
    from rankwise.compat.torch.elastic.multiprocessing.api import (
        MultiprocessContext,
        PContext,
        SignalException,
        SubprocessContext,
        start_processes,
    )
    from rankwise.compat.torch.elastic.multiprocessing.errors.process_failure import ProcessFailure
    from rankwise.compat.torch.elastic.multiprocessing.logs_specs import (
        DefaultLogsSpecs,
        LogsDest,
        LogsSpecs,
    )
    from rankwise.compat.torch.elastic.multiprocessing.results import RunProcsResult
    from rankwise.compat.torch.elastic.multiprocessing.std import Std, to_map

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]

__getattr__ = lazy_names(
    __name__,
    {
        "DefaultLogsSpecs": "logs_specs",
        "LogsDest": "logs_specs",
        "LogsSpecs": "logs_specs",
        "MultiprocessContext": "api",
        "PContext": "api",
        "ProcessFailure": "errors",
        "RunProcsResult": "results",
        "SignalException": "api",
        "Std": "std",
        "SubprocessContext": "api",
        "api": "api",
        "errors": "errors",
        "redirects": "redirects",
        "start_processes": "api",
        "subprocess_handler": "subprocess_handler",
        "tail_log": "tail_log",
        "to_map": "std",
    },
)
