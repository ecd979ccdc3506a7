"""Orchestration functions on trees of real processes."""

import linecache
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankwise.base.errors import (
    ConfigError,
    LocalProtocolError,
    TaskFailed,
    TreeError,
    WorkerDied,
)
from rankwise.base.failure import FailureCause
from rankwise.core.tree.vocabulary import EndCause
from rankwise.workers import (
    BadArguments,
    ChipCallable,
    DataType,
    Orchestrator,
    TaskArgs,
    TensorArgType,
    Worker,
    array_at,
    context,
)

pytestmark = pytest.mark.system

IN, OUT, INOUT = TensorArgType.INPUT, TensorArgType.OUTPUT, TensorArgType.INOUT


class Misfortune(Exception):
    pass


class Unspeakable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("this exception stays where it is")


class Demanding(Exception):
    def __init__(self, what: str, lock: Any) -> None:
        super().__init__(what)
        self.what = what
        self.lock = lock


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def given(*tensors: tuple[Any, TensorArgType], scalars: tuple[int, ...] = ()) -> TaskArgs:
    args = TaskArgs()
    for tensor, tag in tensors:
        args.add_tensor(tensor, tag)
    for scalar in scalars:
        args.add_scalar(scalar)
    return args


def fill(args: TaskArgs) -> None:
    array_at(args.tensor(0))[...] = args.scalar(0)


def double(args: TaskArgs) -> None:
    array_at(args.tensor(1))[...] = array_at(args.tensor(0)) * 2


def append_digit(args: TaskArgs) -> None:
    values = array_at(args.tensor(0))
    values[0] = values[0] * 10 + args.scalar(0)


def count_up(args: TaskArgs) -> None:
    array_at(args.tensor(0))[args.scalar(0)] += 1


def write_tags(args: TaskArgs) -> None:
    last = args.tensor_count() - 1
    array_at(args.tensor(last))[...] = [int(args.tag(index)) for index in range(last + 1)]


def do_nothing(args: TaskArgs) -> None:
    pass


def raise_misfortune(args: TaskArgs) -> None:
    raise Misfortune("it was not to be")


def die(args: TaskArgs) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(args: TaskArgs) -> None:
    while True:
        signal.pause()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(level=3, num_sub_workers=2) as made:
        made.init()
        yield made


def run(worker: Worker, function: Callable[[Orchestrator], object], **options: Any) -> None:
    worker.run(lambda orch, _args, _config: function(orch), **options)


def test_more_than_there_are_addresses_cannot_be_shared(worker: Worker) -> None:
    with pytest.raises(TreeError, match=r"^512 GiB were asked for, and no such piece is left"):
        worker.share((2**37,), "f4")

    assert worker.share((4,), "f4").sum() == 0


def test_a_value_goes_from_task_to_task_through_memory_that_they_share(worker: Worker) -> None:
    result = worker.share((4,), "f4")

    def orchestrate(orch: Orchestrator) -> None:
        between = orch.alloc((4,), DataType.FLOAT32)
        orch.submit_sub(fill, given((between, OUT), scalars=(21,)))
        orch.submit_sub(double, given((between, IN), (result, OUT)))

    run(worker, orchestrate)

    assert result.tolist() == [42] * 4


def test_tasks_read_the_tags_that_their_submitter_gave(worker: Worker) -> None:
    some, told = worker.share((4,), "i8"), worker.share((5,), "i8")
    tags = (IN, INOUT, TensorArgType.OUTPUT_EXISTING, TensorArgType.NO_DEP)

    def submit(orchestrator: Orchestrator) -> None:
        tensors = [(some[index : index + 1], tag) for index, tag in enumerate(tags)]
        orchestrator.submit_sub(write_tags, given(*tensors, (told, INOUT)))

    run(worker, submit)

    assert [*told] == [int(tag) for tag in (*tags, INOUT)]


def test_an_output_without_address_gets_memory_that_the_caller_is_told(worker: Worker) -> None:
    result = worker.share((4,), "f4")

    def orchestrate(orch: Orchestrator) -> None:
        args = given((orch.alloc((4,)), OUT), scalars=(5,))
        args.tensor(0).data = 0
        orch.submit_sub(fill, args)
        assert args.tensor(0).data
        orch.submit_sub(double, given((args.tensor(0), IN), (result, OUT)))

    run(worker, orchestrate)

    assert result.tolist() == [10] * 4


