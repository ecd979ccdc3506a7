"""Starts a program as one local rank."""

from rankwise.compat.torch.elastic.multiprocessing.subprocess_handler.handlers import (
    get_subprocess_handler,
)
from rankwise.compat.torch.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
