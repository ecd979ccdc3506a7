"""A signal handler that raises ends what a worker does, wherever it comes, and breaks nothing."""

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import rankwise
from rankwise.base.errors import LocalProtocolError
from rankwise.workers import Orchestrator, Worker

OURS = str(Path(rankwise.__file__).parent)
MAIN_AND_INTERRUPT = (threading.main_thread().ident, signal.SIGINT)
PATIENCE_S = 60
SLOW_S = 20
"""A machine with much to do takes long, but not as long as all the patience of a torn run."""


class TimeIsUp(Exception):
    """What a time-out by alarm raises."""


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(level=3, num_sub_workers=1, platform="host", device_ids=[0])
    worker.init()
    yield worker
    worker.close()


def do_nothing(_args: object) -> None:
    """What most tasks here are."""


class CountUp:
    """A task that counts how often it has run."""

    def __init__(self, counts: Any) -> None:
        self.counts = counts

    def __call__(self, _args: object) -> None:
        self.counts[0] += 1


def submit_two(orch: Orchestrator, _args: object, _config: object) -> None:
    orch.submit_sub(do_nothing)
    orch.submit_sub(do_nothing)


class InterruptAt:
    """A profile function that sends SIGINT at the n-th moment at which Python would look for it.

    It looks when a function begins, and when a call into C has returned. Only moments in our own
    code count.
    """

    def __init__(self, moment: int) -> None:
        self.moments_left = moment
        self.where = "nowhere"

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(OURS):
            return
        self.moments_left -= 1
        if self.moments_left == -1:
            self.where = f"{event} in {frame.f_code.co_qualname}, line {frame.f_lineno}"
            signal.raise_signal(signal.SIGINT)


def interrupted_everywhere(
    action: Callable[[], object], check: Callable[[], object], step: int = 1
) -> int:
    """Do it again and again with an interrupt at each moment, until there are no more moments.

    Each time an interrupt that came must have been raised soon, and afterwards `check` must work.
    """
    gc.disable()  # Python drops what is raised in a callback of its garbage collector
    try:
        return _interrupted_at_each_moment(action, check, step)
    finally:
        gc.enable()


def _interrupted_at_each_moment(
    action: Callable[[], object], check: Callable[[], object], step: int
) -> int:
    moment = 0
    while True:
        interrupt = InterruptAt(moment)
        began = time.monotonic()
        is_raised = False
        sys.setprofile(interrupt)
        try:
            action()
            if interrupt.moments_left < 0:  # where nothing may be raised, it comes right afterwards
                threading.Event().wait(PATIENCE_S)
        except KeyboardInterrupt:
            is_raised = True
        finally:
            sys.setprofile(None)
        if interrupt.moments_left >= 0:
            return moment
        assert is_raised, interrupt.where
        assert time.monotonic() - began < SLOW_S, interrupt.where
        try:
            check()
        except Exception as error:
            error.add_note(f"after an interrupt at {interrupt.where}")
            raise
        moment += step


def test_an_interrupt_may_come_at_any_moment_of_a_run(worker: Worker) -> None:
    def run() -> None:
        worker.run(submit_two)

    def run_twice_and_count() -> None:
        counts[:] = 0
        for _ in range(2):
            worker.run(count_three)
        assert counts.tolist() == [6]

    counts = worker.share((1,), "i8")
    number = worker.register(CountUp(counts))

    def count_three(orch: Orchestrator, _args: object, _config: object) -> None:
        for _ in range(3):
            orch.submit_sub(number)

    run_twice_and_count()

    assert interrupted_everywhere(run, run_twice_and_count) > 100


def test_an_interrupt_may_come_at_any_moment_of_taking_memory_and_of_scopes(
    worker: Worker,
) -> None:
    def orchestrate(orch: Orchestrator, _args: object, _config: object) -> None:
        with orch.scope():
            orch.alloc((8,), "f4")

    def run() -> None:
        worker.run(orchestrate)

    run()

    assert interrupted_everywhere(run, run) > 50


