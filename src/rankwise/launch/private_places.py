"""Directories that a run makes for itself, and that must not outlive it.

The run removes its own when it ends, and its guardian when the agent is killed. A run inside a
worker of another one may be killed together with its guardian, which leaves nobody to remove
anything. So every run names a place for such runs to its workers, and removes that as well. Nothing
is there until a nested run makes it.
"""

import contextlib
import os

NESTED_RUNS_VARIABLE = "RANKWISE_NESTED_RUNS"
"""Where runs inside a worker put what must not outlive the outer run."""


def new_private_path(*, may_survive: bool = False) -> str:
    """A unique path, of a directory yet to be made.

    It is known before it is made, so that somebody can be asked in time to remove it.

    Args:
        may_survive: whether the directory might have to outlive the run around this one.
    """
    parent = "" if may_survive else os.environ.get(NESTED_RUNS_VARIABLE, "")
    return os.path.join(parent or _temporary_directory(), f"rankwise_{os.urandom(8).hex()}")


def make_private_directory(path: str) -> None:
    """Make the directory of a new private path; other users may not look into it."""
    os.makedirs(path, 0o700)


def remove_tree(directory: str) -> None:
    """Remove what can be removed; `shutil` would take 10 ms to import at the end of every run."""
    for parent, directories, files in os.walk(directory, topdown=False):
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(parent, name))
        for name in directories:
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                if os.path.islink(path):
                    os.unlink(path)
                else:
                    os.rmdir(path)
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _temporary_directory() -> str:
    candidate = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - a private one is made inside
    if os.access(candidate, os.W_OK | os.X_OK, effective_ids=True):
        return os.path.abspath(candidate)
    # Knows more places, but takes 15 ms to import.
    from tempfile import gettempdir  # noqa: PLC0415

    return gettempdir()
