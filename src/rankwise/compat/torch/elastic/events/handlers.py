"""Where events go: logging handlers by destination.

To add a destination, put a handler into `_log_handlers` before its first event is recorded.
"""

import logging

_log_handlers: dict[str, logging.Handler] = {
    "console": logging.StreamHandler(),
    "dynamic_rendezvous": logging.NullHandler(),
    "null": logging.NullHandler(),
}


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Find a destination's handler.

    Raises:
        KeyError: there is no such destination.
    """
    return _log_handlers[destination]