def test_an_interrupt_may_come_at_any_moment_of_a_command_to_a_chip(worker: Worker) -> None:
    def take_and_give_back() -> None:
        worker.free(worker.malloc(64))

    take_and_give_back()

    assert interrupted_everywhere(take_and_give_back, take_and_give_back) > 50


def test_an_interrupt_may_come_at_any_moment_of_a_replay(worker: Worker) -> None:
    graph = worker.record(submit_two)

    assert interrupted_everywhere(graph.replay, graph.replay, step=3) > 20


def test_an_interrupt_may_come_at_any_moment_of_a_domain(worker: Worker) -> None:
    def orchestrate(orch: Orchestrator, _args: object, _config: object) -> None:
        orch.domain("rows", [0], {"x": ((4,), "f4")}, subs=True)
        orch.submit_sub(do_nothing)

    def run() -> None:
        worker.run(orchestrate)

    run()

    assert interrupted_everywhere(run, run, step=3) > 100


def test_an_interrupt_may_come_at_any_moment_of_the_end_of_a_shared_array(worker: Worker) -> None:
    def share_and_drop() -> None:
        worker.share((1,), "i8")

    share_and_drop()

    assert interrupted_everywhere(share_and_drop, share_and_drop) > 20


def test_an_interrupt_may_come_at_any_moment_of_the_end_of_a_function(worker: Worker) -> None:
    def submit_another(orch: Orchestrator, _args: object, _config: object) -> None:
        orch.submit_sub(lambda _: None)

    def run() -> None:
        worker.run(submit_another)

    run()

    assert interrupted_everywhere(run, run, step=3) > 100


def test_an_alarm_while_a_function_is_pickled_is_not_taken_for_its_fault(worker: Worker) -> None:
    def time_is_up(_signum: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    class Slow:
        def __reduce__(self) -> str:
            signal.raise_signal(signal.SIGALRM)
            raise AssertionError("the handler has raised")

    slow = Slow()
    before = signal.signal(signal.SIGALRM, time_is_up)
    try:
        with pytest.raises(TimeIsUp):
            worker.run(lambda orch, _args, _config: orch.submit_sub(lambda _: slow))
    finally:
        signal.signal(signal.SIGALRM, before)

    worker.run(submit_two)


last_began = [0.0]


def run_for_ever(worker: Worker, timer: threading.Timer) -> None:
    last_began[0] = time.monotonic()
    timer.start()
    while True:
        last_began[0] = time.monotonic()
        worker.run(submit_two)


def test_interrupts_from_outside_end_runs_at_once_and_the_next_run_works(worker: Worker) -> None:
    moments = random.Random(7)
    for _ in range(100):
        timer = threading.Timer(moments.uniform(0, 0.004), signal.pthread_kill, MAIN_AND_INTERRUPT)

        with pytest.raises(KeyboardInterrupt):
            run_for_ever(worker, timer)
        assert time.monotonic() - last_began[0] < SLOW_S
        timer.join(PATIENCE_S)

        worker.run(submit_two)


def test_an_interrupt_ends_the_users_function_where_it_is(worker: Worker) -> None:
    seen: list[str] = []

    def compute(orch: Orchestrator, _args: object, _config: object) -> None:
        orch.submit_sub(do_nothing)
        try:
            signal.raise_signal(signal.SIGINT)
            seen.append("not interrupted")
        except KeyboardInterrupt:
            seen.append("interrupted")
            raise

    with pytest.raises(KeyboardInterrupt):
        worker.run(compute)

    assert seen == ["interrupted"]
    worker.run(submit_two)


@pytest.mark.parametrize("where", ["before the run", "in the function"])
def test_a_time_out_by_alarm_ends_a_run_whenever_it_was_set(worker: Worker, where: str) -> None:
    def time_is_up(_signum: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    def set_alarm() -> None:
        signal.signal(signal.SIGALRM, time_is_up)
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    def orchestrate(orch: Orchestrator, _args: object, _config: object) -> None:
        if where == "in the function":
            set_alarm()
        orch.submit_sub(lambda _: signal.pause())

    def run_within_time() -> None:
        if where == "before the run":
            set_alarm()
        worker.run(orchestrate)

    before, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    try:
        with pytest.raises(TimeIsUp):
            run_within_time()
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)

    worker.run(submit_two)


def test_a_second_interrupt_kills_what_still_runs_and_the_next_run_works(worker: Worker) -> None:
    parent = os.getpid()

    def interrupt_twice(_args: object) -> None:
        os.kill(parent, signal.SIGINT)
        signal.pause()

    def interrupt_again(_signum: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(parent, signal.SIGINT)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt_again)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.run(lambda orch, _args, _config: orch.submit_sub(interrupt_twice))
    finally:
        signal.signal(signal.SIGINT, before)

    assert "killed by SIGKILL" in worker.failures[0].summary
    worker.run(submit_two)


def test_an_interrupt_after_a_time_out_by_alarm_is_not_lost(worker: Worker) -> None:
    parent = os.getpid()

    def let_time_be_up(_args: object) -> None:
        os.kill(parent, signal.SIGALRM)
        signal.pause()

    def time_is_up(_signum: int, _frame: FrameType | None) -> None:
        os.kill(parent, signal.SIGINT)
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, time_is_up)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.run(lambda orch, _args, _config: orch.submit_sub(let_time_be_up))
    finally:
        signal.signal(signal.SIGALRM, before)

    worker.run(submit_two)


