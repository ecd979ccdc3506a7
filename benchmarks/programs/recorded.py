"""Runs a program of torch whose flight recorder is written to a file twice a second.

gloo writes it never by itself, and does not enter the groups, which
`python -m torch.distributed.flight_recorder.fr_trace` needs: both are done here. This is the best
that somebody with a CPU can have.
"""

import os
import pickle
import runpy
import sys
import threading

import torch
import torch.distributed.distributed_c10d as c10d

INTERVAL = 0.5


def write() -> None:
    """Replace the file of this rank by what its recorder has now."""
    dump = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())  # noqa: SLF001  # no public way
    groups = dict(c10d._world.pg_group_ranks)  # noqa: SLF001  # the same
    for group, members in groups.items():
        name = group.group_name
        dump.setdefault("pg_config", {}).setdefault(
            name, {"name": name, "desc": group.group_desc, "ranks": str([*members])}
        )
    path = os.path.join(os.environ["RECORDER_FOLDER"], f"rank_{os.environ['RANK']}")
    with open(f"{path}.part", "wb") as file:
        pickle.dump(dump, file)
    os.replace(f"{path}.part", path)


def keep_writing(is_over: threading.Event) -> None:
    while not is_over.wait(INTERVAL):
        write()


def main() -> None:
    is_over = threading.Event()
    threading.Thread(target=keep_writing, args=(is_over,), daemon=True).start()
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        is_over.set()
        write()


main()
