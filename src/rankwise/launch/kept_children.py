"""`--keep-children`: what ranks have left running lives on when the run has succeeded.

The guardian lets these processes be (see `drivers.real.hosting.guardian`). Their output came
through pipes that the agent reads. When it ends, a process of their own reads on and throws it
away: they would die of SIGPIPE otherwise, in the middle of an upload.
"""

import subprocess
import sys
from collections.abc import Sequence

from rankwise.drivers.real.hosting import drain


def discard_output(pipes: Sequence[int]) -> None:
    """Have these pipes read until nobody writes into them, however this process fares."""
    if pipes:
        subprocess.run(
            [sys.executable, "-I", "-S", drain.__file__, *map(str, pipes)],
            pass_fds=pipes,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            check=False,
        )
