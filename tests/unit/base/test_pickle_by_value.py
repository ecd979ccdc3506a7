"""Pickling by value keeps what tracebacks need."""

import pickle

from rankwise.base.pickle_by_value import dumps_by_value


def test_function_that_travels_by_value_keeps_the_name_of_its_file() -> None:
    function = lambda: [inner for inner in range(3)]  # noqa: C416, E731  # has code inside its code

    arrived = pickle.loads(dumps_by_value(function))

    assert arrived() == [0, 1, 2]
    assert arrived.__code__.co_filename == __file__


def test_pickles_of_the_same_function_are_the_same_bytes() -> None:
    def function(number: int = 3) -> int:
        return number

    assert dumps_by_value(function) == dumps_by_value(function)
