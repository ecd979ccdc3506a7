"""Functions for workers of pools, which find them here by name."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import rankwise


class TwoArguments(Exception):
    """Cannot be made of what it hands on to `Exception`."""

    def __init__(self, what: str, how: str) -> None:
        super().__init__(f"{what} {how}")
        self.how = how


def fail(how: str) -> None:
    error = TwoArguments("failed", how)
    error.add_note("it was told to")
    raise error


def die(signum: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), signum)


def die_once(path: str) -> str:
    """Die unless it was called before, which a file tells."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "second"
    die()
    return "never"


def die_of(_what: str) -> None:
    die()


def die_or_return(number: int) -> int:
    if number % 50 == 49:
        die()
    return number


def die_at(number: int, count: int, value: Any = None) -> Any:
    if number == count:
        die()
    return number if value is None else value


def die_once_at(number: int, path: str) -> int:
    """Note each call in a folder; die in the first one of a few numbers."""
    fd = os.open(f"{path}/{number}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(fd, b"x")
    first = os.fstat(fd).st_size == 1
    os.close(fd)
    if first and number in (5, 20, 62):
        die()
    return number


def array_or_die(number: int) -> Any:
    if number == 3:
        die()
    return np.full(1 << 18, number)


def lock_at(number: int) -> Any:
    return threading.Lock() if number == 3 else number


def stop_at(number: int) -> int:
    if number == 300:
        raise StopIteration
    return number


def wait_for(path: str) -> str:
    """Return when a fifo is written to."""
    return Path(path).read_text()


def begin_and_wait(begun: str, end: str) -> str:
    Path(begun).write_text("begun")
    return wait_for(end)


def lock() -> Any:
    return threading.Lock()


def plus_one(array: Any) -> Any:
    return array + 1


def plus_one_shared(array: Any) -> Any:
    out = rankwise.Pool.empty(array.shape, array.dtype)
    np.add(array, 1, out=out)
    return out


def add_in_place(array: Any) -> float:
    array += 1
    return float(array.sum())


def is_writable(array: Any) -> bool:
    return bool(array.flags.writeable)


def pid_of_worker(_: object = None) -> int:
    return os.getpid()


def squares_in_a_pool(count: int) -> list[int]:
    with rankwise.Pool(2) as pool:
        return list(pool.map(abs, range(-count, 0)))


def meet(folder: str, count: int) -> None:
    """Return when so many workers are in here."""
    (Path(folder) / str(os.getpid())).touch()
    while len([*Path(folder).iterdir()]) < count:
        time.sleep(0.005)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


VALUE: list[int] = []


def set_value(number: int) -> None:
    VALUE.append(number)


def value() -> list[int]:
    return VALUE