def test_every_one_of_many_tasks_runs_exactly_once(worker: Worker) -> None:
    counts = worker.share((20_000,), "u1")

    def orchestrate(orch: Orchestrator) -> None:
        for number in range(counts.size):
            args = given((counts, TensorArgType.NO_DEP), scalars=(number,))
            orch.submit_sub(count_up, args)

    run(worker, orchestrate)

    assert counts.tolist() == [1] * counts.size


def test_tasks_that_change_the_same_bytes_run_in_the_order_of_submission(worker: Worker) -> None:
    chains = worker.share((3, 1), "i8")

    def orchestrate(orch: Orchestrator) -> None:
        for digit in (1, 2, 3, 4, 5, 6, 7, 8):
            for chain in chains:
                orch.submit_sub(append_digit, given((chain, INOUT), scalars=(digit,)))

    run(worker, orchestrate)

    assert chains.reshape(-1).tolist() == [12345678] * 3


def test_a_writer_waits_for_those_who_still_read(worker: Worker) -> None:
    source, seen = worker.share((1,), "f4"), worker.share((50, 1), "f4")

    def orchestrate(orch: Orchestrator) -> None:
        for number, place in enumerate(seen):
            orch.submit_sub(fill, given((source, OUT), scalars=(number,)))
            orch.submit_sub(double, given((source, IN), (place, OUT)))

    run(worker, orchestrate)

    assert seen.reshape(-1).tolist() == [2 * number for number in range(50)]


def test_a_function_that_is_registered_after_init_brings_along_what_it_captures(
    worker: Worker,
) -> None:
    result, addend = worker.share((1,), "f4"), 7

    def add(args: TaskArgs) -> None:
        array_at(args.tensor(0))[0] += addend

    number = worker.register(add)
    run(worker, lambda orch: orch.submit_sub(number, given((result, INOUT))))

    assert result[0] == 7


def test_the_traceback_of_a_late_function_has_the_line_of_its_notebook_cell(
    worker: Worker,
) -> None:
    source, name = "def fail(args):\n    raise ValueError('in a cell')  # its line\n", "<cell 3>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), cell)  # as IPython does

    with pytest.raises(ValueError, match="in a cell") as caught:
        run(worker, lambda orch: orch.submit_sub(cell["fail"]))

    shown = "".join(traceback.format_exception(caught.value))
    assert 'File "<cell 3>", line 2' in shown
    assert "raise ValueError('in a cell')  # its line" in shown


def test_shared_arrays_that_a_late_function_captures_stay_shared(worker: Worker) -> None:
    shared, private = worker.share((4, 2), "f4"), np.zeros(1)
    column = shared[::2, 1]

    def fill_both(args: TaskArgs) -> None:
        column[...] = 5
        private[...] = 5

    run(worker, lambda orch: orch.submit_sub(fill_both))

    assert shared.tolist() == [[0, 5], [0, 0], [0, 5], [0, 0]]
    assert private.tolist() == [0]


def test_an_exception_keeps_its_class_and_says_where_it_was_raised(worker: Worker) -> None:
    with pytest.raises(Misfortune, match="it was not to be") as caught:
        run(worker, lambda orch: orch.submit_sub(raise_misfortune))

    assert "in raise_misfortune" in str(caught.value.__cause__)
    assert "task 0 (raise_misfortune) at sub" in caught.value.__notes__[0]


def test_what_needs_a_failed_task_is_skipped_and_all_else_runs(worker: Worker) -> None:
    counts = worker.share((3,), "i4")
    tainted, unharmed = counts[:1], counts[1:2]

    def orchestrate(orch: Orchestrator) -> None:
        orch.submit_sub(raise_misfortune, given((tainted, OUT)))
        orch.submit_sub(count_up, given((tainted, INOUT), scalars=(0,)))
        orch.submit_sub(count_up, given((unharmed, INOUT), scalars=(0,)))

    with pytest.raises(Misfortune) as caught:
        run(worker, orchestrate)

    assert counts.tolist() == [0, 1, 0]
    causes = [failure.cause for failure in worker.failures]
    assert causes == [EndCause.RAISED, EndCause.SKIPPED]
    assert "task 1 (count_up) was skipped, since it needs task 0" in caught.value.__notes__[-1]
    run(worker, lambda orch: orch.submit_sub(count_up, given((counts, INOUT), scalars=(2,))))
    assert counts.tolist() == [0, 1, 1]


