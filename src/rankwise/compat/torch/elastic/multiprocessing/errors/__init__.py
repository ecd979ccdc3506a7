"""How workers leave their exceptions behind, and how a launcher tells of them.

`record` writes a worker's exception to its error file; `ProcessFailure` reads it;
`ChildFailedError` reports the failures of a whole job.
"""

from typing import TYPE_CHECKING

from rankwise.compat.torch.lazy_names import lazy_names

if TYPE_CHECKING:
    from rankwise.compat.torch.elastic.multiprocessing.errors.error_handler import ErrorHandler
    from rankwise.compat.torch.elastic.multiprocessing.errors.handlers import get_error_handler
    from rankwise.compat.torch.elastic.multiprocessing.errors.process_failure import (
        ChildFailedError,
        ProcessFailure,
    )
    from rankwise.compat.torch.elastic.multiprocessing.errors.recording import record

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

__getattr__ = lazy_names(
    __name__,
    {
        "ChildFailedError": "process_failure",
        "ErrorHandler": "error_handler",
        "ProcessFailure": "process_failure",
        "error_handler": "error_handler",
        "get_error_handler": "handlers",
        "handlers": "handlers",
        "record": "recording",
    },
)
