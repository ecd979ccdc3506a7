"""Exceptions arrive in other processes as they were: notes, causes, groups, attributes."""

import copy
import pickle
import pkgutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any, Self

import pytest

import rankwise
from rankwise.base.errors import (
    Deadlock,
    RankwiseError,
    RemoteTraceback,
    StoreUnavailable,
    Waiting,
    WorkersFailed,
)
from rankwise.base.exception_pickle import dumps, loads, previous_of, tell_traceback
from rankwise.base.failure import Failure, FailureCause
from rankwise.base.units import Instant
from rankwise.compat.torch.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from rankwise.drivers.real.stores.etcd_stream import NoHttp
from rankwise.launch.spawning import ProcessExitedException, ProcessRaisedException
from rankwise.sim.runtime.multiprocessing import RanksStuck, SpawnException
from rankwise.simranks.prediction.device_memory import DeviceFull

FAILURE = Failure(local_rank=1, rank=1, attempt=0, cause=FailureCause.RAISED, at=Instant(7), pid=9)
WAITING = Waiting("rank 1", "a message", 5, "train.py:3")


class Unspeakable(Exception):
    """Cannot be pickled in any way."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("never")


class TwoArguments(Exception):
    """Is called with other arguments than it hands on, and carries what cannot be pickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.sum = one + two
        self.lock = threading.Lock()


def public_exceptions() -> list[type[BaseException]]:
    """Every exception class of the package, whatever module it is in."""
    for module in pkgutil.walk_packages(rankwise.__path__, "rankwise."):
        if module.name.endswith(("__main__", "worker.boot")):
            continue  # those are programs
        if module.name == "rankwise.compat.joblib" and find_spec("joblib") is None:
            continue
        import_module(module.name)
    found = {
        kind for kind in all_subclasses(BaseException) if kind.__module__.startswith("rankwise")
    }
    return sorted((kind for kind in found if not kind.__name__.startswith("_")), key=repr)


def all_subclasses(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    # `type.__subclasses__`, since one of the classes is `type` itself for some libraries.
    for below in type.__subclasses__(kind):
        yield below
        yield from all_subclasses(below)


MADE_OTHERWISE: dict[str, Callable[[], BaseException]] = {
    "WorkersFailed": lambda: WorkersFailed("all", (FAILURE,), {1: KeyError("x")}, hint="look"),
    "ProcessException": lambda: ProcessRaisedException("it raised", (FAILURE,)),
    "ProcessRaisedException": lambda: ProcessRaisedException("it raised", (FAILURE,)),
    "ProcessExitedException": lambda: ProcessExitedException("gone", (FAILURE,), -9, "SIGKILL"),
    "Deadlock": lambda: Deadlock("stuck", (WAITING,), hint="look"),
    "SpawnException": lambda: SpawnException("ranks failed", {1: KeyError("x")}, (FAILURE,)),
    "RanksStuck": lambda: RanksStuck("stuck", (WAITING,), {1: "a stack"}, (FAILURE,)),
    "DeviceFull": lambda: DeviceFull(3, 1, None),
    "NoHttp": lambda: NoHttp("the answer begins with", b"SSH-2.0"),
    "ChildFailedError": lambda: ChildFailedError(
        "train.py", {0: ProcessFailure(local_rank=0, pid=1, exitcode=3, error_file="none")}
    ),
}


def an_instance_of(kind: type[BaseException]) -> BaseException:
    if kind.__name__ in MADE_OTHERWISE:
        return MADE_OTHERWISE[kind.__name__]()
    for arguments, keywords in SIGNATURES:
        try:
            return kind(*arguments, **keywords)
        except TypeError:
            continue
    raise AssertionError(f"how is {kind} made? add it to MADE_OTHERWISE")


SIGNATURES: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("a message",), {"hint": "what to do"}),
    (("a message",), {}),
    (("a message", 15), {}),
]


def shape_of(error: BaseException | None) -> object:
    """All that must be equal on the other side."""
    if error is None:
        return None
    state = {
        name: {key: repr(one) for key, one in value.items()} if isinstance(value, dict) else value
        for name, value in vars(error).items()
    }
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return (
        type(error),
        str(error),
        repr(state),
        [shape_of(member) for member in members],
        shape_of(error.__cause__),
        shape_of(previous_of(error)),
        error.__suppress_context__,
    )


WAYS: dict[str, Callable[[BaseException], BaseException | None]] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "dumps": lambda error: loads(dumps(error)),
}


@pytest.mark.torch  # every module is imported, those that bear torch's names too
def test_every_exception_of_the_package_survives_pickle_and_copy_with_all_it_carries() -> None:
    kinds = public_exceptions()
    lost: list[str] = []

    for kind in kinds:
        error = an_instance_of(kind)
        error.add_note("a note")
        if issubclass(kind, RankwiseError):
            error.__cause__ = ExceptionGroup("several", [OSError(2, "no such file"), KeyError("k")])
            error.__cause__.__context__ = RendezvousLike("deep")
        for name, way in WAYS.items():
            try:
                arrived = way(error)
            except Exception as problem:  # noqa: BLE001  # collected below
                lost.append(f"{kind.__name__} by {name}: {problem!r}")
                continue
            if shape_of(arrived) != shape_of(error):
                lost.append(f"{kind.__name__} by {name}: {shape_of(arrived)} {shape_of(error)}")

    assert lost == []
    assert len(kinds) > 60


