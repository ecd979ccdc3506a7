from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.units import SECOND, Duration, Instant, after
from rankwise.core.pool.machine import PoolMachine, PoolPhase
from rankwise.core.pool.vocabulary import (
    CloseRequested,
    EndTask,
    EndWorker,
    HostLost,
    InitializerFailed,
    InterruptWorker,
    KillWorker,
    NeedFailed,
    NeedMet,
    PoolEffect,
    PoolSpec,
    PoolStimulus,
    PoolStopRequested,
    PoolTaskSubmitted,
    PoolWorkerRefused,
    RecallTasks,
    ReleasePool,
    SendTask,
    StartWorker,
    TaskAnswered,
    TaskCancelled,
    TaskEnd,
    TasksRecalled,
    TaskWithdrawn,
    WorkerEnded,
    WorkerReady,
)

NOW = Instant(0)
LONG = int(Duration(SECOND))


def fed(machine: PoolMachine, *stimuli: PoolStimulus) -> list[PoolEffect]:
    return [effect for stimulus in stimuli for effect in machine.handle(stimulus, NOW)]


def pool_of(size: int, **spec: int | None) -> PoolMachine:
    """A pool whose workers are all ready and idle."""
    machine = PoolMachine(PoolSpec(size=size, **spec))  # type: ignore[arg-type]
    for worker in range(1, size + 1):
        fed(machine, PoolTaskSubmitted(-worker))
        for effect in fed(machine, WorkerReady(worker)):
            if isinstance(effect, RecallTasks):  # it was sent to another one ahead
                fed(machine, TasksRecalled(effect.worker, (-worker,)))
    fed(machine, *(TaskAnswered(worker, -worker, LONG) for worker in range(1, size + 1)))
    return machine


def test_task_starts_a_worker_and_is_sent_when_it_is_ready() -> None:
    machine = PoolMachine(PoolSpec(size=2))

    assert fed(machine, PoolTaskSubmitted(7)) == [StartWorker(1)]
    assert fed(machine, WorkerReady(1)) == [SendTask(1, 7)]
    assert fed(machine, TaskAnswered(1, 7)) == [EndTask(7, TaskEnd.ANSWERED)]


def test_no_more_workers_start_than_there_are_tasks() -> None:
    machine = PoolMachine(PoolSpec(size=3))

    effects = fed(machine, *map(PoolTaskSubmitted, range(5)))

    assert effects == [StartWorker(1), StartWorker(2), StartWorker(3)]


def test_next_task_lies_in_the_socket_of_a_busy_worker() -> None:
    machine = pool_of(1)

    effects = fed(machine, *map(PoolTaskSubmitted, (1, 2, 3)))

    assert effects == [SendTask(1, 1), SendTask(1, 2)]
    assert fed(machine, TaskAnswered(1, 1, LONG)) == [
        EndTask(1, TaskEnd.ANSWERED),
        SendTask(1, 3),
    ]


def test_many_short_tasks_are_sent_ahead_and_few_after_a_long_one() -> None:
    machine = pool_of(1)
    sent = fed(machine, *map(PoolTaskSubmitted, range(1000)))
    for task in range(200):
        sent += fed(machine, TaskAnswered(1, task, 1000))

    assert count_of_sent(sent) - 200 == PoolSpec(size=1).depth_max
    sent += fed(machine, *(TaskAnswered(1, task, LONG) for task in range(200, 250)))

    assert count_of_sent(sent) - 250 == 2


def count_of_sent(effects: list[PoolEffect]) -> int:
    return sum(isinstance(effect, SendTask) for effect in effects)


def test_one_of_many_queued_tasks_is_cancelled_and_the_others_keep_their_order() -> None:
    machine = pool_of(1)
    fed(machine, *map(PoolTaskSubmitted, range(10)))
    begun = machine.workers[0].task
    cancelled = fed(machine, *(TaskCancelled(task) for task in (5, 9)))

    sent = [task for task in range(10) if task != begun and task not in {5, 9}]
    rest = fed(machine, *(TaskAnswered(1, task, LONG) for task in (0, *sent)))

    assert [effect for effect in cancelled if isinstance(effect, EndTask)] == [
        EndTask(5, TaskEnd.CANCELLED),
        EndTask(9, TaskEnd.CANCELLED),
    ]
    order = [effect.task for effect in rest if isinstance(effect, SendTask)]
    assert order == sorted(order)


def test_idle_worker_gets_what_lies_in_a_busy_workers_socket() -> None:
    machine = pool_of(2)
    fed(machine, *map(PoolTaskSubmitted, (1, 2, 3)))

    # Worker 2 is done first, and 3 lies behind 2 or 1.
    effects = fed(machine, TaskAnswered(1, 2, LONG))

    recall = effects[-1]
    assert isinstance(recall, RecallTasks)
    assert recall.worker == 2
    assert fed(machine, TasksRecalled(2, (3,))) == [SendTask(1, 3)]


