"""Workers that are placed near each other."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.tree.processor_placement import processors_of
from rankwise.workers import TaskArgs, Worker, context

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def _runs_where_it_did_before() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    assert os.sched_getaffinity(0) == before


def places(worker: Worker, count: int) -> dict[int, set[int]]:
    """Where each sub worker may run; all of them at once, so that each is asked."""
    seen = worker.share((count, 1024), "u1")

    def look(_: TaskArgs) -> None:
        seen[context().index, list(os.sched_getaffinity(0))] = 1

    worker.run(lambda orch, _args, _config: orch.submit_sub_group(look, [None] * count))
    return {index: set(row.nonzero()[0].tolist()) for index, row in enumerate(seen)}


def test_the_first_sub_worker_is_where_the_caller_is_and_gets_tasks_first() -> None:
    before = os.sched_getaffinity(0)
    with Worker(level=3, num_sub_workers=3, placement="near") as worker:
        worker.init()
        home = os.sched_getaffinity(0)
        found = places(worker, 3)
        counts = worker.share(3, "i8")

        def count_up(_: TaskArgs) -> None:
            counts[context().index] += 1

        number = worker.register(count_up)
        for _ in range(20):
            worker.run(lambda orch, _args, _config: orch.submit_sub(number))

    assert len(home) == 1
    assert found[0] == home
    assert home <= found[1] == found[2] <= before
    assert counts.tolist() == [20, 0, 0]
    assert os.sched_getaffinity(0) == before


def test_workers_that_are_placed_at_the_same_time_have_all_processors() -> None:
    before = os.sched_getaffinity(0)
    with (
        Worker(level=3, num_sub_workers=2, placement="near") as first,
        Worker(level=3, num_sub_workers=2, placement="near") as second,
    ):
        first.init()
        second.init()
        assert places(first, 2) == places(second, 2)
        first.close()
        assert len(os.sched_getaffinity(0)) == 1, "the second keeps it"
    assert os.sched_getaffinity(0) == before


def test_a_placed_worker_that_does_not_come_up_or_is_forgotten_lets_its_thread_go() -> None:
    before = os.sched_getaffinity(0)
    broken = Worker(level=3, platform="no such", device_ids=[0], placement="near")
    with pytest.raises(RuntimeError):
        broken.init()
    assert os.sched_getaffinity(0) == before

    forgotten = Worker(level=3, num_sub_workers=1, placement="near")
    forgotten.init()
    del forgotten
    assert os.sched_getaffinity(0) == before


def test_each_level_may_be_placed() -> None:
    inner = Worker(level=3, num_sub_workers=2, placement="near")
    with Worker(level=4, num_sub_workers=1, placement="near") as root:
        root.add_worker(inner)
        done = inner.register(lambda _: None)
        number = root.register(lambda orch, _args, _config: orch.submit_sub(done))
        root.init()
        root.run(lambda orch, _args, _config: orch.submit_next_level(number))


@pytest.mark.parametrize("placement", ["far", "", True])
def test_a_placement_that_there_is_not_is_refused(placement: Any) -> None:
    with pytest.raises(ConfigError, match=r"placement is .*, expected None or 'near'"):
        Worker(level=3, placement=placement)


@pytest.mark.parametrize(
    ("listed", "numbers"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5\n", {5}), ("", set())]
)
def test_lists_of_processors_are_read_as_linux_writes_them(listed: str, numbers: set[int]) -> None:
    assert processors_of(listed) == numbers