class RendezvousLike(LookupError):
    """A class of somebody else's."""


def fail_in_a_pool() -> None:
    raise WorkersFailed("2 of 4 ranks failed", (FAILURE,), {1: TwoArguments(1, 2)}, hint="look")


def test_workers_failed_leaves_a_process_pool_usable() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(WorkersFailed, match="2 of 4 ranks failed") as caught:
            pool.submit(fail_in_a_pool).result(60)
        assert pool.submit(abs, -3).result(60) == 3

    assert caught.value.failures == (FAILURE,)
    assert caught.value.hint == "look"
    arrived = caught.value.exceptions[1]
    assert isinstance(arrived, TwoArguments)
    assert arrived.sum == 3


def test_ranks_that_are_stuck_are_still_their_own_errors_after_a_pickle() -> None:
    arrived = pickle.loads(pickle.dumps(RanksStuck("stuck", (WAITING,), {0: "a", 3: "b"})))

    assert arrived.errors == {0: arrived, 3: arrived}


def test_what_cannot_be_pickled_stays_behind_and_the_class_is_kept() -> None:
    arrived = loads(dumps(TwoArguments(1, 2)))

    assert isinstance(arrived, TwoArguments)
    assert (str(arrived), arrived.sum) == ("1 and 2", 3)
    assert not hasattr(arrived, "lock")


def test_a_class_that_only_the_sender_knows_arrives_by_value() -> None:
    class OnlyHere(Exception):
        pass

    arrived = loads(dumps(OnlyHere("x", 3)))

    assert type(arrived).__name__ == "OnlyHere"
    assert arrived is not None
    assert arrived.args == ("x", 3)


def test_what_cannot_be_pickled_at_all_arrives_as_its_text_where_it_caused_something() -> None:
    def look() -> None:
        raise Unspeakable("the deep reason")

    def fail() -> None:
        try:
            look()
        except Unspeakable as reason:
            raise StoreUnavailable("nobody answers", hint="start etcd") from reason

    with pytest.raises(StoreUnavailable) as caught:
        fail()
    arrived = pickle.loads(pickle.dumps(caught.value))

    assert arrived.hint == "start etcd"
    assert isinstance(arrived.__cause__, RemoteTraceback)
    assert "Unspeakable: the deep reason" in str(arrived.__cause__)
    assert "in look" in str(arrived.__cause__)


def test_an_exception_that_cannot_be_pickled_in_any_way_is_none() -> None:
    assert loads(dumps(Unspeakable("x"))) is None


def test_members_of_groups_arrive_each_by_itself() -> None:
    class Named(ExceptionGroup[Exception]):
        def __new__(cls, errors: list[Exception], name: str) -> Self:
            group = super().__new__(cls, f"errors of {name}", errors)
            group.name = name
            return group

        name: str

    inner = ExceptionGroup("inner", [Unspeakable("lost"), ValueError("kept")])
    group = Named([inner, TwoArguments(3, 4)], "rank 1")
    group.add_note("a note")
    group.exceptions[1].__cause__ = KeyError("why")

    arrived = loads(dumps(group))

    assert isinstance(arrived, ExceptionGroup)
    assert (type(arrived).__name__, arrived.message) == ("Named", "errors of rank 1")
    assert vars(arrived) == {"name": "rank 1", "__notes__": ["a note"]}
    nested, pair = arrived.exceptions
    assert isinstance(nested, ExceptionGroup)
    assert [type(member) for member in nested.exceptions] == [RemoteTraceback, ValueError]
    assert "Unspeakable: lost" in str(nested.exceptions[0])
    assert isinstance(pair, TwoArguments)
    assert isinstance(pair.__cause__, KeyError)


def test_a_context_arrives_and_a_suppressed_one_stays_away() -> None:
    shown, hidden = ValueError("shown"), ValueError("hidden")
    shown.__context__ = hidden.__context__ = KeyError("before")
    hidden.__suppress_context__ = True

    shown_there, hidden_there = loads(dumps(shown)), loads(dumps(hidden))

    assert isinstance(shown_there, ValueError)
    assert isinstance(shown_there.__context__, KeyError)
    assert isinstance(hidden_there, ValueError)
    assert (hidden_there.__context__, hidden_there.__suppress_context__) == (None, True)


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, two = WorkersFailed("one", (FAILURE,)), KeyError("two")
    one.__cause__, two.__cause__ = two, one

    arrived = pickle.loads(pickle.dumps(one))
    there = loads(dumps(one))

    assert isinstance(arrived.__cause__, KeyError)
    assert there is not None
    assert there.__cause__ is not None
    assert there.__cause__.__cause__ is there


def test_notes_of_a_class_with_a_reduce_of_its_own_arrive() -> None:
    error = OwnReduce("x")
    error.add_note("a note")

    arrived = loads(dumps(error))

    assert arrived is not None
    assert arrived.__notes__ == ["a note"]


class OwnReduce(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return OwnReduce, self.args


def test_a_traceback_is_told_before_all_that_caused_the_exception() -> None:
    error = ValueError("x")
    error.__cause__ = KeyError("y")

    tell_traceback(error, "Traceback: the line")

    assert isinstance(error.__cause__, KeyError)
    assert isinstance(error.__cause__.__cause__, RemoteTraceback)
    assert "Traceback: the line" in str(error.__cause__.__cause__)