def test_nothing_is_recalled_twice_from_a_worker_that_has_taken_it() -> None:
    machine = pool_of(2)
    fed(machine, *map(PoolTaskSubmitted, (1, 2, 3)), TaskAnswered(1, 2, LONG))

    assert fed(machine, TasksRecalled(2, ())) == []


def test_task_behind_a_long_one_goes_before_what_is_queued() -> None:
    machine = pool_of(2)
    fed(machine, *map(PoolTaskSubmitted, range(1, 8)))  # worker 2 has 1 and 3, worker 1 has 2 and 4
    later = after(NOW, Duration(SECOND))

    effects = machine.handle(TaskAnswered(1, 2, LONG), later)

    assert effects == [EndTask(2, TaskEnd.ANSWERED), RecallTasks(2)]
    assert machine.handle(TasksRecalled(2, (3,)), later) == [SendTask(1, 3)]
    # And nothing is sent to the slow worker before it answers.
    assert machine.handle(TaskAnswered(1, 4, LONG), later)[1:] == [SendTask(1, 5)]
    assert machine.handle(TaskAnswered(2, 1, LONG), later)[1:] == [SendTask(2, 6), SendTask(2, 7)]


def test_worker_from_which_all_was_recalled_gets_tasks_again() -> None:
    machine = PoolMachine(PoolSpec(size=2))
    fed(machine, *map(PoolTaskSubmitted, (1, 2)), WorkerReady(1))

    assert fed(machine, WorkerReady(2)) == [RecallTasks(1)]
    effects = fed(machine, TasksRecalled(1, (1, 2)))

    assert effects == [SendTask(2, 1), SendTask(1, 2)]


def test_dependent_is_sent_when_its_last_need_is_met() -> None:
    machine = pool_of(1)

    assert fed(machine, PoolTaskSubmitted(1, needs=2), NeedMet(1)) == []
    assert fed(machine, NeedMet(1)) == [SendTask(1, 1)]


@pytest.mark.parametrize(
    ("was_cancelled", "end"), [(False, TaskEnd.SKIPPED), (True, TaskEnd.CANCELLED)]
)
def test_dependent_ends_as_its_need_does(*, was_cancelled: bool, end: TaskEnd) -> None:
    machine = pool_of(1)
    fed(machine, PoolTaskSubmitted(1, needs=2))

    assert fed(machine, NeedFailed(1, was_cancelled)) == [EndTask(1, end)]
    assert fed(machine, NeedMet(1), NeedFailed(1)) == []


def test_death_fails_the_task_that_ran_and_the_next_runs_elsewhere() -> None:
    machine = pool_of(1)
    fed(machine, *map(PoolTaskSubmitted, (1, 2)))

    effects = fed(machine, WorkerEnded(1, "it was killed", begun=(1,)))

    assert effects == [EndTask(1, TaskEnd.DIED, "it was killed", 1), StartWorker(2)]
    assert fed(machine, WorkerReady(2)) == [SendTask(2, 2)]


def test_task_with_attempts_left_runs_again_after_a_death() -> None:
    machine = pool_of(1)
    fed(machine, PoolTaskSubmitted(1, attempts=2))

    assert fed(machine, WorkerEnded(1, "killed", begun=(1,))) == [StartWorker(2)]
    assert fed(machine, WorkerReady(2)) == [SendTask(2, 1)]
    effects = fed(machine, WorkerEnded(2, "killed again", begun=(1,)))
    assert effects == [EndTask(1, TaskEnd.DIED, "killed again", 2)]


def test_attempts_of_a_chunk_that_has_advanced_count_anew() -> None:
    machine = pool_of(1)
    fed(machine, PoolTaskSubmitted(1, attempts=2))

    for worker in (1, 2, 3):
        died = WorkerEnded(worker, "killed", begun=(1,), advanced=(1,))
        assert fed(machine, died) == [StartWorker(worker + 1)]
        assert fed(machine, WorkerReady(worker + 1)) == [SendTask(worker + 1, 1)]

    # The same call as in the attempt before.
    effects = fed(machine, WorkerEnded(4, "killed", begun=(1,)))
    assert effects == [EndTask(1, TaskEnd.DIED, "killed", 4)]


def test_worker_ends_after_its_tasks_and_is_replaced_on_demand() -> None:
    machine = PoolMachine(PoolSpec(size=1, tasks_max=2))
    fed(machine, *map(PoolTaskSubmitted, (1, 2, 3)), WorkerReady(1), TaskAnswered(1, 1, LONG))

    effects = fed(machine, TaskAnswered(1, 2, LONG))

    assert effects == [EndTask(2, TaskEnd.ANSWERED), EndWorker(1), StartWorker(2)]
    assert fed(machine, WorkerEnded(1, "exit code 0")) == []
    assert fed(machine, WorkerReady(2)) == [SendTask(2, 3)]


