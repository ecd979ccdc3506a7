"""GPUs on a machine without any: NVIDIA's Python package, over a library in the place of NVML."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parent / "fakes" / "nvml.c"
NAME = "libnvidia-ml.so.1"
COMPILER = os.environ.get("CC", "cc").split()[0]

needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason="no C compiler for the library in NVML's place"
)


class FakeGpu(NamedTuple):
    """What the library tells of one GPU; MiB, %, degrees, bits, ns; -1 is "not supported"."""

    name: str = "Fake-H100"
    used: int = 1024
    total: int = 81_559
    busy: int = 87
    celsius: int = 64
    reasons: int = 0
    thermal_ns: int = 0
    power_ns: int = 0
    ecc: int = 0
    processes: tuple[tuple[int, int], ...] = ()

    def line(self) -> str:
        """The line that the library reads."""
        processes = " ".join(f"{pid}:{size}" for pid, size in self.processes)
        return f"{' '.join(map(str, self[:-1]))} {processes}\n"


class FakeGpus:
    """The GPUs of this machine, as processes with `environment` see them."""

    def __init__(self, folder: Path) -> None:
        self._state = folder / "gpus"
        self.xids = folder / "gpus.xids"
        self._library = folder / NAME
        subprocess.run(
            [COMPILER, "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", self._library, SOURCE],
            check=True,
        )
        os.mkfifo(self.xids)
        self._xids = os.open(self.xids, os.O_RDWR)
        self.environment = {
            "RANKWISE_GPUS": "1",
            "FAKE_NVML": str(self._state),
            "LD_LIBRARY_PATH": str(folder),
        }

    def set(self, gpus: Iterable[FakeGpu]) -> None:
        """Let the GPUs be these from now on."""
        new = self._state.with_suffix(".new")
        new.write_text("".join(gpu.line() for gpu in gpus))
        new.replace(self._state)

    def report_xid(self, gpu: int, number: int) -> None:
        """Let the driver report an error."""
        os.write(self._xids, f"{gpu} {number}\n".encode())

    def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process see them, too: a library that is loaded is found by its name."""
        for name in ("RANKWISE_GPUS", "FAKE_NVML"):
            monkeypatch.setenv(name, self.environment[name])
        ctypes.CDLL(str(self._library), mode=ctypes.RTLD_GLOBAL)

    def close(self) -> None:
        """Give the FIFO back."""
        os.close(self._xids)
