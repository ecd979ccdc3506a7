import gc
import subprocess
import sys
import threading
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankwise.base.errors import Deadlock, LocalProtocolError, TimeLimit
from rankwise.sim.kernel import Future, Simulator, all_of

Steps = Generator[Any, Any, Any]


def test_things_of_one_instant_happen_in_the_order_in_which_they_were_asked_for() -> None:
    simulator = Simulator()
    seen: list[Any] = []
    for name in "cab":
        simulator.call_at(5, seen.append, name)
    simulator.call_at(3, seen.append, "first")

    simulator.run()

    assert seen == ["first", "c", "a", "b"]
    assert simulator.now == 5


def test_what_is_asked_for_at_this_instant_happens_after_what_was_already_due() -> None:
    simulator = Simulator()
    seen: list[Any] = []

    def spawn() -> None:
        seen.append("one")
        simulator.call_at(simulator.now, seen.append, "three")

    simulator.call_at(2, spawn)
    simulator.call_at(2, seen.append, "two")

    simulator.run()

    assert seen == ["one", "two", "three"]


@pytest.mark.parametrize("stretch", [2, 2_048])
@pytest.mark.parametrize("waiting_by", ["delay", "timer"])
@given(
    st.one_of(
        st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6),
        st.lists(st.lists(st.integers(1, 60), max_size=6), max_size=12),
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_processes_go_on_by_instant_and_then_in_the_order_in_which_they_asked(
    waiting_by: str, stretch: int, monkeypatch: pytest.MonkeyPatch, delays: list[list[int]]
) -> None:
    monkeypatch.setattr("rankwise.sim.kernel.simulator._STRETCH", stretch)
    monkeypatch.setattr("rankwise.sim.kernel.simulator._WALK", 4 * stretch)
    simulator = Simulator()
    seen: list[tuple[int, int]] = []

    def worker(number: int) -> Steps:
        for delay in delays[number]:
            seen.append((simulator.now, number))
            yield simulator.timer(delay) if waiting_by == "timer" and delay else delay
        seen.append((simulator.now, number))

    for number in range(len(delays)):
        simulator.process(worker(number))
    simulator.run()

    expected = []
    waiting = [(0, number, number, 0) for number in range(len(delays))]
    asked = len(waiting)
    while waiting:
        waiting.sort()
        instant, _order, number, step = waiting.pop(0)
        expected.append((instant, number))
        if step < len(delays[number]):
            waiting.append((instant + delays[number][step], asked, number, step + 1))
            asked += 1
    assert seen == expected
    assert not simulator._soon
    assert not simulator._later


@pytest.mark.parametrize("cancelled", range(2, 9))
def test_cancelling_one_that_waits_far_ahead_leaves_the_others_in_order(
    cancelled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankwise.sim.kernel.simulator._STRETCH", 2)
    simulator = Simulator()
    seen = []

    def worker(number: int) -> Steps:
        try:
            yield 10 * number
            yield 35
        except ArithmeticError:
            seen.append((simulator.now, -number))
        else:
            seen.append((simulator.now, number))

    def canceller() -> Steps:
        yield 15
        workers[cancelled].cancel(ArithmeticError())

    workers = {number: simulator.process(worker(number)) for number in (7, 3, 9, 2, 8, 1, 5, 6, 4)}
    simulator.process(canceller())
    simulator.run()

    others = [number for number in range(1, 10) if number != cancelled]
    assert seen == [(15, -cancelled), *((10 * number + 35, number) for number in others)]


@pytest.mark.parametrize("others", [0, 1, 2])
def test_after_a_failure_the_rest_goes_on_however_many_shared_its_instant(others: int) -> None:
    simulator = Simulator()
    seen = []

    def fails() -> Steps:
        yield 2
        raise ArithmeticError("one step too far")

    def worker(number: int) -> Steps:
        yield 2
        yield 5
        seen.append((simulator.now, number))

    simulator.process(fails())
    for number in range(others):
        simulator.process(worker(number))
    simulator.call_at(4, seen.append, "later")

    with pytest.raises(ArithmeticError):
        simulator.run()
    assert simulator.now == 2
    simulator.run()

    assert seen == ["later", *[(7, number) for number in range(others)]]


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_cancelled_delay_leaves_its_instant_to_the_others(others: int) -> None:
    simulator = Simulator()
    seen: list[Any] = []

    def worker(number: int) -> Steps:
        try:
            yield 9
        except KeyError:
            seen.append((simulator.now, "cancelled"))
            return
        seen.append((simulator.now, number))

    cancelled = simulator.process(worker(-1))
    for number in range(others):
        simulator.process(worker(number))
    simulator.call_at(3, cancelled.cancel, KeyError())
    simulator.run()

    assert seen == [(3, "cancelled"), *[(9, number) for number in range(others)]]
    assert simulator.now == (9 if others else 3)


def test_a_process_waits_for_delays_events_and_other_processes() -> None:
    simulator = Simulator()

    def child() -> Steps:
        yield 7
        return "grown"

    def parent(future: Future) -> Steps:
        yield 3
        first = yield future
        second = yield simulator.process(child(), "child")
        return first, second, simulator.now

    future = simulator.future("post")
    simulator.call_at(10, future.succeed, "letter")

    assert simulator.run(simulator.process(parent(future))) == ("letter", "grown", 17)


def test_waiting_for_what_has_happened_costs_no_time_and_still_gives_the_value() -> None:
    simulator = Simulator()
    done = simulator.future()
    done.succeed(4)

    def process() -> Steps:
        total = 0
        for _ in range(5_000):  # more than may be passed over in one turn
            total += yield done
        return total

    assert simulator.run(simulator.process(process())) == 20_000
    assert simulator.now == 0


def test_a_failure_is_raised_where_somebody_waits_for_it() -> None:
    simulator = Simulator()

    def child() -> Steps:
        yield 1
        raise ValueError("broken")

    def parent() -> Steps:
        try:
            yield simulator.process(child())
        except ValueError as error:
            return str(error)

    assert simulator.run(simulator.process(parent())) == "broken"


def test_a_failure_that_nobody_waits_for_leaves_run_and_the_rest_can_go_on() -> None:
    simulator = Simulator()
    seen: list[Any] = []

    def broken() -> Steps:
        yield 4
        raise ValueError("unattended")

    simulator.process(broken())
    simulator.call_at(4, seen.append, "due at the same instant")

    with pytest.raises(ValueError, match="unattended"):
        simulator.run()
    simulator.run()

    assert seen == ["due at the same instant"]


def test_a_limit_that_is_over_ends_the_run_and_is_no_failure_of_who_was_running() -> None:
    simulator = Simulator()
    told: list[str] = []

    def interrupted() -> Generator[Any, Any, None]:
        yield 10
        raise TimeLimit("the time is over")

    def waiting(other: Future) -> Generator[Any, Any, None]:
        try:
            yield other
        except TimeLimit as limit:
            told.append(str(limit))

    simulator.process(waiting(simulator.process(interrupted())))

    with pytest.raises(TimeLimit, match="the time is over"):
        simulator.run()
    assert told == []


def test_an_event_happens_once() -> None:
    future = Simulator().future("door")
    future.succeed()

    with pytest.raises(LocalProtocolError, match="door has already happened"):
        future.succeed()
    with pytest.raises(LocalProtocolError, match="door has already happened"):
        future.fail(ValueError())
    assert future.value is None


def test_all_of_gives_the_values_in_order() -> None:
    simulator = Simulator()
    slow, fast = simulator.future(), simulator.future()
    simulator.call_at(9, slow.succeed, "slow")
    simulator.call_at(2, fast.succeed, "fast")

    assert simulator.run(all_of([slow, fast])) == ["slow", "fast"]


def test_all_of_fails_with_the_first_failure_among_its_parts() -> None:
    simulator = Simulator()
    good, bad = simulator.timer(5), simulator.future()
    simulator.call_at(3, bad.fail, KeyError("lost"))

    with pytest.raises(KeyError, match="lost"):
        simulator.run(all_of([good, bad]))
    assert simulator.now == 3


def test_waiting_for_what_never_happens_is_a_deadlock_that_names_lines_of_user_code() -> None:
    simulator = Simulator()
    never = simulator.future("the bell")

    def inner() -> Steps:
        yield never

    def waiter() -> Steps:
        yield 6
        yield from inner()

    simulator.process(waiter(), "rank 3")

    with pytest.raises(Deadlock, match="rank 3 waits for the bell since instant 6") as caught:
        simulator.run(never)

    (waiting,) = caught.value.waiting
    assert (waiting.who, waiting.what, waiting.since) == ("rank 3", "the bell", 6)
    line = inner.__code__.co_firstlineno + 1
    assert waiting.where == f"{__file__}:{line} in inner"


def test_running_dry_while_a_process_waits_is_a_deadlock() -> None:
    simulator = Simulator()

    def ask() -> Steps:
        yield simulator.future("work")

    simulator.process(ask(), "client")

    with pytest.raises(Deadlock) as caught:
        simulator.run()
    assert [each.who for each in caught.value.waiting] == ["client"]


def test_a_deadlock_tells_which_of_several_things_are_missing() -> None:
    simulator = Simulator()
    there, *others = (simulator.future(name) for name in ("a", "b", "c"))

    def ask() -> Steps:
        yield all_of([there, *others])

    simulator.process(ask(), "client")
    there.succeed()

    with pytest.raises(Deadlock) as caught:
        simulator.run()
    assert caught.value.waiting[0].what == "2 of 3: b, c"


def test_running_until_an_instant_stops_after_it() -> None:
    simulator = Simulator()
    seen: list[Any] = []
    for instant in (5, 10, 11):
        simulator.call_at(instant, seen.append, instant)

    simulator.run(10)

    assert (seen, simulator.now) == ([5, 10], 10)
    simulator.run()
    assert seen == [5, 10, 11]


def test_the_limit_of_simulated_time_ends_a_program_that_never_ends() -> None:
    simulator = Simulator(time_limit=100)

    def forever() -> Steps:
        while True:
            yield 7

    simulator.process(forever())

    with pytest.raises(TimeLimit, match="limit of 100: the next event is at 105"):
        simulator.run()
    assert simulator.now == 98


def test_the_limit_of_real_time_also_ends_a_program_that_stands_still() -> None:
    simulator = Simulator(wall_limit_s=0.05)

    def forever() -> Steps:
        while True:
            yield 0

    simulator.process(forever())

    with pytest.raises(TimeLimit, match=r"more than 0\.05 s of real time"):
        simulator.run()


def test_a_cancelled_process_gets_its_exception_where_it_waits_at_that_instant() -> None:
    simulator = Simulator()
    seen: list[Any] = []

    def sleeper(target: Any) -> Steps:
        try:
            yield target
        except InterruptedError:
            seen.append(simulator.now)

    sleepers = [
        simulator.process(sleeper(target)) for target in (1_000, simulator.future("never"), 3)
    ]
    for sleeping in sleepers:
        simulator.call_at(3, sleeping.cancel, InterruptedError())

    simulator.run()

    assert seen == [3, 3, 3]
    assert simulator.now == 3


@pytest.mark.parametrize("wrong", [-1, 1.5, "soon", None])
def test_yielding_nonsense_is_an_error_on_the_line_that_yields_it(wrong: object) -> None:
    simulator = Simulator()

    def process() -> Steps:
        yield wrong

    with pytest.raises(LocalProtocolError):
        simulator.run(simulator.process(process()))


def test_the_past_cannot_be_planned() -> None:
    simulator = Simulator()
    simulator.call_at(5, lambda: None)
    simulator.run()

    with pytest.raises(LocalProtocolError, match="instant 4 is in the past: it is 5"):
        simulator.call_at(4, lambda: None)


def test_a_simulator_belongs_to_its_thread() -> None:
    simulator = Simulator()
    errors = []

    def elsewhere() -> None:
        try:
            simulator.run()
        except LocalProtocolError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(timeout=60)

    assert "belongs to the thread that made it" in errors[0]


def test_run_inside_of_run_is_refused() -> None:
    simulator = Simulator()
    simulator.call_at(1, simulator.run)

    with pytest.raises(LocalProtocolError, match="from inside the simulation"):
        simulator.run()


TRACE = """
from rankwise.sim.kernel import Simulator, Channel, CreditPool
simulator, trace = Simulator(), []
places, mail = CreditPool(simulator, 2, "places"), {name: Channel(simulator) for name in "abcdefgh"}
def worker(name, other):
    for step in range(20):
        yield places.spend()
        yield (ord(name) * 7 + step) % 5
        places.give_back()
        mail[other].put((name, step))
        trace.append((simulator.now, name, (yield mail[name].get())))
for name, other in zip("abcdefgh", "bcdefgha"):
    simulator.process(worker(name, other), name)
simulator.run()
print(trace)
"""


def test_two_runs_are_the_same_under_different_hash_seeds() -> None:
    traces = [
        subprocess.run(
            [sys.executable, "-c", TRACE],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    ]

    assert traces[0] == traces[1] != b""


def test_collections_are_rare_while_a_simulation_runs_and_as_before_afterwards() -> None:
    simulator = Simulator()
    seen = []
    before = gc.get_threshold()

    def fails() -> None:
        seen.append(gc.get_threshold()[0])
        raise ArithmeticError

    simulator.call_at(1, fails)
    with pytest.raises(ArithmeticError):
        simulator.run()

    assert seen == [50_000]
    assert gc.get_threshold() == before


def test_a_timer_happens_when_its_instant_comes_whoever_waits_for_it() -> None:
    simulator = Simulator()
    timer = simulator.timer(5)
    seen: list[Any] = []

    def waits(name: str, delay: int) -> Steps:
        yield delay
        value = yield timer
        seen.append((name, simulator.now, value))

    for name, delay in (("early", 0), ("late", 7)):
        simulator.process(waits(name, delay))
    timer.add_callback(lambda future: seen.append((future, simulator.now, future.is_done)))
    assert not timer.is_done
    simulator.run()

    assert seen == [(timer, 5, True), ("early", 5, None), ("late", 7, None)]
    assert timer.value is None
    with pytest.raises(LocalProtocolError, match="happens by itself"):
        timer.succeed()


def test_a_run_until_a_timer_ends_at_its_instant() -> None:
    simulator = Simulator()
    simulator.call_at(9, list)

    simulator.run(simulator.timer(5))
    here = simulator.now
    simulator.run(simulator.timer(2))

    assert (here, simulator.now) == (5, 7)


def test_a_timer_that_nobody_waits_for_keeps_nobody_running() -> None:
    simulator = Simulator()
    simulator.timer(1_000)

    simulator.run()

    assert simulator.now == 0
    with pytest.raises(LocalProtocolError, match="back in time"):
        simulator.timer(-1)


def test_a_process_that_waits_for_a_timer_can_be_cancelled() -> None:
    simulator = Simulator()

    def sleeper() -> Steps:
        yield simulator.timer(100)

    process = simulator.process(sleeper())
    simulator.call_at(3, process.cancel, KeyError("enough"))

    with pytest.raises(KeyError, match="enough"):
        simulator.run(process)
    assert simulator.now == 3
    simulator.run()
    assert simulator.now == 3, "nothing is left at the instant that it slept for"


def test_instants_beyond_a_limit_stay_on_the_agenda() -> None:
    simulator = Simulator(time_limit=50)
    seen: list[int] = []
    for instant in (60, 10, 20, 30):
        simulator.call_at(instant, seen.append, instant)

    simulator.run(15)
    simulator.call_at(17, seen.append, 17)
    simulator.run(20)
    assert (seen, simulator.now) == ([10, 17, 20], 20)
    with pytest.raises(TimeLimit, match="the next event is at 60"):
        simulator.run()

    assert seen == [10, 17, 20, 30]
    simulator.time_limit = None
    simulator.run()
    assert seen[-1] == 60


def test_one_that_sleeps_long_does_not_keep_what_others_have_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rankwise.sim.kernel.simulator._WALK", 64)
    simulator = Simulator()
    longest = 0

    def busy(delay: int) -> Steps:
        nonlocal longest
        for _ in range(500):
            yield delay
            longest = max(longest, len(simulator._soon))

    def sleepy() -> Steps:
        yield 10**6

    for each in (busy(2), busy(3), sleepy()):
        simulator.process(each)
    simulator.run()

    assert simulator.now == 10**6
    assert longest <= 70
