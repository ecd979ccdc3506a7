"""Directories that a run makes for itself, and that must not outlive it.

The run removes its own when it ends, and its guardian when the agent is killed. A run inside a
worker of another one may be killed together with its guardian, which leaves no process to remove
anything. So every run names a place for such runs to its workers, and removes that as well. Nothing
is there until a nested run makes it.

If the agent and its guardian are killed at once, none is left either; nor has a run of simulated
ranks a guardian. So what is in such a directory is in a *held folder*: its process has a lock on it
for as long as it lives, and the next run of this user removes those without a lock. A folder gets
its name when it is locked: one that is about to be locked cannot be found. A directory that the
user has asked for is in no such folder.
"""

import contextlib
import os
from collections.abc import Iterator
from fcntl import LOCK_EX, LOCK_NB, flock

NESTED_RUNS_VARIABLE = "RANKWISE_NESTED_RUNS"
"""Where runs inside a worker put what must not outlive the outer run."""
OF_ETCD, OF_RUN = "etcd", "run"
"""What is in a held folder: the data of a member of the run's own etcd, or what ranks report."""
_PREFIX = "rankwise_"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def new_private_path(*, may_survive: bool = False) -> str:
    """A unique path, of a directory yet to be made.

    It is known before it is made, so that another process can be asked in time to remove it.

    Args:
        may_survive: whether the directory might have to outlive the run around this one.
    """
    parent = "" if may_survive else os.environ.get(NESTED_RUNS_VARIABLE, "")
    return os.path.join(parent or temporary_directory(), f"{_PREFIX}{os.urandom(8).hex()}")


def make_private_directory(path: str) -> None:
    """Make the directory of a new private path; other users may not look into it."""
    os.makedirs(path, 0o700)


@contextlib.contextmanager
def held_folder(place: str, name: str) -> Iterator[str]:
    """A folder in `place`, a private directory, made if need be, that is removed in time.

    Args:
        place: what `remove_abandoned` removes if this process leaves it behind.
        name: `OF_ETCD` or `OF_RUN`, by what is in there.
    """
    os.makedirs(place, 0o700, exist_ok=True)
    unnamed, folder = os.path.join(place, f"{name}.new"), os.path.join(place, name)
    os.mkdir(unnamed, 0o700)
    fd = os.open(unnamed, _FOLDER)
    try:
        with contextlib.suppress(OSError):  # where nothing can be locked, nothing is abandoned
            flock(fd, LOCK_EX | LOCK_NB)
        os.rename(unnamed, folder)
        yield folder
    finally:
        os.close(fd)


def remove_abandoned(path: str) -> None:
    """Remove the private directories beside `path` whose folders were held, and are not any more.

    Where runs are killed often, this takes tens of milliseconds: no rank should wait for it.
    """
    parent = os.path.dirname(path)
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(_PREFIX):
                for held in (OF_ETCD, OF_RUN):
                    _remove_if_abandoned(os.path.join(parent, name), held)


def _remove_if_abandoned(place: str, name: str) -> None:
    with contextlib.suppress(OSError):
        folder = os.path.join(place, name)
        if any(os.lstat(path).st_uid != os.geteuid() for path in (place, folder)):
            return
        fd = os.open(folder, _FOLDER)
        try:
            flock(fd, LOCK_EX | LOCK_NB)
            remove_tree(place)
        finally:
            os.close(fd)


def remove_tree(directory: str) -> None:
    """Remove what can be removed; `shutil` would take 10 ms to import at the end of every run."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(directory)):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
        os.rmdir(directory)


def temporary_directory() -> str:
    """Where temporary files go; nothing can be written there if no place is writable."""
    candidate = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - a private one is made inside
    if os.access(candidate, os.W_OK | os.X_OK, effective_ids=True):
        return os.path.abspath(candidate)
    # Knows more places, but takes 15 ms to import.
    from tempfile import gettempdir  # noqa: PLC0415

    try:
        return gettempdir()
    except FileNotFoundError:  # a read-only root: most runs need no file
        return os.path.abspath(candidate)
