"""Functions that take turns once a rank has threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import pytest

from rankwise.simranks.world import turn_takers
from rankwise.simranks.world.turn_takers import taking_turns

if TYPE_CHECKING:
    from rankwise.simranks.world.turns import Turns


class OneThread:
    """Turns of a world in which the calling thread is one that a rank has started."""

    def __init__(self) -> None:
        self.helpers = {threading.get_ident(): object()}
        self.taken = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.taken += 1
        yield


@pytest.fixture
def turns() -> Iterator[OneThread]:
    yield OneThread()
    turn_takers.end()


def begin(turns: OneThread) -> None:
    turn_takers.begin(cast("Turns", turns))


def add(first: int, second: int = 2, *, third: int = 3) -> int:
    """A function with default values; turns are taken by those made below."""
    return first + second + third


def made() -> Any:
    """Another such function, of its own."""

    def add(first: int, second: int = 2, *, third: int = 3) -> int:
        return first + second + third

    return add


def logged(function: Any) -> Any:
    """A decorator as torch has: all its functions share their code."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("function", [made(), logged(add)])
def test_function_taken_before_the_first_thread_takes_a_turn(
    function: Any, turns: OneThread
) -> None:
    taken = taking_turns(function)
    code = function.__code__

    assert (taken(1), turns.taken) == (6, 0)
    begin(turns)
    assert (taken(1, third=4), turns.taken) == (7, 1)
    assert function.__code__.co_name == code.co_name
    turn_takers.end()
    assert (taken(1), turns.taken) == (6, 1)
    assert function.__code__ is code


def test_other_functions_with_the_same_code_take_no_turn(turns: OneThread) -> None:
    taking_turns(logged(add))
    other = logged(add)

    begin(turns)

    assert (other(1), turns.taken) == (6, 0)


def test_function_of_a_module_that_is_imported_later_takes_turns_at_once(
    turns: OneThread,
) -> None:
    begin(turns)

    assert (taking_turns(logged(add))(1), turns.taken) == (6, 1)


def test_thread_that_no_rank_has_started_takes_no_turn(turns: OneThread) -> None:
    function = taking_turns(logged(add))
    turns.helpers = {}

    begin(turns)

    assert (function(1), turns.taken) == (6, 0)


def test_error_of_a_function_is_its_own(turns: OneThread) -> None:
    function = taking_turns(logged(add))
    begin(turns)

    with pytest.raises(TypeError, match=r"add\(\) takes from 1 to 2 positional arguments"):
        function(1, 2, 3)
