"""Which accelerators this machine has, found out without importing torch.

The drivers say so in files: NVIDIA's in `/proc/driver/nvidia/gpus`, AMD's in the topology of
`/sys/class/kfd`. A container sees those of the whole host, so a device counts only when its node
in `/dev` is there too. `CUDA_VISIBLE_DEVICES` and its kin then choose among them by the drivers'
rule: the list ends at the first entry that names no device.

Every other kind of device is known to torch alone; a short-lived interpreter is asked, so that
the agent stays small.
"""

from collections.abc import Mapping
from pathlib import Path

from rankwise.base.errors import ConfigError

ROOT = Path("/")
_PATIENCE_S = 120
_NO_TORCH = "ModuleNotFoundError: No module named 'torch'\n"


class TorchMissing(ConfigError):
    """There is no torch to ask."""


def visible_gpu_count(environ: Mapping[str, str], root: Path = ROOT) -> int:
    """How many NVIDIA or AMD devices a worker could use; 0 when there are none."""
    nvidia = _nvidia_device_count(root)
    if nvidia:
        return _count_chosen(environ.get("CUDA_VISIBLE_DEVICES"), nvidia)
    amd = _amd_device_count(root)
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        amd = _count_chosen(environ.get(variable), amd)
    return amd


def nvidia_bus_ids(root: Path = ROOT) -> list[str]:
    """PCI addresses of the NVIDIA devices that can be used here, in the order CUDA counts them.

    Where the driver tells nothing, every NVIDIA display or 3D controller on the bus counts.
    """
    if by_driver := [bus_id for bus_id, minor in _driver_devices(root) if _has_node(root, minor)]:
        return by_driver
    devices = root / "sys/bus/pci/devices"
    return [
        name
        for name in _entries(devices)
        if text_of(devices / name / "vendor") == "0x10de"
        and text_of(devices / name / "class").startswith("0x03")
    ]


def device_count_by_torch(kind: str, python: str) -> int:
    """Ask torch, in an interpreter of its own, how many devices of `kind` there are.

    Raises:
        TorchMissing: there is none.
        ConfigError: torch does not know the kind, or cannot be imported there.
    """
    import subprocess  # noqa: PLC0415 - rarely needed, and slow to import

    question = (
        "import sys, torch\n"
        "module = torch.get_device_module(sys.argv[1])\n"
        "print(module.device_count() if module.is_available() else 0)\n"
    )
    try:
        answer = subprocess.run(
            [python, "-c", question, kind],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:  # its own text has the whole question
        raise ConfigError(
            f"torch was asked for the number of {kind!r} devices, and did not answer for"
            f" {_PATIENCE_S} s"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"torch could not be asked for the number of {kind!r} devices: {error}"
        ) from error
    if answer.returncode == 0 and answer.stdout.strip().isdigit():
        return int(answer.stdout)
    if "Expected one of" in answer.stderr:  # followed by all the types that torch has
        raise ConfigError(f"torch has no device type {kind!r}")
    if _NO_TORCH in answer.stderr:
        raise TorchMissing(f"torch, which counts {kind!r} devices, is not installed")
    reason = answer.stderr.strip().rpartition("\n")[2] or f"exit code {answer.returncode}"
    raise ConfigError(f"torch cannot count {kind!r} devices: {reason}")


def _count_chosen(chosen: str | None, count: int) -> int:
    """How many of `count` devices a list such as `0,2` or `GPU-5ebe…,GPU-7a11…` leaves."""
    if chosen is None:
        return count
    kept: list[str] = []
    for entry in map(str.strip, chosen.split(",")):
        # Whether a name is that of a device here, only the driver knows; there must be one for it.
        is_named = _has_device(entry, kept, count)
        is_number = entry.isdecimal() and int(entry) < count
        if not (is_named or is_number):
            break
        if entry in kept:
            return 0  # naming a device twice hides all of them
        kept.append(entry)
    return len(kept)


def _has_device(entry: str, kept: list[str], count: int) -> bool:
    match entry[:4].upper():
        case "GPU-":
            return len(kept) < count
        case "MIG-":  # a slice: a device has several
            return count > 0
        case _:
            return False


def _nvidia_device_count(root: Path) -> int:
    if devices := _driver_devices(root):
        return sum(_has_node(root, minor) for _, minor in devices)
    return sum(
        name.startswith("nvidia") and name[len("nvidia") :].isdecimal()
        for name in _entries(root / "dev")
    )


def _driver_devices(root: Path) -> list[tuple[str, str]]:
    """PCI address and minor number of each device that NVIDIA's driver drives, in bus order."""
    folder = root / "proc/driver/nvidia/gpus"
    found = []
    for bus_id in _entries(folder):
        for line in text_of(folder / bus_id / "information").splitlines():
            key, _, value = line.partition(":")
            if key == "Device Minor":
                found.append((bus_id, value.strip()))
    return found


def _has_node(root: Path, minor: str) -> bool:
    return (root / "dev" / f"nvidia{minor}").exists()


def _amd_device_count(root: Path) -> int:
    if not (root / "dev/kfd").exists():
        return 0
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    # CPUs are nodes too, with the number 0; nodes of other containers cannot be read.
    return sum(text_of(nodes / name / "gpu_id") not in ("", "0") for name in _entries(nodes))


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def text_of(path: Path) -> str:
    """What the kernel tells in a small file; empty if it has none of that name."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