def test_workers_that_die_before_they_are_ready_break_the_pool() -> None:
    machine = PoolMachine(PoolSpec(size=1))
    fed(machine, PoolTaskSubmitted(1))

    assert fed(machine, WorkerEnded(1, "it broke")) == [StartWorker(2)]
    assert fed(machine, PoolWorkerRefused(2, "no memory")) == [StartWorker(3)]
    effects = fed(machine, WorkerEnded(3, "it broke"))

    assert effects == [EndTask(1, TaskEnd.ABANDONED, "it broke"), ReleasePool()]
    assert fed(machine, PoolTaskSubmitted(2)) == [EndTask(2, TaskEnd.ABANDONED, "it broke")]


def test_pool_goes_on_with_the_workers_that_it_can_have() -> None:
    machine = pool_of(1)
    machine._size = 2
    fed(machine, *map(PoolTaskSubmitted, (1, 2, 3)))

    effects = fed(machine, *(PoolWorkerRefused(worker, "no memory") for worker in (2, 3, 4)))

    assert effects == [StartWorker(3), StartWorker(4)]
    assert machine.phase is PoolPhase.OPEN


def test_initializer_that_fails_breaks_the_pool() -> None:
    machine = PoolMachine(PoolSpec(size=2))
    fed(machine, *map(PoolTaskSubmitted, (1, 2)))

    effects = fed(machine, InitializerFailed(1, "it raised"))

    assert effects == [
        EndTask(1, TaskEnd.ABANDONED, "it raised"),
        EndTask(2, TaskEnd.ABANDONED, "it raised"),
        KillWorker(1),
        KillWorker(2),
    ]


def test_close_lets_tasks_end_and_then_the_workers() -> None:
    machine = pool_of(1)
    fed(machine, PoolTaskSubmitted(1), PoolTaskSubmitted(2, needs=1))

    assert fed(machine, CloseRequested()) == []
    fed(machine, TaskAnswered(1, 1, LONG), NeedMet(2))
    assert fed(machine, TaskAnswered(1, 2)) == [EndTask(2, TaskEnd.ANSWERED), EndWorker(1)]
    assert fed(machine, WorkerEnded(1, "exit code 0")) == [ReleasePool()]


def test_worker_that_does_not_end_is_killed() -> None:
    machine = pool_of(1)
    fed(machine, CloseRequested())
    deadline = after(NOW, PoolSpec(size=1).end_patience)

    assert machine.next_deadline == deadline
    assert machine.tick(NOW) == []
    assert machine.tick(deadline) == [KillWorker(1)]


def test_close_that_cancels_spares_what_was_sent() -> None:
    machine = pool_of(1)
    fed(machine, *map(PoolTaskSubmitted, (1, 2, 3)))

    assert fed(machine, CloseRequested(cancels=True)) == [EndTask(3, TaskEnd.CANCELLED)]


def test_stop_interrupts_what_runs_cancels_the_rest_and_kills_after_the_grace() -> None:
    machine = pool_of(1)
    fed(machine, *map(PoolTaskSubmitted, (1, 2, 3)))

    assert fed(machine, PoolStopRequested()) == [
        EndTask(3, TaskEnd.CANCELLED),
        RecallTasks(1),
        InterruptWorker(1),
    ]
    assert fed(machine, TasksRecalled(1, (2,))) == [EndTask(2, TaskEnd.CANCELLED)]
    assert machine.tick(after(NOW, PoolSpec(size=1).grace)) == [KillWorker(1)]
    assert fed(machine, PoolStopRequested()) == [KillWorker(1)]
    assert fed(machine, WorkerEnded(1, "killed", begun=(1,))) == [
        EndTask(1, TaskEnd.DIED, "killed", 1),
        ReleasePool(),
    ]


def test_task_that_could_not_be_sent_ends_and_the_worker_goes_on() -> None:
    machine = pool_of(1)
    fed(machine, *map(PoolTaskSubmitted, (1, 2)))

    assert fed(machine, TaskWithdrawn(1, 1)) == [EndTask(1, TaskEnd.CANCELLED)]
    assert fed(machine, TaskAnswered(1, 2)) == [EndTask(2, TaskEnd.ANSWERED)]