def test_notes_causes_and_the_members_of_groups_arrive(worker: Worker) -> None:
    def fail(args: TaskArgs) -> None:
        try:
            raise_several(ConfigError("bad", hint="look"))
        except ExceptionGroup as group:
            group.add_note("a note")
            raise ValueError("of the group") from group

    def raise_several(bad: Exception) -> None:
        raise ExceptionGroup("several", [KeyError("k"), bad])

    with pytest.raises(ValueError, match="of the group") as caught:
        run(worker, lambda orch: orch.submit_sub(fail))

    group = caught.value.__cause__
    assert isinstance(group, ExceptionGroup)
    assert group.__notes__ == ["a note"]
    assert [repr(member) for member in group.exceptions] == ["KeyError('k')", "ConfigError('bad')"]
    assert "in raise_several" in str(group.__cause__)


def test_an_exception_that_cannot_travel_is_told_in_words(worker: Worker) -> None:
    def speak(args: TaskArgs) -> None:
        raise Unspeakable("but I can be quoted")

    with pytest.raises(TaskFailed, match="Unspeakable: but I can be quoted"):
        run(worker, lambda orch: orch.submit_sub(speak))


def test_an_exception_whose_class_cannot_be_called_again_keeps_its_class(worker: Worker) -> None:
    def demand(args: TaskArgs) -> None:
        raise Demanding("a lock", threading.Lock())

    with pytest.raises(Demanding, match="a lock") as caught:
        run(worker, lambda orch: orch.submit_sub(demand))

    assert caught.value.what == "a lock"
    assert not hasattr(caught.value, "lock")


def test_an_exception_that_cannot_be_printed_does_not_end_its_child(worker: Worker) -> None:
    def mumble(args: TaskArgs) -> None:
        raise Unprintable

    with pytest.raises(Unprintable):
        run(worker, lambda orch: orch.submit_sub(mumble))

    assert worker.failures[0].cause is EndCause.RAISED
    assert "Unprintable: <its text cannot be had: RuntimeError>" in worker.failures[0].summary


def test_an_exception_that_names_an_odd_file_does_not_end_its_child(worker: Worker) -> None:
    def open_odd(args: TaskArgs) -> None:
        Path(os.fsdecode(b"/odd-\xff")).read_text()

    with pytest.raises(FileNotFoundError) as caught:
        run(worker, lambda orch: orch.submit_sub(open_odd))

    assert os.fsencode(caught.value.filename) == b"/odd-\xff"
    assert r"/odd-\udcff" in worker.failures[0].summary


@pytest.mark.parametrize("fate", ["returns", "raises", "exits"])
def test_a_process_that_a_task_forks_ends_where_the_task_does(worker: Worker, fate: str) -> None:
    codes = worker.share((1,), "i8")

    def fork(args: TaskArgs) -> None:
        pid = os.fork()
        if pid == 0:
            if fate == "raises":
                raise Misfortune("in the copy")
            if fate == "exits":
                raise SystemExit(5)
            return
        codes[0] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    run(worker, lambda orch: orch.submit_sub(fork))
    for _ in range(20):
        run(worker, lambda orch: orch.submit_sub(do_nothing))

    assert codes.tolist() == [{"returns": 0, "raises": 1, "exits": 5}[fate]]


def test_a_process_that_the_orchestration_function_forks_leaves_the_tree_alone(
    worker: Worker,
) -> None:
    forked: list[int] = []

    def orchestrate(orch: Orchestrator) -> None:
        orch.submit_sub(do_nothing)
        forked.append(os.fork())

    try:
        run(worker, orchestrate)
    except LocalProtocolError as error:
        os._exit(
            7 if "a process that it had forked" in str(error) else 1
        )  # only the copy gets here

    assert os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1]) == 7
    run(worker, lambda orch: orch.submit_sub(do_nothing))


def test_functions_that_nobody_holds_any_more_are_forgotten(worker: Worker) -> None:
    def shared_memory_kib() -> int:
        """What is in memory of the shared mappings; a process's own counters lag behind."""
        kib, is_shared = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            name, value, *_ = line.split()
            if "-" in name and not name.endswith(":"):
                is_shared = value[3] == "s"
            elif name == "Rss:" and is_shared:
                kib += int(value)
        return kib

    cargo = np.ones(1 << 18, "u1")
    seen = worker.share((1,), "i8")

    def one_run(number: int) -> None:
        def late(args: TaskArgs) -> None:
            seen[0] += number * int(cargo[-1])

        run(worker, lambda orch: orch.submit_sub(late))

    one_run(0)
    before = shared_memory_kib()
    for number in range(40):
        one_run(number)

    assert seen.tolist() == [sum(range(40))]
    assert shared_memory_kib() - before < 10 * 256


