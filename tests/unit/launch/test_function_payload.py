"""Functions and arguments on their way to workers."""

import operator
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rankwise.base.errors import ConfigError
from rankwise.launch.inside.function_payload import pack_function
from rankwise.launch.limits import shown


def unpack(payload: bytes) -> tuple[dict[str, Any], Any]:
    stream = BytesIO(payload)
    return pickle.load(stream), pickle.load(stream)


class Sender:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def send(self, value: int) -> int:
        return value


def test_an_importable_function_travels_by_name() -> None:
    payload = pack_function(operator.add, [1, 2], pass_rank=True)

    header, (function, args) = unpack(payload)

    assert function is operator.add
    assert args == (1, 2)
    assert (header["name"], header["pass_rank"], header["arguments_by_rank"]) == (
        "add",
        True,
        False,
    )
    assert b"cloudpickle" not in payload


def test_importable_functions_do_not_cost_the_import_of_cloudpickle() -> None:
    program = (
        "import operator, sys; from rankwise.launch.inside.function_payload import pack_function;"
        "pack_function(operator.add, (1, 2)); assert 'cloudpickle' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_lambdas_and_inner_functions_travel_by_value() -> None:
    offset = 10

    _, (function, args) = unpack(pack_function(lambda value: value + offset, (1,)))

    assert function(*args) == 11


def test_each_rank_may_have_arguments_of_its_own() -> None:
    header, (_, args) = unpack(
        pack_function(operator.neg, {0: [5], 1: [6]}, arguments_by_rank=True)
    )

    assert header["arguments_by_rank"]
    assert args == {0: (5,), 1: (6,)}


def test_the_empty_entry_of_the_path_becomes_the_present_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", ["", "/somewhere"])

    header, _ = unpack(pack_function(operator.neg, (1,)))

    assert header["sys_path"] == [str(Path.cwd()), "/somewhere"]


@pytest.mark.parametrize(
    ("function", "args", "culprit"),
    [
        (operator.add, (1, threading.Lock()), "argument 1 of add (a lock)"),
        (Sender().send, (1,), "the Sender whose method Sender.send is"),
    ],
)
def test_what_cannot_be_pickled_is_named(function: Any, args: Any, culprit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pack_function(function, args)

    assert culprit in str(caught.value)
    assert "cannot pickle '_thread.lock' object" in str(caught.value)


def test_a_function_that_holds_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    with pytest.raises(ConfigError, match=r"the function .*<lambda> cannot be sent to workers"):
        pack_function(lambda: (lock.locked(), 1), ())


def test_an_argument_of_one_rank_is_named_with_its_rank() -> None:
    arguments = {0: (1,), 1: (threading.Lock(),)}

    with pytest.raises(ConfigError, match=r"argument 0 of local rank 1 of neg \(a lock\)"):
        pack_function(operator.neg, arguments, arguments_by_rank=True)


async def coroutine() -> None: ...


async def async_generator() -> AsyncIterator[int]:
    yield 1


def generator() -> Iterator[int]:
    yield 1


class CalledAsync:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (coroutine, "coroutine is an async function: a call makes a coroutine"),
        (async_generator, "async_generator is an async function"),
        (generator, r"generator is a generator: .* def main\(\): return list\(generator\(\)\)"),
        (partial(coroutine), "coroutine is an async function"),
        (CalledAsync(), "CalledAsync is an async function"),
        (CalledAsync().__call__, "CalledAsync.__call__ is an async function"),
    ],
)
def test_what_a_call_would_not_run_is_refused(function: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        pack_function(function, ())


def test_a_keyword_argument_that_cannot_travel_is_named() -> None:
    with pytest.raises(ConfigError, match=r"argument 'key' of sorted \(a lock\) cannot be sent"):
        pack_function(partial(sorted, key=threading.Lock()), ([1],))


class TimeIsUp(Exception):
    """What a time-out by alarm raises."""


class Slow:
    """An alarm comes while it is pickled."""

    def __init__(self, pickled_before: int) -> None:
        self.times_left = pickled_before

    def __reduce__(self) -> Any:
        self.times_left -= 1
        if self.times_left < 0:
            signal.raise_signal(signal.SIGALRM)
        raise RuntimeError("cannot be pickled")

    def __repr__(self) -> str:
        signal.raise_signal(signal.SIGALRM)
        return "slow"


@pytest.fixture
def _alarm_that_raises() -> Iterator[None]:
    def time_is_up(_signum: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, time_is_up)
    yield
    assert signal.signal(signal.SIGALRM, before) is time_is_up


@pytest.mark.usefixtures("_alarm_that_raises")
@pytest.mark.parametrize("pickled_before", [0, 1])
def test_an_alarm_while_arguments_are_pickled_is_raised_as_it_is(pickled_before: int) -> None:
    with pytest.raises(TimeIsUp):
        pack_function(operator.add, (1, Slow(pickled_before)))


@pytest.mark.usefixtures("_alarm_that_raises")
def test_an_alarm_while_a_wrong_argument_is_shown_is_raised_as_it_is() -> None:
    with pytest.raises(TimeIsUp):
        shown(Slow(0))
