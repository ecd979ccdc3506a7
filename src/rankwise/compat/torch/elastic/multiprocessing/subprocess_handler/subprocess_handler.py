"""One program as a child process, in a session of its own.

This is torch's small building block, for programs that use it on their own. rankwise's own workers
are started through a guardian, which also sees to it that nothing outlives them.
"""

import os
import signal
import subprocess
from contextlib import ExitStack, suppress
from typing import Any

from rankwise.compat.torch.elastic.multiprocessing.numa import refuse_numa_options

__all__ = ["SubprocessHandler"]


class SubprocessHandler:
    """Starts a program at once, with its output in files where that is asked for.

    Args:
        entrypoint: the program, looked up in PATH.
        args: its arguments, written with `str`.
        env: variables added to this process's environment.
        stdout: a file for its standard output; None or "" lets it inherit this process's.
        stderr: the same for its standard error.
        local_rank_id: its number on this node.
        numa_options: a lone process is not bound; must be None.

    Attributes:
        proc: the `subprocess.Popen`.
        local_rank_id: as given.

    Raises:
        OSError: the program cannot be started or a file not be opened.
        ConfigError: NUMA options were given.
    """

    def __init__(
        self,
        entrypoint: str,
        args: tuple[Any, ...],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: None = None,
    ) -> None:
        refuse_numa_options(numa_options)
        self.local_rank_id = local_rank_id
        with ExitStack() as files:
            # The child has its own copies; ours would only keep the files open.
            self.proc = subprocess.Popen(
                args=[str(arg) for arg in (entrypoint, *args)],
                env={**os.environ, **env},
                stdout=_open_for_writing(files, stdout),
                stderr=_open_for_writing(files, stderr),
                start_new_session=True,
            )

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the program's process group, SIGTERM unless told otherwise; do not wait for it.

        Harmless when nothing of the group is left.
        """
        with suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


def _open_for_writing(files: ExitStack, path: str | None) -> int | None:
    """Open and empty a file; its descriptor lives as long as `files`."""
    if not path:
        return None
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    files.callback(os.close, descriptor)
    return descriptor