def test_a_function_that_is_submitted_again_keeps_its_number(worker: Worker) -> None:
    seen = worker.share((1,), "i8")

    def late(args: TaskArgs) -> None:
        seen[0] += 1

    for _ in range(3):
        run(worker, lambda orch: orch.submit_sub(late))
        run(worker, lambda orch: orch.submit_sub(lambda _: None))

    assert seen.tolist() == [3]


def test_a_recorded_function_outlives_what_the_program_holds(worker: Worker) -> None:
    seen = worker.share((1,), "i8")

    def orchestrate(orch: Orchestrator, _args: Any, _config: Any) -> None:
        def late(args: TaskArgs) -> None:
            seen[0] += 1

        orch.submit_sub(late)

    graph = worker.record(orchestrate)
    run(worker, lambda orch: orch.submit_sub(lambda _: None))
    graph.replay()

    assert seen.tolist() == [1]


def test_a_replay_that_takes_too_long_is_ended_and_the_next_run_works(worker: Worker) -> None:
    graph = worker.record(lambda orch, _args, _config: orch.submit_sub(hang))

    with pytest.raises(TimeoutError, match="a recorded graph has not ended in time"):
        graph.replay(timeout=0.05)

    run(worker, lambda orch: orch.submit_sub(do_nothing))


def test_ctrl_c_ends_a_replay_and_the_next_run_works(worker: Worker) -> None:
    parent = os.getpid()

    def interrupt_and_hang(args: TaskArgs) -> None:
        os.kill(parent, signal.SIGINT)
        hang(args)

    graph = worker.record(lambda orch, _args, _config: orch.submit_sub(interrupt_and_hang))

    with pytest.raises(KeyboardInterrupt):
        graph.replay()

    run(worker, lambda orch: orch.submit_sub(do_nothing))


def test_a_task_that_wants_to_exit_ends_neither_its_child_nor_this_process(worker: Worker) -> None:
    def leave(args: TaskArgs) -> None:
        raise SystemExit(3)

    with pytest.raises(TaskFailed, match="SystemExit: 3"):
        run(worker, lambda orch: orch.submit_sub(leave))
    run(worker, lambda orch: orch.submit_sub(do_nothing))


def test_a_sub_worker_that_is_killed_in_a_task_is_named_and_replaced(worker: Worker) -> None:
    for _ in range(3):
        with pytest.raises(WorkerDied, match=r"sub \d was killed by SIGKILL in task 0 \(die\)"):
            run(worker, lambda orch: orch.submit_sub(die))

    counts = worker.share((100,), "u1")
    run(
        worker,
        lambda orch: [
            orch.submit_sub(count_up, given((counts, TensorArgType.NO_DEP), scalars=(number,)))
            for number in range(counts.size)
        ],
    )
    assert counts.tolist() == [1] * 100


def test_members_of_a_group_run_at_the_same_time_and_meet_in_a_domain(worker: Worker) -> None:
    seen = worker.share((2,), "f4")

    def swap(args: TaskArgs) -> None:
        member = context()["pair"]
        member["x"][...] = member.rank + 1
        member.barrier(timeout=30)
        array_at(args.tensor(0))[member.rank] = member.peer(1 - member.rank)["x"][0]

    def orchestrate(orch: Orchestrator) -> None:
        orch.domain("pair", buffers={"x": ((1,), "f4")}, subs=True)
        args = given((seen, TensorArgType.NO_DEP))
        orch.submit_sub_group(swap, [args, args], workers=[0, 1])

    run(worker, orchestrate)
    assert seen.tolist() == [2, 1]
    run(worker, orchestrate)  # the name is free again


