"""What hatchling asks while it builds a wheel: the compiled kernel, for who wants it.

With RANKWISE_COMPILED=1 the wheel gets what `compile_kernel.py` makes, and is one of this platform
and Python. Otherwise it stays pure, and nothing is needed that was not before. An editable
installation is never compiled: its sources change.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "RANKWISE_COMPILED"


def is_asked_for() -> bool:
    """Whether the kernel is to be compiled."""
    asked = os.environ.get(VARIABLE, "0")
    if asked not in {"0", "1"}:
        raise SystemExit(f"{VARIABLE} is {asked!r}, expected 0 or 1: whether to compile the kernel")
    return asked == "1"


class CompiledKernel(BuildHookInterface):  # type: ignore[misc] # hatchling is where wheels are built
    """Adds extension modules to a wheel."""

    def dependencies(self) -> list[str]:
        """What has to be there to build: a compiler's front, if we compile."""
        if not is_asked_for():
            return []
        project = tomllib.loads((Path(self.root) / "pyproject.toml").read_text())
        wanted: list[str] = project["dependency-groups"]["compile"]
        return wanted

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatchling where the modules belong."""
        if version == "editable" or not is_asked_for():
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="compiled_kernel_")
        folder = Path(self._scratch.name)
        script = Path(self.root) / "tools" / "compile_kernel.py"
        done = subprocess.run([sys.executable, script, folder], check=False)
        if done.returncode:
            raise SystemExit(
                f"the kernel could not be compiled, see above; without {VARIABLE} nothing is"
            )
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for module in folder.rglob("*.so"):
            build_data["force_include"][str(module)] = str(module.relative_to(folder))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Forget what is in the wheel now."""
        del version, build_data, artifact_path
        if hasattr(self, "_scratch"):
            self._scratch.cleanup()
