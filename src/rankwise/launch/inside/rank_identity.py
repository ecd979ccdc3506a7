"""A worker's place in its run, from the variables that its agent set."""

import os

from rankwise.base.errors import LocalProtocolError


def rank() -> int:
    """This worker's rank in the whole job; 0 in a program without a launcher."""
    return _number("RANK", 0)


def local_rank() -> int:
    """This worker's rank on its node; 0 in a program without a launcher."""
    return _number("LOCAL_RANK", 0)


def world_size() -> int:
    """How many ranks the job has; 1 in a program without a launcher."""
    return _number("WORLD_SIZE", 1)


def restart_count() -> int:
    """How often the gang has been started again; 0 in its first life."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def run_id() -> str:
    """The run's name, or the empty string in a program without a launcher."""
    return os.environ.get("RANKWISE_RUN_ID", "")


def _number(variable: str, alone: int) -> int:
    text = os.environ.get(variable)
    if text is None:
        return alone
    try:
        return int(text)
    except ValueError:
        raise LocalProtocolError(f"{variable} is {text!r}, expected a number") from None
