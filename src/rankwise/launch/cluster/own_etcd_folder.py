"""The folder of a member of the run's own etcd, whatever becomes of its agent.

The agent removes it, or its guardian if the agent is killed. If both are killed at once it stays,
with 64 MB and more. So an agent holds a lock on its folder for as long as it lives, and before that
it removes those of this user that nobody holds. A folder gets its name when it is locked: nobody
can find one that is about to be locked.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from rankwise.launch.private_places import remove_tree

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def held_folder(place: Path) -> Iterator[Path]:
    """A new folder in `place`, a private directory of the run; both go with the agent.

    Folders like that which nobody holds, in places next to this one, are removed first.
    """
    for other in place.parent.glob("rankwise_*/etcd"):
        _remove_abandoned(other)
    place.mkdir(mode=0o700, exist_ok=True)
    unnamed, folder = place / "etcd.new", place / "etcd"
    unnamed.mkdir(mode=0o700)
    fd = os.open(unnamed, _FOLDER)
    try:
        with suppress(OSError):  # where nothing can be locked, nothing is taken for abandoned
            flock(fd, LOCK_EX | LOCK_NB)
        unnamed.rename(folder)
        yield folder
    finally:
        os.close(fd)


def _remove_abandoned(folder: Path) -> None:
    """Remove the place of a folder, unless somebody holds it, or it is another user's."""
    with suppress(OSError):
        if any(os.lstat(path).st_uid != os.geteuid() for path in (folder.parent, folder)):
            return
        fd = os.open(folder, _FOLDER)
        try:
            flock(fd, LOCK_EX | LOCK_NB)
            remove_tree(str(folder.parent))
        finally:
            os.close(fd)
