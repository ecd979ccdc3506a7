"""Writes events to the loggers of their destinations."""

import logging
import os
import sys
from typing import Any

from rankwise.compat.torch.elastic.events.api import Event, NodeState, RdzvEvent

RENDEZVOUS_DESTINATION = "dynamic_rendezvous"

_events_loggers: dict[str, logging.Logger] = {}


def record(event: Event, destination: str = "null") -> None:
    """Write an event to a destination.

    Raises:
        KeyError: there is no such destination.
    """
    _get_or_create_logger(destination).info(event.serialize())


def record_rdzv_event(event: RdzvEvent) -> None:
    """Write an event to the destination of all rendezvous events."""
    _get_or_create_logger(RENDEZVOUS_DESTINATION).info(event.serialize())


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Make a rendezvous event of what the caller knows, and write it.

    Costs nothing without a listener. The event's name is `<file>:<name>` with the caller's file;
    without a name, the caller's function stands for it. A failed node's event carries the
    traceback of the exception being handled.
    """
    if isinstance(_handler_of(RENDEZVOUS_DESTINATION), logging.NullHandler):
        return
    import socket  # noqa: PLC0415  # only with a handler
    import traceback  # noqa: PLC0415  # the same

    from rankwise.drivers.real.stores.names import full_name_of  # noqa: PLC0415  # the same

    caller = sys._getframe(1).f_code  # noqa: SLF001  # one frame; inspect.stack reads all sources
    _package().record_rdzv_event(
        RdzvEvent(
            name=f"{os.path.basename(caller.co_filename)}:{name or caller.co_name}",
            run_id=run_id,
            message=message,
            hostname=hostname or full_name_of(socket.gethostname()),
            pid=pid or os.getpid(),
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=traceback.format_exc() if node_state is NodeState.FAILED else "",
        )
    )


def _get_or_create_logger(destination: str = "null") -> logging.Logger:
    if destination not in _events_loggers:
        handler = _handler_of(destination)
        logger = logging.getLogger(f"torchelastic-events-{destination}")
        logger.setLevel(os.environ.get("LOGLEVEL", "INFO"))
        logger.propagate = False
        if handler not in logger.handlers:
            logger.addHandler(handler)
        _events_loggers[destination] = logger
    return _events_loggers[destination]


def _handler_of(destination: str) -> logging.Handler:
    handler: logging.Handler = _package().get_logging_handler(destination)
    return handler


def _package() -> Any:
    """The package, whose names a program may have replaced."""
    from rankwise.compat.torch.elastic import events  # noqa: PLC0415  # the package imports us

    return events
