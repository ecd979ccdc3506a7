"""A folder that lives as long as the process that holds it, however that ends.

The data of a member of the run's own etcd are removed by the agent, or by its guardian if the agent
is killed; if both are killed at once they stay, with 64 MB and more. What simulated ranks leave has
no guardian. So a process holds a lock on its folder for as long as it lives, and before that it
removes those of this user that nobody holds. A folder gets its name when it is locked: nobody can
find one that is about to be locked.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from rankwise.launch.private_places import remove_tree

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OF_ETCD, OF_SIMULATED_RANKS = "etcd", "simulated"
"""What folders are held as."""


@contextmanager
def held_folder(place: Path, name: str) -> Iterator[Path]:
    """A new folder in `place`, a private directory of the run; both go with this process.

    Folders of that name which nobody holds, in places next to this one, are removed first.
    """
    for other in place.parent.glob(f"rankwise_*/{name}"):
        _remove_abandoned(other)
    place.mkdir(mode=0o700, exist_ok=True)
    unnamed, folder = place / f"{name}.new", place / name
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
