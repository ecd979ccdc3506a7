"""In which control groups this process is, and where their files are.

Version 1 has a hierarchy for each controller, version 2 one for all; a machine may have both. A
container usually sees a part of a hierarchy.
"""

from collections.abc import Iterator

UNIFIED = ""
"""Stands for the hierarchy of version 2, in place of a controller's name."""


def group_paths(root: str = "") -> dict[str, str]:
    """This process's group in each hierarchy, by the names of its controllers.

    Args:
        root: put before `/proc` and `/sys`; a directory in tests.
    """
    paths: dict[str, str] = {}
    for line in small_text(f"{root}/proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(",") if hierarchy != "0" else [UNIFIED]:
            paths[controller] = path
    return paths


def group_directories(root: str, path: str, controller: str) -> Iterator[tuple[str, ...]]:
    """For each mount of the hierarchy: the group's directory, then those of its ancestors.

    A container's mount may show only a part of the hierarchy, which then begins at the mount's
    root. A group outside that part (`/..`) has no directory here.
    """
    kind = "cgroup" if controller else "cgroup2"
    for line in small_text(f"{root}/proc/self/mountinfo").splitlines():
        place, _, source = line.partition(" - ")
        place_fields, source_fields = place.split(), source.split()
        if len(place_fields) < 5 or len(source_fields) < 3 or source_fields[0] != kind:
            continue
        if controller and controller not in source_fields[2].split(","):
            continue
        shown, mount_point = place_fields[3].rstrip("/"), place_fields[4]
        if not (path + "/").startswith(shown + "/") or path.startswith("/.."):
            continue
        names = [name for name in path[len(shown) :].split("/") if name]
        yield tuple(
            "/".join([f"{root}{mount_point}", *names[:depth]])
            for depth in range(len(names), -1, -1)
        )


def small_text(path: str) -> str:
    """The text of a small file; empty when it cannot be read, which every caller expects."""
    try:
        with open(path, "rb") as file:  # pathlib costs more than all of this
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
