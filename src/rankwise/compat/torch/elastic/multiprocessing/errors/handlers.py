"""Which error handler `record` uses when it is given none."""

from rankwise.compat.torch.elastic.multiprocessing.errors.error_handler import ErrorHandler

__all__ = ["get_error_handler"]


def get_error_handler() -> ErrorHandler:
    """Make the handler that writes to the file named by TORCHELASTIC_ERROR_FILE."""
    return ErrorHandler()
