"""Loggers that write to stderr at the level in LOGLEVEL."""

import logging
import os
import sys

from rankwise.compat.torch.elastic.utils.log_level import get_log_level

__all__ = ["get_logger"]


def get_logger(name: str | None = None) -> logging.Logger:
    """Make a logger; without a name, the calling module's."""
    logger = logging.getLogger(name or _derive_module_name(depth=2))
    logger.setLevel(os.environ.get("LOGLEVEL", get_log_level()))
    return logger


def _derive_module_name(depth: int = 1) -> str:
    """The name of the module `depth` frames up the stack, or of its file."""
    try:
        frame = sys._getframe(depth)  # noqa: SLF001  # one frame; inspect.stack reads all sources
    except ValueError:
        return "<unknown>"
    name = str(frame.f_globals.get("__name__", "__main__"))
    if name != "__main__":
        return name
    return os.path.splitext(os.path.basename(frame.f_code.co_filename))[0]
