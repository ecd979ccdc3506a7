"""A script as a function: what `--run-path` has its workers call."""

import runpy
import sys


def run_script_path(script: str, *args: str) -> None:
    """Run a script as `__main__` inside the interpreter that calls this."""
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
