"""Compile the inner loops of the simulator with mypyc.

    python tools/compile_kernel.py FOLDER [LEVEL]

Puts extension modules into FOLDER, at the places that they have beside the sources: where they are,
Python's own import prefers them. `hatch_hook.py` puts them into a wheel that is asked for them;
tests and benchmarks put them over a copy of the package. LEVEL is how much the C compiler
optimises, 0 to 3 (3). Needs mypy, setuptools and a C compiler.
See docs/adr/0037-the-kernel-can-be-compiled.md.
"""

import os
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "src"
COMPILED = (
    "rankwise/sim/kernel/futures.py",
    "rankwise/sim/kernel/simulator.py",
    "rankwise/sim/kernel/resources.py",
    "rankwise/sim/hardware/engines.py",  # its classes inherit from compiled ones, and so must be
    "rankwise/sim/hardware/links.py",
)
"""They become one library. What they import from elsewhere is untyped to them, and not compiled."""


def compile_into(folder: Path, level: str = "3") -> None:
    """Build the extension modules; exits with the compiler's words if it cannot."""
    try:
        from mypyc.build import mypycify  # noqa: PLC0415 (asked for only here)
        from setuptools import setup  # noqa: PLC0415
    except ImportError as missing:
        raise SystemExit(f"{missing}; to compile: pip install 'mypy[mypyc]' setuptools") from None
    folder = folder.resolve()
    os.chdir(SOURCES)  # tracebacks name the sources as they are named here
    with tempfile.TemporaryDirectory(prefix="compile_kernel_") as scratch:
        extensions = mypycify(
            [
                *("--config-file=", f"--cache-dir={scratch}", "--explicit-package-bases"),
                *("--follow-imports=skip", "--ignore-missing-imports"),
                *COMPILED,
            ],
            opt_level=level,
            debug_level="0",
            group_name="rankwise_sim",
            target_dir=scratch,
        )
        setup(
            name="rankwise",
            packages=[],
            ext_modules=extensions,
            script_args=[
                *("-q", "build_ext", f"--build-lib={folder}", f"--build-temp={scratch}/objects"),
            ],
        )


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    compile_into(Path(sys.argv[1]), *sys.argv[2:])
