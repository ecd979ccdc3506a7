"""Loops that keep the CPUs of this machine busy while a test lasts."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

VARIABLE = "RANKWISE_CORPUS_BUSY"
"""How many loops run beside the whole corpus (`make corpus-busy`)."""
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10000))"
"""Ends with the process that has started it."""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep so many CPUs busy."""
    with ExitStack() as stack:
        for _ in range(count):
            loop = subprocess.Popen([sys.executable, "-c", LOOP])
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        yield


def loops_wanted() -> int:
    """How many loops the whole corpus is to run beside."""
    return int(os.environ.get(VARIABLE, "0"))
