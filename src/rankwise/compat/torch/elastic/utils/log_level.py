"""The level of this package's loggers."""

__all__ = ["get_log_level"]


def get_log_level() -> str:
    """The level that applies where the environment's LOGLEVEL says nothing."""
    return "WARNING"
