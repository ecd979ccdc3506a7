"""A script is compiled once on each node, and not once by each of its workers.

The first `compile` in a process takes a millisecond, whatever it compiles, since Python then makes
the classes of its syntax tree; a long script takes tens of them. The workers get the code in a file
that they share, with a stamp of what it was made from. `bootstrap.py` compares the stamp; it
compiles the script itself if that has changed, or if the worker is another interpreter.
"""

import marshal
import os
import stat
import warnings

from rankwise.drivers.real.worker.bootstrap import stamp_of_script


def compiled_script(path: str) -> bytes:
    """Compile a script as a worker in this directory would.

    Nothing is said here about a script that is missing, or about what its compiler has to say: its
    workers will find that, each with its prefix, and get no code from here.
    """
    location = path if path.startswith("/") else f"{os.getcwd()}/{path}"
    try:
        if not _can_be_read(location):
            return b""
        with open(location, "rb", buffering=0) as file, warnings.catch_warnings():
            warnings.simplefilter("error")
            stamp = stamp_of_script(os.fstat(file.fileno()))
            return stamp + marshal.dumps(compile(file.read(), location, "exec", dont_inherit=True))
    except (OSError, SyntaxError, ValueError, Warning, RecursionError, MemoryError):
        return b""


def _can_be_read(location: str) -> bool:
    """Tell whether to read it ends: a device may never end, and a FIFO may never have a writer.

    A pipe without a name, of `rankwise run <(command)`, has one; and the first reader leaves
    nothing to the others, so it is read here, for all of them.
    """
    mode = os.stat(location).st_mode
    is_nameless = not os.path.lexists(os.path.realpath(location))
    return stat.S_ISREG(mode) or (stat.S_ISFIFO(mode) and is_nameless)
