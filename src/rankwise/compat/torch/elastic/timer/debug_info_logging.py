"""What is told of timers that have run out, for those who look into the log."""

import json
import logging

__all__ = ["log_debug_info_for_expired_timers"]

logger = logging.getLogger(__name__)


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Log the timers that have run out, by pid, each as its request's JSON."""
    if expired_timers:
        logger.info("timers expired for run %s: %s", run_id, json.dumps(expired_timers))