class _World:
    """Carries orders out as a driver does, and notes how each task has ended."""

    def __init__(self, spec: PoolSpec, pace: int) -> None:
        self.now, self.pace = NOW, Duration(pace)
        self.machine = PoolMachine(spec)
        self.ends: Counter[int] = Counter()
        self.starting: list[int] = []
        self.sockets: dict[int, list[int]] = {}
        self.running: dict[int, int] = {}
        self.ending: set[int] = set()
        self.killed: set[int] = set()
        self.runs: Counter[int] = Counter()
        self.is_released = False

    def tell(self, stimulus: PoolStimulus) -> None:
        waiting = [stimulus]
        while waiting:
            self.now = after(self.now, self.pace)
            for effect in self.machine.handle(waiting.pop(0), self.now):
                assert not self.is_released or isinstance(effect, EndTask)
                if (answer := self.carry_out(effect)) is not None:
                    waiting.append(answer)

        if self.machine.phase is PoolPhase.OPEN and self.machine._queue:
            workers = self.machine._workers.values()
            assert all(worker.tasks for worker in workers if worker.is_ready)
        if self.machine.phase is PoolPhase.OPEN and self.machine._idle:
            assert not any(self.sockets[worker] for worker in self.running)

    def carry_out(self, effect: PoolEffect) -> PoolStimulus | None:
        match effect:
            case StartWorker(worker=worker):
                self.starting.append(worker)
                self.sockets[worker] = []
            case SendTask(worker=worker, task=task):
                assert worker not in self.ending
                self.sockets[worker].append(task)
            case RecallTasks(worker=worker):
                tasks, self.sockets[worker] = tuple(self.sockets[worker]), []
                return TasksRecalled(worker, tasks)
            case EndWorker(worker=worker):
                assert not self.sockets[worker]
                self.ending.add(worker)
            case KillWorker(worker=worker):
                self.killed.add(worker)
            case EndTask(task=task):
                self.ends[task] += 1
            case ReleasePool():
                assert not self.sockets
                self.is_released = True
            case InterruptWorker():
                pass
        return None

    def step(self, worker: int) -> None:
        """A worker makes progress: it becomes ready, takes a task, or answers."""
        if worker in self.killed or (worker in self.ending and worker not in self.running):
            self.die(worker)
        elif worker in self.starting:
            self.starting.remove(worker)
            self.tell(WorkerReady(worker))
        elif worker in self.running:
            self.tell(TaskAnswered(worker, self.running.pop(worker), 1000))
        elif self.sockets[worker]:
            self.running[worker] = self.sockets[worker].pop(0)
            self.runs[self.running[worker]] += 1

    def die(self, worker: int) -> None:
        begun = (self.running.pop(worker),) if worker in self.running else ()
        del self.sockets[worker]
        if worker in self.starting:
            self.starting.remove(worker)
        self.tell(WorkerEnded(worker, "killed", begun))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(
            st.sampled_from(["step", "step", "step", "die", "cancel", "meet", "fail"]),
            st.integers(0, 30),
            st.just(0),
        ),
        st.tuples(st.sampled_from(["close", "stop", "lose"]), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(
    size=st.integers(1, 3),
    tasks_max=st.sampled_from([None, 1, 2]),
    pace=st.sampled_from([0, SECOND // 300, SECOND]),
    steps=STEPS,
    ends=st.booleans(),
)
def test_each_task_ends_exactly_once(
    *, size: int, tasks_max: int | None, pace: int, steps: list[tuple[str, int, int]], ends: bool
) -> None:
    world = _World(PoolSpec(size=size, tasks_max=tasks_max), pace)
    attempts: dict[int, int] = {}
    needs: dict[int, int] = {}
    for what, number, more in steps:
        workers = sorted(world.sockets)
        if what == "submit" and not world.is_released:
            task = len(attempts)
            attempts[task], needs[task] = more, number
            world.tell(PoolTaskSubmitted(task, needs=number, attempts=more))
        elif what == "step" and workers:
            world.step(workers[number % len(workers)])
        elif what == "die" and workers:
            world.die(workers[number % len(workers)])
        elif what == "cancel":
            # A driver tells it of a task whose future was not running.
            sent = {task for socket in world.sockets.values() for task in socket}
            if number in attempts and number not in sent | {*world.running.values()}:
                world.tell(TaskCancelled(number))
        elif what == "meet" and needs.get(number):
            needs[number] -= 1
            world.tell(NeedMet(number))
        elif what == "fail" and needs.get(number):
            needs[number] -= 1
            world.tell(NeedFailed(number))
        elif what == "lose" and ends:
            world.sockets.clear()
            world.running.clear()
            world.starting.clear()
            world.tell(HostLost("it is gone"))
        elif what in ("close", "stop") and ends:
            world.tell(CloseRequested() if what == "close" else PoolStopRequested())

    for task, left in needs.items():
        for _ in range(left):
            world.tell(NeedMet(task))
    world.tell(CloseRequested())
    for _ in range(2000):
        if world.is_released:
            break
        for worker in sorted(world.sockets):
            world.step(worker)

    assert world.is_released
    assert world.ends == dict.fromkeys(attempts, 1)
    assert all(world.runs[task] <= attempts[task] for task in attempts)