@pytest.mark.parametrize("end", [die, raise_misfortune])
def test_peers_in_a_barrier_do_not_wait_for_a_member_that_has_failed(
    worker: Worker, end: Callable[[TaskArgs], None]
) -> None:
    def meet_or_end(args: TaskArgs) -> None:
        member = context()["pair"]
        if member.rank == 1:
            end(args)
        member.barrier(timeout=60)

    def orchestrate(orch: Orchestrator) -> None:
        orch.domain("pair", subs=True)
        orch.submit_sub_group(meet_or_end, [None, None], workers=[0, 1])

    expected = WorkerDied if end is die else Misfortune
    with pytest.raises(expected):
        run(worker, orchestrate)
    (failed,) = worker.failures
    root, *others = failed.failures
    assert root.cause is (FailureCause.SIGNALED if end is die else FailureCause.RAISED)
    assert (failed.child, root.local_rank) == ("sub 1", 1)
    assert [other.error and other.error.short_type for other in others] == ["PeerDied"]
    run(worker, lambda orch: orch.submit_sub(do_nothing))


def test_a_run_that_takes_too_long_is_ended_and_the_next_one_works(worker: Worker) -> None:
    with pytest.raises(TimeoutError):
        run(worker, lambda orch: orch.submit_sub(hang), timeout=0.05)

    run(worker, lambda orch: orch.submit_sub(do_nothing))