def test_what_the_function_raised_is_not_lost_when_its_tasks_do_not_end_in_time(
    worker: Worker,
) -> None:
    def fail(orch: Orchestrator, _args: object, _config: object) -> None:
        orch.submit_sub(lambda _: signal.pause())
        raise TimeIsUp

    with pytest.raises(TimeIsUp) as caught:
        worker.run(fail, timeout=0.1)

    assert isinstance(caught.value.__context__, TimeoutError)
    worker.run(submit_two)


def test_handlers_are_the_programs_own_again_when_the_last_worker_is_closed() -> None:
    def handle(_signum: int, _frame: FrameType | None) -> None:
        """Never called."""

    gc.collect()  # a worker that an earlier test has forgotten
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with Worker(level=3, num_sub_workers=1) as first:
            first.init()
            with Worker(level=3, num_sub_workers=1) as second:
                second.init()
                first.close()
                assert signal.getsignal(signal.SIGUSR1) is not handle
        assert signal.getsignal(signal.SIGUSR1) is handle
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_does_not_raise_runs_while_a_run_waits() -> None:
    parent, (read, write) = os.getpid(), os.pipe()

    def let_it_go(_signum: int, _frame: FrameType | None) -> None:
        os.write(write, b"!")

    def ask_and_wait(_args: object) -> None:
        os.kill(parent, signal.SIGUSR2)
        os.read(read, 1)

    worker = Worker(level=3, num_sub_workers=1)
    number = worker.register(ask_and_wait)
    before = signal.signal(signal.SIGUSR2, let_it_go)
    try:
        with worker:
            worker.init()
            worker.run(lambda orch, _args, _config: orch.submit_sub(number))
    finally:
        signal.signal(signal.SIGUSR2, before)
        os.close(read)
        os.close(write)


def test_calls_of_another_thread_in_the_middle_of_a_run_are_refused_and_say_so(
    worker: Worker,
) -> None:
    told: list[str] = []

    def intrude() -> None:
        calls: list[Callable[[], None]] = [lambda: worker.run(submit_two), worker.close]
        for call in calls:
            with pytest.raises(LocalProtocolError) as caught:
                call()
            told.append(str(caught.value))

    def orchestrate(_orch: Orchestrator, _args: object, _config: object) -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join(PATIENCE_S)

    worker.run(orchestrate)

    assert "run() was called while another thread is in run()" in told[0]
    assert "close() was called while another thread is in run()" in told[1]
    worker.run(submit_two)
