"""Forking a process in which libraries have used threads of their own.

A fork has one thread, the one that forked. Libraries that calculate in parallel (OpenMP under torch
and others) keep their idle threads together with the thread for which they have worked: a copy of
that thread believes that they are there, and waits for them for ever. A new thread has none, so its
copy starts threads of its own when it needs them. OpenBLAS, under numpy, sees to it itself.

A library whose threads work for the whole process is another matter: its copy has no such thread.
Such threads have names; those of OpenMP and OpenBLAS have the process's.
"""

import contextvars
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_TASKS = Path("/proc/self/task")


def fork_from_new_thread(become: Callable[[], NoReturn], on_forked: Callable[[int], None]) -> None:
    """Fork this process from a new thread, which becomes the main thread of the child.

    Args:
        become: runs in the child, with the caller's context variables.
        on_forked: gets the pid of the child, even if the caller is interrupted meanwhile.

    Raises:
        OSError: the fork failed.
    """
    failures: list[OSError] = []

    def fork() -> None:
        try:
            pid = _fork_without_warning()
        except OSError as error:
            failures.append(error)
            return
        if pid == 0:
            become()
        on_forked(pid)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(fork,), name=threading.main_thread().name)
    thread.start()
    try:
        thread.join()
    finally:
        thread.join()  # an interrupt does not keep the caller from hearing of the copy
    if failures:
        raise failures[0]


def _fork_without_warning() -> int:
    """Python warns of forks beside threads from 3.12 on; the caller has looked who they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def named_native_threads() -> list[str]:
    """The names of threads that are not Python's and have other names than the process."""
    own = {str(thread.native_id) for thread in threading.enumerate()}
    names = set()
    with suppress(FileNotFoundError):  # one has ended just now
        process = (_TASKS / str(os.getpid()) / "comm").read_text()
        for task in _TASKS.iterdir():
            if task.name not in own:
                names.add((task / "comm").read_text().strip())
        names.discard(process.strip())
    return sorted(names)
