"""What NVIDIA's driver tells of the GPUs of this machine, through NVML (`nvidia-ml-py`).

Theory of operation
===================

NVML needs the extra `gpu` and a driver. A machine without one pays for a look at two files. Each
figure that a card or driver does not have is None; NVML has no other way to say so than an error
for each call.

A reading takes up to some ten milliseconds per GPU, so agents read in a thread. XID events come
from a call that blocks: one thread of the process waits for them, for all runs, and ends with the
process.

NVML numbers processes as the machine does. In a container these numbers mean nothing, or another
process. A number is therefore believed only if it is in the same PID namespace as this process
(`_is_known_namespace`), or if the process has a device of NVIDIA open.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.units import Instant
from rankwise.drivers.real.proc import may_have_gpus

_DEVICE = "/dev/nvidia"
"""With a number: the file of a GPU."""
_INITIAL_NAMESPACE = "pid:[4026531836]"
_FOR_EVER_MS = 0xFFFF_FFFF
_THROTTLING = {0x60: "thermal", 0x80: "power brake", 0x04: "power cap"}
"""Reasons of slow clocks, by their bits."""
_HARDWARE_SLOWDOWN = 0x08
"""Set beside the thermal reason and the power brake; alone, it has a cause that is not told."""


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment.

    Attributes:
        index: its number, as `nvidia-smi` has it.
        uuid, name: its identity and its model.
        memory_bytes, memory_bytes_max: in use, by all processes, and there in all.
        utilisation: the share of the last second or less in which a kernel ran, 0 to 1.
        temperature_c: of the chip, in degrees Celsius.
        throttled_by: why its clocks are slow now: `thermal`, `power brake`, `power cap` (usual at
            full load) or `hardware`.
        throttled_ns: for how long they have been since the driver was loaded: `thermal` and
            `power cap`.
        ecc_errors: uncorrected errors of its memory since the driver was loaded.
        processes: the memory of each process on it, by NVML's number; None if that is not told.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int | None = None
    memory_bytes_max: int | None = None
    utilisation: float | None = None
    temperature_c: int | None = None
    throttled_by: tuple[str, ...] = ()
    throttled_ns: Mapping[str, int] = {}
    ecc_errors: int | None = None
    processes: Mapping[int, int | None] = {}


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank uses of the GPUs.

    Attributes:
        gpus: their numbers.
        memory_bytes: its own on them; None where it cannot be told from that of others.
        utilisation, temperature_c, throttled_by, throttled_ns: see `GpuReading`; of several GPUs
            the highest figure, and all reasons. The time is that of thermal reasons.
        ecc_errors: of all its GPUs.
    """

    gpus: tuple[int, ...]
    memory_bytes: int | None = None
    utilisation: float | None = None
    temperature_c: int | None = None
    throttled_by: tuple[str, ...] = ()
    throttled_ns: int | None = None
    ecc_errors: int | None = None


class Xid(msgspec.Struct, frozen=True):
    """An error that the driver has reported: of which GPU, its number, and when."""

    gpu: int
    number: int
    at: Instant


