"""Functions and classes by value: what their code is called, and where its source is."""

import gc
import linecache
import pickle
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rankwise
from rankwise.base.exception_pickle import dumps, loads
from rankwise.base.value_pickle import dumps_by_value, dumps_with_sources
from rankwise.drivers.real.worker.function import _pickled_value
from rankwise.launch.inside.function_payload import pack_function
from rankwise.workers.callables import ChipCallable

CELL = "/tmp/ipykernel_1/42.py"
SOURCE = "def outer():\n    def inner():\n        raise ValueError\n    return inner\n"


@pytest.fixture
def outer() -> Iterator[Any]:
    """A function out of a notebook's cell."""
    linecache.cache[CELL] = len(SOURCE), None, SOURCE.splitlines(keepends=True), CELL
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SOURCE, CELL, "exec"), cell)  # as IPython does
    yield cell["outer"]
    del linecache.cache[CELL]


def lambda_here() -> Any:
    return lambda: lambda: 1


def test_code_by_value_keeps_its_file_at_each_depth() -> None:
    arrived = pickle.loads(dumps_by_value(lambda_here()))

    assert arrived.__code__.co_filename == __file__
    assert arrived().__code__.co_filename == __file__


def test_code_by_value_is_otherwise_what_it_was() -> None:
    sent = lambda_here()

    assert pickle.loads(dumps_by_value(sent)).__code__ == sent.__code__


def test_sources_in_no_file_come_along_and_those_of_files_do_not(outer: Any) -> None:
    linecache.getline(__file__, 1)

    _, sources = dumps_with_sources((outer, lambda_here()))

    assert {name: "".join(entry[2]) for name, entry in sources.items()} == {CELL: SOURCE}


def test_only_sources_of_code_that_travels_come_along(outer: Any) -> None:
    _, sources = dumps_with_sources(lambda_here())

    assert sources == {}
    assert CELL in linecache.cache


def test_what_was_pickled_is_freed_at_once() -> None:
    class Large:
        pass

    large = Large()
    end = weakref.ref(large)
    gc.disable()
    try:
        dumps_by_value(large)
        del large
        assert end() is None
    finally:
        gc.enable()


def function_of_payload() -> Any:
    payload = pack_function(lambda_here(), ())
    rest = payload[len(pickle.dumps(pickle.loads(payload))) :]
    return pickle.loads(rest)[0]


def function_of_result() -> Any:
    return pickle.loads(_pickled_value(lambda_here(), "work"))[1]


def function_of_exception() -> Any:
    error = loads(dumps(type("Unknown", (Exception,), {"explain": lambda_here()})()))
    return error.explain  # type: ignore[union-attr]


def function_of_chip_callable() -> Any:
    chip_callable = ChipCallable.build([], "fn", lambda_here())
    return pickle.loads(chip_callable._payload())


@pytest.mark.parametrize(
    "function",
    [function_of_payload, function_of_result, function_of_exception, function_of_chip_callable],
)
def test_each_door_of_the_package_keeps_the_file(function: Any) -> None:
    assert function().__code__.co_filename == __file__


def test_no_other_module_pickles_by_value() -> None:
    package = Path(rankwise.__file__).parent
    users = [
        str(module.relative_to(package))
        for module in package.rglob("*.py")
        if "import cloudpickle" in module.read_text()
    ]

    assert users == ["base/value_pickle.py"]


def test_a_traceback_of_a_cell_has_its_line_where_the_sources_arrived(outer: Any) -> None:
    payload, sources = dumps_with_sources(outer)
    del linecache.cache[CELL]
    linecache.cache.update(sources)

    with pytest.raises(ValueError) as caught:  # noqa: PT011  # its text is the traceback's
        pickle.loads(payload)()()

    assert "raise ValueError" in "".join(traceback.format_tb(caught.value.__traceback__)[-1:])