@pytest.mark.parametrize("seconds", [-1, float("nan"), "soon"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(worker: Worker, seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"timeout is .*, expected a number of seconds"):
        run(worker, lambda orch: orch.submit_sub(do_nothing), timeout=seconds)


def test_a_run_may_have_all_the_time_in_the_world(worker: Worker) -> None:
    run(worker, lambda orch: orch.submit_sub(do_nothing), timeout=float("inf"))


def test_a_run_that_takes_too_long_says_what_it_waited_for(worker: Worker, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)

    def begin_and_hang(args: TaskArgs) -> None:
        begun.write_text("")
        hang(args)

    def orchestrate(orch: Orchestrator) -> None:
        orch.submit_sub(begin_and_hang)
        begun.read_text()  # what has not begun would only be taken back

    with pytest.raises(TimeoutError, match="a task has not ended in time") as caught:
        run(worker, orchestrate, timeout=0.05)

    assert re.search(r"SIGKILL in task 0 \(\S*begin_and_hang\)", caught.value.__notes__[0])
    assert [failure.cause for failure in worker.failures] == [EndCause.DIED]


@pytest.mark.parametrize("shape", [(-1,), (2.5,), "ab", None, np.ones((2, 2))])
def test_a_shape_that_no_tensor_has_is_refused(worker: Worker, shape: Any) -> None:
    with pytest.raises(ConfigError, match=r"the shape is .*, expected whole numbers"):
        worker.share(shape)
    with pytest.raises(ConfigError, match=r"the shape is .*, expected whole numbers"):
        run(worker, lambda orch: orch.alloc(shape))


def test_types_have_the_same_names_wherever_they_are_given(worker: Worker) -> None:
    assert worker.share(4, "i2").dtype == np.int16

    def orchestrate(orch: Orchestrator) -> None:
        assert orch.alloc(4, "i2").dtype is DataType.INT16
        assert orch.alloc((2, 2), "float32").dtype is DataType.FLOAT32

    run(worker, orchestrate)


def test_arguments_that_are_no_task_args_and_functions_that_are_none_are_refused(
    worker: Worker,
) -> None:
    with pytest.raises(BadArguments, match="a task was given int for its arguments"):
        run(worker, lambda orch: orch.submit_sub(do_nothing, 42))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"run\(\) was given 42, which cannot be called"):
        worker.run(42)


async def sleep(_: object) -> None:
    """A call of it makes a coroutine."""


def count(_: object) -> Iterator[int]:
    """A call of it makes an iterator."""
    yield 1


@pytest.mark.parametrize("function", [sleep, count, partial(sleep)])
def test_functions_whose_call_runs_nothing_are_refused(function: Any, worker: Worker) -> None:
    for use in (
        lambda: run(worker, lambda orch: orch.submit_sub(function)),
        lambda: worker.register(function),
        lambda: worker.run(function),
        lambda: worker.record(function),
        lambda: ChipCallable.build(None, "f", function),
    ):
        with pytest.raises(ConfigError, match="a call makes"):
            use()


def test_the_time_is_up_also_while_a_full_ring_makes_submit_wait() -> None:
    with Worker(level=3, num_sub_workers=1, ring_depth=2) as worker:
        worker.init()

        with pytest.raises(TimeoutError):
            run(worker, lambda orch: [orch.submit_sub(hang) for _ in range(5)], timeout=0.05)

        run(worker, lambda orch: orch.submit_sub(do_nothing))


def test_a_worker_is_not_closed_in_the_middle_of_its_run(worker: Worker) -> None:
    with pytest.raises(LocalProtocolError, match="inside of run"):
        run(worker, lambda _: worker.close())
    run(worker, lambda orch: orch.submit_sub(do_nothing))


def test_a_forked_copy_of_the_process_can_neither_use_nor_end_the_tree(worker: Worker) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with pytest.raises(LocalProtocolError, match="forked from its own"):
                run(worker, lambda orch: orch.submit_sub(do_nothing))
            worker.close()
            code = 0
        finally:
            os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    run(worker, lambda orch: orch.submit_sub(do_nothing))


def test_ctrl_c_ends_a_run_and_the_next_one_works(worker: Worker) -> None:
    myself = os.getpid()

    def interrupt(args: TaskArgs) -> None:
        os.kill(myself, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(worker, lambda orch: [orch.submit_sub(interrupt), orch.submit_sub(hang)])

    if worker.is_initialized:
        run(worker, lambda orch: orch.submit_sub(do_nothing))


def test_what_was_submitted_before_the_function_raised_is_finished(worker: Worker) -> None:
    counts = worker.share((1,), "u1")

    def orchestrate(orch: Orchestrator) -> None:
        orch.scope_begin()
        orch.submit_sub(count_up, given((counts, INOUT), scalars=(0,)))
        raise Misfortune("in the middle")

    with pytest.raises(Misfortune, match="in the middle"):
        run(worker, orchestrate)

    assert counts[0] == 1
    run(worker, lambda orch: orch.submit_sub(do_nothing))


def test_an_orchestrator_is_of_no_use_after_its_run(worker: Worker) -> None:
    kept: list[Orchestrator] = []
    run(worker, kept.append)

    with pytest.raises(LocalProtocolError, match="after its run was over"):
        kept[0].submit_sub(do_nothing)


def test_a_run_inside_a_run_is_refused(worker: Worker) -> None:
    with pytest.raises(LocalProtocolError, match="inside of run"):
        run(worker, lambda _: run(worker, lambda orch: orch.submit_sub(do_nothing)))


@pytest.mark.parametrize(
    ("submit", "message"),
    [
        (lambda orch: orch.submit_sub(77), "callable 77 is not registered"),
        (lambda orch: orch.submit_sub("double"), "cannot be called"),
        (lambda orch: orch.submit_sub_group(do_nothing, [None] * 3), "can never run"),
        (lambda orch: orch.submit_sub_group(do_nothing, [None], workers=[2]), "no sub worker 2"),
        (lambda orch: orch.submit_sub_group(do_nothing, [None] * 2, workers=[1, 1]), "same child"),
        (lambda orch: orch.submit_next_level(do_nothing), "can never run"),
        (lambda orch: orch.submit_sub(fill, given((np.zeros(4, "f4"), OUT))), "do not share"),
        (lambda orch: orch.malloc(0, 64), "there are 0"),
        (lambda orch: orch.domain("d", ranks=[5], subs=True), "no sub worker 5"),
    ],
)
def test_what_can_never_run_is_refused_when_it_is_submitted(
    worker: Worker, submit: Callable[[Orchestrator], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(worker, submit)
    run(worker, lambda orch: orch.submit_sub(do_nothing))


def test_a_ring_that_is_full_makes_submit_wait() -> None:
    with Worker(level=3, num_sub_workers=1, ring_depth=2) as worker:
        worker.init()
        counts = worker.share((500,), "u1")

        run(
            worker,
            lambda orch: [
                orch.submit_sub(count_up, given((counts, INOUT), scalars=(number,)))
                for number in range(500)
            ],
        )

        assert counts.tolist() == [1] * 500


def test_a_heap_that_is_full_waits_for_closed_scopes_and_names_open_ones() -> None:
    with Worker(level=3, num_sub_workers=1, heap_ring_size=1024) as worker:
        worker.init()

        def with_scopes(orch: Orchestrator) -> None:
            for number in range(100):
                with orch.scope():
                    orch.submit_sub(fill, given((orch.alloc((512,)), OUT), scalars=(number,)))

        run(worker, with_scopes)

        with pytest.raises(TreeError, match="the open scope at depth 1 holds 4 KiB"):
            run(worker, lambda orch: [orch.alloc((512,)) for _ in range(3)])
        with pytest.raises(RuntimeError, match="1 MiB were asked for, the heap has 4 KiB"):
            run(worker, lambda orch: orch.alloc((1 << 18,)))
        run(worker, with_scopes)


def test_a_recorded_graph_does_the_same_each_time(worker: Worker) -> None:
    chains = worker.share((2, 1), "i8")

    def orchestrate(orch: Orchestrator, _args: Any, _config: Any) -> None:
        for digit in (1, 2, 3):
            for chain in chains:
                orch.submit_sub(append_digit, given((chain, INOUT), scalars=(digit,)))

    graph = worker.record(orchestrate)
    assert (graph.task_count, chains.reshape(-1).tolist()) == (6, [0, 0])
    graph.replay()
    graph.replay()

    assert chains.reshape(-1).tolist() == [123123] * 2


@pytest.mark.parametrize(
    ("submit", "message"),
    [
        (lambda orch: orch.submit_sub_group(do_nothing, [None]), "the group do_nothing cannot be"),
        (lambda orch: orch.submit_next_level(do_nothing), "do_nothing is for a chip or a next-lev"),
        (lambda orch: orch.domain("pair", subs=True), "a domain cannot be recorded"),
        (lambda orch: orch.malloc(0, 8), "malloc cannot be recorded"),
        (lambda orch: orch.free(0, 8), "free cannot be recorded"),
        (lambda orch: orch.copy_to(0, 8, 8, 8), "copy_to cannot be recorded"),
        (lambda orch: orch.copy_from(0, 8, 8, 8), "copy_from cannot be recorded"),
    ],
)
def test_what_a_replay_could_not_do_again_is_refused_when_it_is_recorded(
    worker: Worker, submit: Callable[[Orchestrator], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        worker.record(lambda orch, _args, _config: submit(orch))

    worker.record(lambda orch, _args, _config: orch.submit_sub(do_nothing)).replay()


def test_a_recorded_graph_raises_what_its_tasks_raise_and_names_a_dead_child(
    worker: Worker,
) -> None:
    raising = worker.record(lambda orch, _args, _config: orch.submit_sub(raise_misfortune))
    dying = worker.record(lambda orch, _args, _config: orch.submit_sub(die))

    with pytest.raises(Misfortune):
        raising.replay()
    with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
        dying.replay()
    run(worker, lambda orch: orch.submit_sub(do_nothing))
    worker.close()
    with pytest.raises(LocalProtocolError, match="after its worker was closed"):
        raising.replay()


def test_a_level_4_worker_runs_orchestration_functions_on_its_workers() -> None:
    root = Worker(level=4, num_sub_workers=1)
    inner = [Worker(level=3, num_sub_workers=1) for _ in range(2)]
    for each in inner:
        root.add_worker(each)

    def on_inner(orch: Orchestrator, args: TaskArgs, _config: Any) -> None:
        place = array_at(args.tensor(0))
        assert context().kind == "next_level"
        orch.submit_sub(append_digit, given((place, INOUT), scalars=(1,)))
        orch.submit_sub(append_digit, given((place, INOUT), scalars=(2,)))

    number = root.register(on_inner)
    with root:
        root.init()
        results = root.share((4, 1), "i8")

        def orchestrate(orch: Orchestrator, _args: Any, _config: Any) -> None:
            for result in results:
                orch.submit_next_level(number, given((result, INOUT)))
                orch.submit_sub(append_digit, given((result, INOUT), scalars=(3,)))

        root.run(orchestrate)

        assert results.reshape(-1).tolist() == [123] * 4


def test_an_exception_from_the_depth_of_a_tree_tells_each_level_that_it_passed() -> None:
    root, inner = Worker(level=4), Worker(level=3, num_sub_workers=1)
    root.add_worker(inner)
    number = root.register(lambda orch, _args, _config: orch.submit_sub(raise_misfortune))

    with root:
        root.init()
        with pytest.raises(Misfortune) as caught:
            run(root, lambda orch: orch.submit_next_level(number))

    notes = "\n".join(caught.value.__notes__)
    assert "at sub 0 of worker 0 of a level-3 worker" in notes
    assert "at worker 0 of a level-4 worker" in notes
    assert "in raise_misfortune" in str(caught.value.__cause__)
