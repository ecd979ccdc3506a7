"""`record`: let a program's main function leave its exception behind for the launcher."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from rankwise.compat.torch.elastic.multiprocessing.errors.handlers import get_error_handler

if TYPE_CHECKING:
    from rankwise.compat.torch.elastic.multiprocessing.errors.error_handler import ErrorHandler
    from rankwise.compat.torch.elastic.multiprocessing.errors.process_failure import (
        ChildFailedError,
    )

__all__ = ["record"]

logger = logging.getLogger(__name__)

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


def record(
    fn: Callable[ParamsT, ResultT], error_handler: "ErrorHandler | None" = None
) -> Callable[ParamsT, ResultT | None]:
    """Make `fn` write the exception that it dies of to the error file, then raise it on.

    - `SystemExit(0)` is a success: the decorated function returns None.
    - Any other `SystemExit` goes through unrecorded: the exit code tells all there is.
    - `ChildFailedError` is not recorded itself; its first failure's error file is copied.

    An exception inside a generator's or a coroutine's body is its caller's affair: `record` sees
    the call only, so it may stand under `contextmanager`.

    Args:
        fn: a program's or a worker's main function.
        error_handler: what writes; made by `get_error_handler` when missing.
    """
    handler = error_handler or get_error_handler()

    @wraps(fn)
    def recorded(*args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT | None:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as exit_request:
            if exit_request.code == 0:
                return None
            raise
        except Exception as error:
            _leave_behind(error, handler)
            raise

    return recorded


def _leave_behind(error: Exception, handler: "ErrorHandler") -> None:
    """Record `error`; a disk that is full must not put another exception in its place."""
    # Imported here since a program that succeeds needs neither its sockets nor its dataclasses.
    from rankwise.compat.torch.elastic.multiprocessing.errors import process_failure  # noqa: PLC0415

    try:
        if isinstance(error, process_failure.ChildFailedError):
            _pass_on(error, handler)
        else:
            handler.record_exception(error)
    except OSError as failure:
        logger.warning("the error file cannot be written: %s", failure)


def _pass_on(error: "ChildFailedError", handler: "ErrorHandler") -> None:
    rank, failure = error.get_first_failure()
    if failure.has_error_file:
        handler.dump_error_file(failure.error_file, failure.exitcode)
    else:
        logger.info(
            "local rank %s (rank %s, pid %s, exit code %s) failed and left no error file;"
            " decorate its main function with `record` to see its traceback here",
            failure.local_rank,
            rank,
            failure.pid,
            failure.exitcode,
        )
