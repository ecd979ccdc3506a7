"""What ranks have returned, read while signal handlers of the program may raise."""

import pickle
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from rankwise.base.errors import GangError
from rankwise.base.exception_pickle import dumps
from rankwise.launch.inside.function_results import exceptions_by_rank, values_by_rank

is_reading = False


class TimeIsUp(Exception):
    """What a time-out by alarm raises."""


class AlarmingValue:
    """A value that takes so long to unpickle that an alarm comes meanwhile."""

    def __setstate__(self, state: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    def __getstate__(self) -> object:
        return "state"


class BrokenValue(AlarmingValue):
    def __setstate__(self, state: object) -> None:
        raise TimeIsUp


class AlarmingError(Exception):
    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        if is_reading:
            signal.raise_signal(signal.SIGALRM)


def frame_of(kind: str, load: object) -> bytes:
    body = pickle.dumps((kind, load))
    return len(body).to_bytes(4, "little") + body


@pytest.fixture(autouse=True)
def _handler_that_raises() -> Iterator[None]:
    def raise_it(_signum: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, raise_it)
    yield
    assert signal.getsignal(signal.SIGALRM) is raise_it
    signal.signal(signal.SIGALRM, before)


def test_an_alarm_while_a_result_is_unpickled_is_no_error_of_the_result() -> None:
    with pytest.raises(TimeIsUp):
        values_by_rank({0: frame_of("ok", AlarmingValue())})


def test_an_error_of_the_result_itself_is_told_as_one() -> None:
    with pytest.raises(GangError, match="the result of rank 3 cannot be unpickled: TimeIsUp"):
        values_by_rank({3: frame_of("ok", BrokenValue())})


def test_an_alarm_while_an_exception_is_rebuilt_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = AlarmingError("no")
    frame = frame_of("error", dumps(error))
    monkeypatch.setattr(sys.modules[__name__], "is_reading", True)

    with pytest.raises(TimeIsUp):
        exceptions_by_rank({0: frame})
