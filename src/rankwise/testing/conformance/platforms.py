"""What every platform must do, so that a program of chips behaves alike on all of them.

A behaviour is a function that takes a platform and a callable of it that adds: three vectors of
float32 of the same length and that length, `out = x + y`. Chips 0 and 1 must exist. The suite looks
at nothing but what the port promises, so it suits platforms with private memory too.

Loaded by itself, `from rankwise.testing.conformance.platforms import check_platform`, since it
brings numpy along.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rankwise.base.errors import ConfigError
from rankwise.core.tasks.calls import ChipCallConfig
from rankwise.core.tasks.tensors import ContinuousTensor, DataType
from rankwise.workers.arguments import TaskArgs
from rankwise.workers.callables import ChipCallable
from rankwise.workers.errors import BadArguments, BadPointer
from rankwise.workers.platforms.port import Device, Platform, TaskReport

Behaviour = Callable[[Platform, ChipCallable], None]
_COUNT = 300
_BYTES = 4 * _COUNT


def check_platform(make: Callable[[], Platform], add: ChipCallable) -> None:
    """Assert every behaviour on a platform that `make` makes anew for each."""
    for name, behaviour in PLATFORM_BEHAVIOURS.items():
        try:
            behaviour(make(), add)
        except AssertionError as error:
            error.add_note(f"the platform does not keep: {name}")
            raise


@contextmanager
def _opened(platform: Platform, chip: int = 0) -> Iterator[Device]:
    device = platform.open(chip)
    try:
        yield device
    finally:
        device.close()


def _vector(start: float) -> Any:
    return np.arange(start, start + _COUNT, dtype=np.float32)


def _task(*tensors: Any) -> TaskArgs:
    args = TaskArgs()
    for tensor in tensors:
        args.add_tensor(tensor)
    args.add_scalar(_COUNT)
    return args


def _run(device: Device, add: ChipCallable, args: TaskArgs, not_before_ps: int = 0) -> TaskReport:
    return device.run(add, args, ChipCallConfig(), not_before_ps)


def _tensor(address: int, *, child_memory: bool = True) -> ContinuousTensor:
    return ContinuousTensor(address, (_COUNT,), DataType.FLOAT32, child_memory)


def _loaded(device: Device, array: Any) -> ContinuousTensor:
    pointer = device.malloc(_BYTES)
    device.copy_to(pointer, array.ctypes.data, _BYTES)
    return _tensor(pointer)


def _read(device: Device, pointer: int) -> Any:
    array = np.full(_COUNT, np.nan, np.float32)
    device.copy_from(array.ctypes.data, pointer, _BYTES)
    return array


def _refuses(error: type[Exception], action: Callable[[], object], *words: str) -> None:
    refusal: Exception | None = None
    try:
        action()
    except error as raised:
        refusal = raised
    assert refusal is not None, f"expected {error.__name__}, and nothing was raised"
    for word in words:
        assert word in str(refusal), f"{refusal} does not say {word!r}"


def _bytes_come_back(platform: Platform, add: ChipCallable) -> None:
    del add
    with _opened(platform) as device:
        first, second = _loaded(device, _vector(0)), _loaded(device, _vector(1000))

        assert (_read(device, first.data) == _vector(0)).all()
        assert (_read(device, second.data) == _vector(1000)).all()
        middle = np.empty(10, np.float32)
        device.copy_from(middle.ctypes.data, second.data + 40, 40)
        assert (middle == _vector(1000)[10:20]).all()


def _new_memory_is_zero(platform: Platform, add: ChipCallable) -> None:
    del add
    with _opened(platform) as device:
        pointer = _loaded(device, _vector(5)).data
        device.free(pointer)

        assert not _read(device, device.malloc(_BYTES)).any()


def _tasks_compute_on_the_host_and_on_the_chip(platform: Platform, add: ChipCallable) -> None:
    with _opened(platform) as device:
        x, y, out = _vector(0), _vector(7), np.zeros(_COUNT, np.float32)
        held = [_loaded(device, array) for array in (x, y, out)]

        _run(device, add, _task(x, y, out))
        _run(device, add, _task(held[0], y, held[2]))

        assert (out == x + y).all()
        assert (_read(device, held[2].data) == x + y).all()


def _tasks_leave_no_memory_behind(platform: Platform, add: ChipCallable) -> None:
    with _opened(platform) as device:
        kept = device.malloc(_BYTES)
        before = device.committed_bytes

        _run(device, add, _task(_vector(0), _vector(1), _tensor(kept)))

        assert device.committed_bytes == before == _BYTES


def _pointers_tell_chips_apart(platform: Platform, add: ChipCallable) -> None:
    with _opened(platform, 0) as zero, _opened(platform, 1) as one:
        foreign = _loaded(one, _vector(0))
        own = _loaded(zero, _vector(0))
        assert foreign.data != own.data

        args = _task(own, foreign, own)
        _refuses(BadPointer, lambda: _run(zero, add, args), "chip 1", "chip 0", "argument 1")
        _refuses(BadPointer, lambda: zero.free(foreign.data), "chip 1", "chip 0")
        _refuses(BadPointer, lambda: _read(zero, foreign.data), "chip 1", "chip 0")


def _wrong_pointers_are_refused(platform: Platform, add: ChipCallable) -> None:
    with _opened(platform) as device:
        pointer = device.malloc(_BYTES)
        x = _vector(0)

        _refuses(BadPointer, lambda: device.free(pointer + 4))
        _refuses(BadPointer, lambda: device.free(0))
        _refuses(BadPointer, lambda: device.copy_to(pointer + 4, x.ctypes.data, _BYTES))
        _refuses(BadPointer, lambda: device.copy_to(pointer, 4096, 4))
        nowhere = _tensor(4096, child_memory=False)
        _refuses(BadPointer, lambda: _run(device, add, _task(x, x, nowhere)), "argument 2")
        device.free(pointer)
        _refuses(BadPointer, lambda: device.free(pointer))
        _refuses(BadPointer, lambda: _run(device, add, _task(x, x, _tensor(pointer))))
        _refuses(ConfigError, lambda: device.malloc(0))


def _wrong_arguments_are_refused_by_name(platform: Platform, add: ChipCallable) -> None:
    with _opened(platform) as device:
        args = TaskArgs()
        args.add_tensor(_vector(0))

        _refuses(BadArguments, lambda: _run(device, add, args), add.name)


def _attached_memory_is_shared(platform: Platform, add: ChipCallable) -> None:
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    with _opened(platform) as device:
        window = np.frombuffer(memory, np.float32, _COUNT)
        address = int(window.ctypes.data)
        device.attach(address, 2 * mmap.PAGESIZE, "a window")
        window[:] = _vector(3)
        behind = _tensor(address + mmap.PAGESIZE)

        _run(device, add, _task(_tensor(address), _tensor(address), behind))
        later = _vector(9)
        device.copy_to(address, later.ctypes.data, _BYTES)

        sums = np.frombuffer(memory, np.float32, _COUNT, mmap.PAGESIZE)
        assert (sums == 2 * _vector(3)).all()
        assert (window == later).all()
        assert device.committed_bytes == 0
        _refuses(BadPointer, lambda: device.free(address))
        device.detach(address)
        args = _task(_tensor(address), _tensor(address), behind)
        _refuses(BadPointer, lambda: _run(device, add, args))


def _time_only_goes_on(platform: Platform, add: ChipCallable) -> None:
    with _opened(platform) as device:
        args = _task(_vector(0), _vector(1), np.zeros(_COUNT, np.float32))

        reports = [_run(device, add, args, not_before) for not_before in (0, 10**9, 0)]

        for report in reports:
            assert report.start_ps <= report.end_ps
            assert (report.chip, report.task) == (0, add.name)
        assert reports[1].start_ps >= 10**9
        if reports[0].duration_ns:
            assert reports[2].start_ps >= reports[1].end_ps


def _leaks_are_told_at_the_end(platform: Platform, add: ChipCallable) -> None:
    del add
    device = platform.open(0)
    kept = device.malloc(100)
    device.free(device.malloc(50))

    assert [(leak.address, leak.size) for leak in device.close()] == [(kept, 100)]


PLATFORM_BEHAVIOURS: dict[str, Behaviour] = {
    "bytes come back": _bytes_come_back,
    "new memory is zero": _new_memory_is_zero,
    "tasks compute on the host and on the chip": _tasks_compute_on_the_host_and_on_the_chip,
    "tasks leave no memory behind": _tasks_leave_no_memory_behind,
    "pointers tell chips apart": _pointers_tell_chips_apart,
    "wrong pointers are refused": _wrong_pointers_are_refused,
    "wrong arguments are refused by name": _wrong_arguments_are_refused_by_name,
    "attached memory is shared": _attached_memory_is_shared,
    "time only goes on": _time_only_goes_on,
    "leaks are told at the end": _leaks_are_told_at_the_end,
}
