"""The file that the interpreter is given for a worker: `python -u boot.py PROGRAM`.

The launcher's own interpreter usually is given a compiled `bootstrap.py` instead.

PROGRAM is `script.py ARGUMENTS`, `-m module ARGUMENTS`, or `-f` for the function in the payload.

A script's own code is compiled each time it is run, so this one only fetches the compiled
`bootstrap.py` beside it. It does so by file, not by import: the interpreter may be another one,
in which rankwise is not installed, and the program must find no module that it did not ask for.
The bootstrap takes over this module's names, so nothing may follow the last line.

Any Python understands this file, if only to say that it is too old.
"""

import sys

if sys.version_info < (3, 9):  # noqa: UP036 - PYTHON_EXEC may name another than the agent's
    sys.exit("rankwise: a rank needs Python 3.9 or later, not " + sys.executable)

import _frozen_importlib_external as _files  # always in memory; `importlib` is not

_bootstrap = type(_files)("rankwise-bootstrap")
_bootstrap.__file__ = __file__[: -len("boot.py")] + "bootstrap.py"
_files.SourceFileLoader(_bootstrap.__name__, _bootstrap.__file__).exec_module(_bootstrap)
_bootstrap.run_as_started()