class Gpus:
    """The GPUs of this machine; methods may be called from any thread."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        self._names = [(nvml.nvmlDeviceGetUUID(each), nvml.nvmlDeviceGetName(each))
                       for each in self._handles]  # fmt: skip

    def read(self) -> list[GpuReading]:
        """Read all GPUs."""
        return [self._read(index) for index in range(len(self._handles))]

    def wait_for_xid(self) -> "Callable[[], Xid | None] | None":
        """A function that blocks until the next XID event; None if no GPU has such events.

        It returns None for an event that cannot be read, as when a GPU has fallen off the bus.
        """
        nvml = self._nvml
        events, is_any = nvml.nvmlEventSetCreate(), False
        for handle in self._handles:
            with suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                is_any = True
        if not is_any:
            return None

        def wait() -> Xid | None:
            try:
                event = nvml.nvmlEventSetWait_v2(events, _FOR_EVER_MS)
                index = nvml.nvmlDeviceGetIndex(event.device)
            except nvml.NVMLError:
                return None
            return Xid(int(index), int(event.eventData), Instant(time.monotonic_ns()))

        return wait

    def _read(self, index: int) -> GpuReading:
        nvml, handle = self._nvml, self._handles[index]

        def query(name: str, *args: Any) -> Any:
            try:
                return getattr(nvml, name)(handle, *args)
            except nvml.NVMLError:  # not every device supports every query
                return None

        memory = query("nvmlDeviceGetMemoryInfo")
        rates = query("nvmlDeviceGetUtilizationRates")
        bits = query("nvmlDeviceGetCurrentClocksEventReasons") or 0
        violations = {
            "thermal": query("nvmlDeviceGetViolationStatus", nvml.NVML_PERF_POLICY_THERMAL),
            "power cap": query("nvmlDeviceGetViolationStatus", nvml.NVML_PERF_POLICY_POWER),
        }
        processes = query("nvmlDeviceGetComputeRunningProcesses") or ()
        uuid, name = self._names[index]
        return GpuReading(
            index=index,
            uuid=uuid,
            name=name,
            memory_bytes=None if memory is None else int(memory.used),
            memory_bytes_max=None if memory is None else int(memory.total),
            utilisation=None if rates is None else rates.gpu / 100,
            temperature_c=query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            throttled_by=_reasons(bits),
            throttled_ns={
                why: int(each.violationTime) for why, each in violations.items() if each is not None
            },
            ecc_errors=query(
                "nvmlDeviceGetTotalEccErrors",
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            processes={int(each.pid): each.usedGpuMemory for each in processes},
        )


def _reasons(bits: int) -> tuple[str, ...]:
    reasons = tuple(why for mask, why in _THROTTLING.items() if bits & mask)
    is_hardware = bits & _HARDWARE_SLOWDOWN and not {"thermal", "power brake"}.intersection(reasons)
    return (*reasons, "hardware") if is_hardware else reasons


def open_gpus() -> Gpus | None:
    """The GPUs of this machine; None if there are none, or no extra to ask for them."""
    try:
        return require_gpus() if may_have_gpus() else None
    except ConfigError:
        return None


def require_gpus() -> Gpus:
    """The GPUs of this machine.

    Raises:
        ConfigError: the extra is missing, or NVML cannot be used.
    """
    try:
        import pynvml  # noqa: PLC0415  # the extra `gpu`
    except ImportError as error:
        raise ConfigError(
            "GPUs cannot be read: nvidia-ml-py is not installed",
            hint="pip install 'rankwise[gpu]'",
        ) from error
    try:
        pynvml.nvmlInit()
        return Gpus(pynvml)
    except pynvml.NVMLError as error:
        raise ConfigError(
            f"GPUs cannot be read: NVML: {error}", hint="nvidia-smi tells whether the driver works"
        ) from error


def uses_of(readings: Iterable[GpuReading], leaders: Iterable[int]) -> dict[int, GpuUse]:
    """What each of these processes, with its session, uses of the GPUs, where that is known.

    Where NVML's processes are not known, as in a container, a process that was given exactly one
    GPU is on that one; how much of its memory it has is unknown.
    """
    readings = tuple(readings)
    sizes = _bytes_by_session(readings)
    uses = {}
    for leader in leaders:
        own = sizes.get(leader)
        if own is None and (only := _only_visible(leader, readings)) is not None:
            own = {only.index: None}
        if own is not None:
            uses[leader] = _use([each for each in readings if each.index in own], own)
    return uses


def _use(readings: Sequence[GpuReading], sizes: Mapping[int, int | None]) -> GpuUse:
    known = [size for size in sizes.values() if size is not None]
    busy = [each.utilisation for each in readings if each.utilisation is not None]
    warm = [each.temperature_c for each in readings if each.temperature_c is not None]
    slow = [each.throttled_ns["thermal"] for each in readings if "thermal" in each.throttled_ns]
    errors = [each.ecc_errors for each in readings if each.ecc_errors is not None]
    return GpuUse(
        gpus=tuple(each.index for each in readings),
        memory_bytes=sum(known) if known else None,
        utilisation=max(busy, default=None),
        temperature_c=max(warm, default=None),
        throttled_by=tuple(dict.fromkeys(why for each in readings for why in each.throttled_by)),
        throttled_ns=max(slow, default=None),
        ecc_errors=sum(errors) if errors else None,
    )


def _bytes_by_session(readings: Iterable[GpuReading]) -> dict[int, dict[int, int | None]]:
    """The memory of each session on each GPU, by the process that leads it."""
    is_known = _is_known_namespace()
    found: dict[int, dict[int, int | None]] = {}
    for reading in readings:
        for pid, size in reading.processes.items():
            if not (is_known or _has_device_open(pid)):
                continue
            try:
                session = os.getsid(pid)
            except OSError:
                continue  # it has ended, or is in another container
            sizes = found.setdefault(session, {})
            before = sizes.get(reading.index)
            sizes[reading.index] = size if before is None or size is None else before + size
    return found


def _is_known_namespace() -> bool:
    """Whether processes have the numbers here that they have in NVML."""
    try:
        return os.readlink("/proc/self/ns/pid") == _INITIAL_NAMESPACE
    except OSError:
        return False


def _has_device_open(pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(f"{folder}/{name}").startswith(_DEVICE):
                    return True
    return False


def _only_visible(pid: int, readings: tuple[GpuReading, ...]) -> GpuReading | None:
    """The GPU of a process that was given exactly one in CUDA_VISIBLE_DEVICES."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = dict(each.partition(b"=")[::2] for each in file.read().split(b"\0"))
    except OSError:
        return None
    given = variables.get(b"CUDA_VISIBLE_DEVICES", b"").decode("utf-8", "replace").strip()
    named = (each for each in readings if str(each.index) == given or each.uuid == given)
    return next(named, None)


_listeners: list[Callable[[Xid], None]] = []
_listeners_lock = threading.Lock()
_thread: threading.Thread | None = None


def listen_for_xids(gpus: Gpus, on_xid: Callable[[Xid], None]) -> Callable[[], None]:
    """Call back in a thread at each XID event; returns what ends that."""
    global _thread  # noqa: PLW0603  # NVML blocks: one thread serves all runs of this process
    with _listeners_lock:
        _listeners.append(on_xid)
        if _thread is None and (wait := gpus.wait_for_xid()) is not None:
            _thread = threading.Thread(
                target=_listen, args=(wait,), name="rankwise-xids", daemon=True
            )
            _thread.start()

    def end() -> None:
        with _listeners_lock, suppress(ValueError):
            _listeners.remove(on_xid)

    return end


def _listen(wait: Callable[[], Xid | None]) -> None:
    failures = 0
    while failures < 3:  # NVML that cannot wait any more answers at once: do not spin
        xid = wait()
        failures = failures + 1 if xid is None else 0
        if xid is not None:
            with _listeners_lock:
                listeners = tuple(_listeners)
            for on_xid in listeners:
                on_xid(xid)
