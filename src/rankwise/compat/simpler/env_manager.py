"""Environment variables that are looked up once."""

import os

_found: dict[str, str] = {}


def ensure(name: str) -> str:
    """The value of a variable, as it was when it was first asked for.

    Raises:
        OSError: it is not set, or empty.
    """
    if name not in _found:
        value = os.environ.get(name)
        if not value:
            raise OSError(f"the environment variable {name} is not set")
        _found[name] = value
    return _found[name]


def get(name: str) -> str | None:
    """The value that `ensure` has found; None if it was not asked, or has found none."""
    return _found.get(name)
