"""Who is killed, where and when: what `run` raises, what can be used afterwards, and what is left.

Processes tell their pids through a pipe when they are where they shall be killed, and somebody
beside the tree, the executioner, kills the one that the test has named. So nothing here sleeps.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import leftovers
import pytest

from rankwise.base.errors import BootstrapFailed, WorkerDied
from rankwise.base.failure import FailureCause
from rankwise.base.units import SECOND, Duration
from rankwise.workers import (
    ChipBootstrapConfig,
    ChipCallable,
    ChipCommBootstrapConfig,
    Orchestrator,
    Worker,
    context,
    runs,
)
from rankwise.workers.platforms.host import HostDevice

pytestmark = pytest.mark.system

PATIENCE_S = 60


class Scene:
    """Where processes say who they are, and where somebody is told whom to kill."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        self._executioner = 0

    def announce(self) -> None:
        """Say who this process is, who is its parent, a fork server, and who is that one's."""
        name, fork_server = context().path, os.getppid()
        status = Path(f"/proc/{fork_server}/status").read_text()
        (worker,) = [line.split()[1] for line in status.splitlines() if line.startswith("PPid:")]
        lines = (
            f"owner of {name}={worker}",
            f"fork server of {name}={fork_server}",
            f"{name}={os.getpid()}",
        )
        os.write(self.write, "".join(f"{line}\n" for line in lines).encode())

    def hold(self, *_: object) -> NoReturn:
        """A task, a malloc, an end: something on whatever child that does not end."""
        self.announce()
        while True:
            signal.pause()

    def expect(self, victim: str, last: str, number: int = signal.SIGKILL) -> None:
        """Let the victim be killed as soon as `last` has been heard of."""
        self._executioner = os.fork()
        if self._executioner == 0:
            code = 1
            try:
                pid = self.pid_of(last, wanted=victim)
                pidfd = os.pidfd_open(pid)
                os.kill(pid, number)
                if number == signal.SIGKILL:
                    select.select([pidfd], [], [], PATIENCE_S)
                code = 0
            finally:
                os._exit(code)

    def stay(self, name: str) -> NoReturn:
        """Say that this process has a name, and stay alive."""
        os.write(self.write, f"{name}={os.getpid()}\n".encode())
        while True:
            signal.pause()

    def pid_of(self, last: str, wanted: str = "") -> int:
        """Listen until `last` has been heard of; the pid of who is wanted, if not that one's."""
        pids: dict[str, int] = {}
        text = b""
        while last not in pids:
            text += os.read(self._read, 4096)
            for line in text.decode().splitlines(keepends=True):
                if line.endswith("\n"):
                    name, _, pid = line.strip().partition("=")
                    pids[name] = int(pid)
        return pids[wanted or last]

    def carried_out(self) -> None:
        """Wait until the victim is dead, or has been sent another signal."""
        pid, self._executioner = self._executioner, 0
        assert os.waitpid(pid, 0)[1] == 0

    def close(self) -> None:
        os.close(self._read)
        os.close(self.write)
        if self._executioner:
            os.kill(self._executioner, signal.SIGKILL)
            os.waitpid(self._executioner, 0)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def tree(level: int, platform: Any = "host", **options: Any) -> Worker:
    """A worker with one of each kind of child on each level, and two chips at the bottom."""
    worker = Worker(level=3, platform=platform, device_ids=[0, 1], num_sub_workers=1, **options)
    for upper in range(4, level + 1):
        outer = Worker(level=upper, num_sub_workers=1, **options)
        outer.add_worker(worker)
        worker = outer
    return worker


def at_the_bottom(level: int, scene: Scene | None, leaf: Callable[[Orchestrator], object]) -> Any:
    """An orchestration function that goes down to level 3 and submits there."""

    if level == 3:
        return lambda orch, _args, _config: leaf(orch)
    deeper = at_the_bottom(level - 1, scene, leaf)

    def go_further(orch: Orchestrator, args: object, config: object) -> None:
        if scene is not None:
            scene.announce()
        deeper(orch, args, config)

    return lambda orch, _args, _config: orch.submit_next_level(go_further)


def do_nothing(*_: object) -> None:
    pass


NOTHING = ChipCallable.build([], "nothing", do_nothing)


def touch_all(orch: Orchestrator) -> None:
    """A task for every child of a level-3 worker."""
    orch.submit_sub(do_nothing)
    orch.submit_next_level_group(NOTHING, [None, None])


def everybody_beneath_us() -> list[int]:
    """Descriptors of all descendants of this process."""
    pidfds = []
    for pid in leftovers.marked_processes(os.environ[leftovers.MARK_VARIABLE]):
        with suppress(ProcessLookupError):  # it has just ended
            pidfds.append(os.pidfd_open(pid))
    return pidfds


@contextmanager
def all_gone_in_the_end(worker: Worker) -> Iterator[None]:
    """Everything beneath this process that is there on entry has ended on leaving."""
    pidfds = everybody_beneath_us()
    yield
    worker.close()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
        os.close(pidfd)


INNER, INNERMOST = "worker 0", "worker 0 of worker 0"
SUFFIXES = {3: "", 4: f" of {INNER}", 5: f" of {INNERMOST}"}

IN_A_TASK = [
    # level, who holds, who is killed, what is raised
    (3, "sub 0", "sub 0", r"sub 0 was killed by SIGKILL in task 0 \(.*hold\)"),
    (3, "chip 0", "chip 0", r"chip 0 was killed by SIGKILL in task 0 \(hold\)"),
    (
        3,
        "chip 0",
        "fork server of chip 0",
        r"chip 0 was lost with the fork server.* in task 0 \(hold\)",
    ),
    (4, "sub 0", "sub 0", rf"sub 0 of {INNER} was killed by SIGKILL in task 0 \(.*hold\)"),
    (4, "chip 0", "chip 0", rf"chip 0 of {INNER} was killed by SIGKILL in task 0 \(hold\)"),
    (
        4,
        "chip 0",
        "fork server of chip 0",
        rf"chip 0 of {INNER} was lost with the fork server.* in task 0",
    ),
    (4, "chip 0", INNER, rf"{INNER} was killed by SIGKILL in task 0 \(.*go_further\)"),
    (4, "chip 0", f"fork server of {INNER}", rf"{INNER} was lost with the fork server.* in task 0"),
    (5, "sub 0", "sub 0", rf"sub 0 of {INNERMOST} was killed by SIGKILL in task 0 \(.*hold\)"),
    (5, "chip 0", "chip 0", rf"chip 0 of {INNERMOST} was killed by SIGKILL in task 0 \(hold\)"),
    (5, "chip 0", "fork server of chip 0", rf"chip 0 of {INNERMOST} was lost with the fork server"),
    (5, "chip 0", INNERMOST, rf"{INNERMOST} was killed by SIGKILL in task 0 \(.*go_further\)"),
    (5, "chip 0", INNER, rf"{INNER} was killed by SIGKILL in task 0 \(.*go_further\)"),
]


@pytest.mark.parametrize(("level", "holder", "victim", "message"), IN_A_TASK)
def test_who_is_killed_in_a_task_is_named_and_is_replaced_or_ends_the_tree(
    scene: Scene, level: int, holder: str, victim: str, message: str
) -> None:
    suffix = SUFFIXES[level]
    holder, victim = (
        name + suffix if name.endswith(("sub 0", "chip 0")) else name for name in (holder, victim)
    )
    chip_hold = ChipCallable.build([], "hold", scene.hold)

    def leaf(orch: Orchestrator) -> None:
        if holder.startswith("sub"):
            orch.submit_sub(scene.hold)
        else:
            orch.submit_next_level(chip_hold, worker=0)

    touch_everybody = at_the_bottom(level, None, touch_all)
    scene.expect(victim, last=holder)
    worker = tree(level)
    worker.init()
    with all_gone_in_the_end(worker):
        with pytest.raises(WorkerDied, match=message):
            worker.run(at_the_bottom(level, scene, leaf))

        if victim.startswith("sub"):
            worker.run(touch_everybody)
        else:
            with pytest.raises(WorkerDied, match=r"close\(\) the worker, and init\(\) it again"):
                worker.run(touch_everybody)
    with worker:
        worker.init()
        worker.run(touch_everybody)


class Awkward(HostDevice):
    """A chip that holds where it is told to."""

    def __init__(self, chip: int, scene: Scene, moment: str) -> None:
        super().__init__(chip)
        self._scene = scene
        self._moment = moment
        self._hold_at("open")

    def malloc(self, size: int) -> int:
        self._hold_at("malloc")
        return super().malloc(size)

    def close(self) -> Any:
        self._hold_at("close")
        return super().close()

    def _hold_at(self, moment: str) -> None:
        if moment == self._moment and self.chip == 0:
            self._scene.hold()


class AwkwardPlatform:
    name = "awkward"

    def __init__(self, scene: Scene, moment: str) -> None:
        self._scene = scene
        self.moment = moment

    def open(self, device_id: int) -> Awkward:
        return Awkward(device_id, self._scene, self.moment)


@pytest.mark.parametrize(
    ("level", "victim", "message"),
    [
        (3, "chip 0", "^chip 0 bootstrap failed: it was killed by SIGKILL"),
        (
            3,
            "fork server of chip 0",
            "^bootstrap of chip 0 and 2 more failed: the fork server, their parent",
        ),
        (4, "chip 0", f"^chip 0 of {INNER} bootstrap failed: it was killed by SIGKILL"),
        (
            4,
            "fork server of chip 0",
            f"^bootstrap of chip 0 of {INNER} and 2 more failed: the fork server",
        ),
        (4, "owner of chip 0", f"^{INNER} bootstrap failed: it was killed by SIGKILL"),
        (5, "chip 0", f"^chip 0 of {INNERMOST} bootstrap failed: it was killed by SIGKILL"),
        (5, "owner of chip 0", f"^{INNERMOST} bootstrap failed: it was killed by SIGKILL"),
    ],
)
def test_who_is_killed_while_it_comes_up_fails_the_bootstrap_and_the_next_one_works(
    scene: Scene, level: int, victim: str, message: str
) -> None:
    platform = AwkwardPlatform(scene, "open")
    worker = tree(level, platform)
    scene.expect(victim + SUFFIXES[level], last="chip 0" + SUFFIXES[level])

    with pytest.raises(BootstrapFailed, match=message):
        worker.init()

    scene.carried_out()
    assert not leftovers.marked_processes(os.environ[leftovers.MARK_VARIABLE])
    platform.moment = "never"
    with worker:
        worker.init()
        worker.run(at_the_bottom(level, None, touch_all))


def wait_for_ever(member: Any) -> None:
    member.wait("never", timeout=PATIENCE_S)


def meet(member: Any) -> None:
    member.barrier(timeout=PATIENCE_S)


def add_up(member: Any) -> None:
    member.all_reduce(member["x"], out=member["x"])


def put_for_ever(member: Any) -> None:
    while True:
        member.put("x", member["x"], to=0)


def do_other_things(_member: Any) -> None:
    while True:
        signal.pause()


@pytest.mark.parametrize("kind", ["sub", "chip"])
@pytest.mark.parametrize(
    ("deed_of_the_victim", "deed_of_the_other"),
    [
        (do_other_things, meet),
        (do_other_things, add_up),
        (do_other_things, wait_for_ever),
        (wait_for_ever, meet),
        (meet, wait_for_ever),
        (add_up, wait_for_ever),
        (put_for_ever, add_up),
    ],
)
def test_nobody_waits_for_a_rank_that_is_killed_in_its_window(
    scene: Scene,
    kind: str,
    deed_of_the_victim: Callable[[Any], None],
    deed_of_the_other: Callable[[Any], None],
) -> None:
    def take_part(*_: object) -> None:
        member = context()["pair"]
        deed = deed_of_the_victim if member.rank == 1 else deed_of_the_other
        scene.announce()
        deed(member)

    on_chips = ChipCallable.build([], "take_part", take_part)

    def orchestrate(orch: Orchestrator, _args: object, _config: object) -> None:
        orch.domain(
            "pair", buffers={"x": ((1 << 20,), "f4")}, signals=["never"], timeout=PATIENCE_S,
            subs=subs,
        )  # fmt: skip
        if subs:
            orch.submit_sub_group(take_part, [None, None], workers=[0, 1])
        else:
            orch.submit_next_level_group(on_chips, [None, None])

    subs = kind == "sub"
    scene.expect(f"{kind} 1", last=f"{kind} 1")
    with Worker(level=3, platform="host", device_ids=[0, 1], num_sub_workers=2) as worker:
        worker.init()

        with pytest.raises(WorkerDied, match=rf"{kind} 1 was killed by SIGKILL in task 0 \(.*part"):
            worker.run(orchestrate)

        (failure,) = worker.failures
        killed, told = failure.failures
        assert (failure.child, killed.cause) == (f"{kind} 1", FailureCause.SIGNALED)
        assert told.error is not None
        assert told.error.in_a_line.startswith("PeerDied: ")
        assert f"{kind} 1 was killed by SIGKILL" in told.error.message
        if subs:
            worker.run(at_the_bottom(3, None, touch_all))


def test_peers_of_a_chip_wake_across_the_workers_of_a_tree(scene: Scene) -> None:
    def bring_up(rank: int) -> ChipBootstrapConfig:
        return ChipBootstrapConfig(comm=ChipCommBootstrapConfig(rank, 2, "all chips", 4096))

    def meet_or_hold() -> None:
        if context().communicator.rank == 1:
            scene.hold()
        context().communicator.barrier(timeout=PATIENCE_S)

    on_chip = ChipCallable.build([], "meet_or_hold", meet_or_hold)

    def on_worker(orch: Orchestrator, _args: object, _config: object) -> None:
        orch.submit_next_level(on_chip)

    def on_root(orch: Orchestrator, _args: object, _config: object) -> None:
        orch.submit_next_level(on_worker, worker=0)
        orch.submit_next_level(on_worker, worker=1)

    with Worker(level=4) as root:
        for rank in range(2):
            root.add_worker(
                Worker(
                    level=3,
                    platform="host",
                    device_ids=[rank],
                    chip_bootstrap_configs=[bring_up(rank)],
                )
            )
        scene.expect("chip 0 of worker 1", last="chip 0 of worker 1")
        root.init()

        with pytest.raises(WorkerDied, match="chip 0 of worker 1 was killed by SIGKILL in task 0"):
            root.run(on_root)


@pytest.mark.parametrize("level", [4, 5])
def test_who_is_killed_in_its_orchestration_function_takes_its_tasks_along(
    scene: Scene, level: int
) -> None:
    chip_hold = ChipCallable.build([], "hold", scene.hold)

    def leaf(orch: Orchestrator) -> None:
        orch.submit_next_level(chip_hold, worker=0)
        orch.submit_next_level_group(NOTHING, [None, None])
        while True:
            signal.pause()

    name = {4: INNER, 5: INNERMOST}[level]
    scene.expect(f"owner of chip 0 of {name}", last=f"chip 0 of {name}")
    worker = tree(level)
    worker.init()
    message = rf"^{name} was killed by SIGKILL in task 0 \("
    with all_gone_in_the_end(worker), pytest.raises(WorkerDied, match=message):
        worker.run(at_the_bottom(level, scene, leaf))


def test_a_chip_that_is_killed_in_a_malloc_is_named(scene: Scene) -> None:
    worker = Worker(level=3, platform=AwkwardPlatform(scene, "malloc"), device_ids=[0, 1])
    scene.expect("chip 0", last="chip 0")
    with worker:
        worker.init()

        with pytest.raises(WorkerDied, match="chip 0 is gone: it was killed by SIGKILL"):
            worker.malloc(8, worker_id=0)
        with pytest.raises(WorkerDied, match=r"close\(\) the worker, and init\(\) it again"):
            worker.run(at_the_bottom(3, None, do_nothing))


def test_a_sub_worker_that_is_killed_in_a_replay_is_named_and_replaced(scene: Scene) -> None:
    with Worker(level=3, num_sub_workers=1) as worker:
        worker.init()
        holding = worker.record(lambda orch, _args, _config: orch.submit_sub(scene.hold))
        quick = worker.record(lambda orch, _args, _config: orch.submit_sub(do_nothing))
        scene.expect("sub 0", last="sub 0")

        with pytest.raises(WorkerDied, match="sub 0 was killed by SIGKILL"):
            holding.replay()

        quick.replay()


@pytest.mark.parametrize(
    ("level", "victim"),
    [
        (level, victim)
        for level in (3, 4, 5)
        for victim in ("sub 0", "chip 0", "fork server of chip 0", "owner of chip 0")
        if (level, victim) != (3, "owner of chip 0")  # that is this process
    ],
)
def test_a_death_between_two_runs_is_told_by_the_next_that_needs_the_dead(
    scene: Scene, level: int, victim: str
) -> None:
    announce = ChipCallable.build([], "announce", scene.announce)

    def everybody_announces(orch: Orchestrator) -> None:
        orch.submit_sub(lambda _: scene.announce())
        orch.submit_next_level(announce, worker=0)

    scene.expect(victim + SUFFIXES[level], last="end")
    worker = tree(level)
    worker.init()
    with all_gone_in_the_end(worker):
        worker.run(at_the_bottom(level, None, everybody_announces))
        os.write(scene.write, f"end={os.getpid()}\n".encode())
        scene.carried_out()

        if victim == "sub 0":
            worker.run(at_the_bottom(level, None, touch_all))
        else:
            for _ in range(2):
                with pytest.raises(WorkerDied, match=r"SIGKILL|fork server"):
                    worker.run(at_the_bottom(level, None, touch_all))


@pytest.mark.parametrize(
    ("level", "victim", "message"),
    [
        (3, "chip 0", "^chip 0 was killed by SIGKILL when it was closed"),
        (3, "fork server of chip 0", "^chip 0 was lost with the fork server.* when it was closed"),
        (4, "chip 0", f"^chip 0 of {INNER} was killed by SIGKILL when it was closed"),
        (4, "owner of chip 0", f"^{INNER} was killed by SIGKILL when it was closed"),
        (
            4,
            "fork server of chip 0",
            f"^chip 0 of {INNER} was lost with the fork server.* when it was closed",
        ),
    ],
)
def test_who_is_killed_while_it_is_closed_is_named_and_everything_is_gone_even_so(
    scene: Scene, level: int, victim: str, message: str
) -> None:
    platform = AwkwardPlatform(scene, "close")
    worker = tree(level, platform)
    worker.init()
    scene.expect(victim + SUFFIXES[level], last="chip 0" + SUFFIXES[level])
    with all_gone_in_the_end(worker), pytest.raises(WorkerDied, match=message):
        worker.close()

    assert not worker.is_initialized


@pytest.mark.parametrize(
    ("level", "victim"), [(3, "sub 0"), (3, "chip 0"), (4, "chip 0"), (4, "owner of chip 0")]
)
def test_a_run_does_not_wait_longer_than_its_timeout_for_who_is_stopped(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, level: int, victim: str
) -> None:
    monkeypatch.setattr(runs, "_GRACE", Duration(SECOND // 20))
    chip_hold = ChipCallable.build([], "hold", scene.hold)

    def leaf(orch: Orchestrator) -> None:
        if victim.startswith("sub"):
            orch.submit_sub(scene.hold)
        else:
            orch.submit_next_level(chip_hold, worker=0)

    def go_down_and_wait(orch: Orchestrator, args: object, config: object) -> None:
        at_the_bottom(level, scene, leaf)(orch, args, config)
        scene.carried_out()

    holder = victim.removeprefix("owner of ") + SUFFIXES[level]
    scene.expect(victim + SUFFIXES[level], last=holder, number=signal.SIGSTOP)
    worker = tree(level)
    worker.init()
    with all_gone_in_the_end(worker):
        with pytest.raises(TimeoutError, match="a task has not ended in time"):
            worker.run(go_down_and_wait, timeout=0.05)

        (failure,) = worker.failures
        assert "killed by SIGKILL in task 0" in failure.summary


@pytest.mark.parametrize("level", [3, 4])
def test_who_is_stopped_while_it_comes_up_fails_the_bootstrap_at_its_deadline(
    scene: Scene, level: int
) -> None:
    worker = tree(level, AwkwardPlatform(scene, "open"), start_timeout=1.0)
    scene.expect("chip 0" + SUFFIXES[level], "chip 0" + SUFFIXES[level], signal.SIGSTOP)

    with pytest.raises(BootstrapFailed, match="bootstrap failed: it was not ready within 1 s"):
        worker.init()


@pytest.mark.parametrize("level", [3, 4])
def test_who_is_stopped_while_it_is_closed_is_killed_at_the_deadline(
    scene: Scene, level: int
) -> None:
    worker = tree(level, AwkwardPlatform(scene, "close"), close_timeout=0.3)
    worker.init()
    scene.expect("chip 0" + SUFFIXES[level], "chip 0" + SUFFIXES[level], signal.SIGSTOP)
    with all_gone_in_the_end(worker):
        worker.close()

    # Whose deadline comes first depends on who was given the processor; others may be late too.
    assert {f"chip 0{SUFFIXES[level]}", INNER} & set(worker.killed)


def come_up(scene: Scene, level: int) -> NoReturn:
    tree(level, AwkwardPlatform(scene, "open")).init()
    raise AssertionError


def be_idle(scene: Scene, level: int) -> NoReturn:
    worker = tree(level)
    worker.init()
    worker.run(at_the_bottom(level, None, touch_all))
    scene.stay("chip 0" + SUFFIXES[level])


def work(scene: Scene, level: int) -> NoReturn:
    worker = tree(level)
    worker.init()
    hold = ChipCallable.build([], "hold", scene.hold)
    worker.run(at_the_bottom(level, None, lambda orch: orch.submit_next_level(hold, worker=0)))
    raise AssertionError


def orchestrate_for_long(scene: Scene, level: int) -> NoReturn:
    worker = tree(level)
    worker.init()
    worker.run(at_the_bottom(level, None, lambda _: scene.stay("chip 0" + SUFFIXES[level])))
    raise AssertionError


def wait_for_each_other(scene: Scene, level: int) -> NoReturn:
    def meet_or_hold() -> None:
        if context().index == 0:
            scene.hold()
        meet(context()["all"])

    def submit(orch: Orchestrator) -> None:
        orch.domain("all")
        orch.submit_next_level_group(on_chips, [None, None], workers=[0, 1])

    on_chips = ChipCallable.build([], "meet_or_hold", meet_or_hold)
    worker = tree(level)
    worker.init()
    worker.run(at_the_bottom(level, None, submit))
    raise AssertionError


def leave_processes_behind(scene: Scene, level: int) -> NoReturn:
    def fork_twice(_args: object) -> None:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                scene.stay("chip 0" + SUFFIXES[level])
            os._exit(0)

    worker = tree(level)
    worker.init()
    worker.run(at_the_bottom(level, None, lambda orch: orch.submit_sub(fork_twice)))
    scene.stay("the root")


def replay(scene: Scene, level: int) -> NoReturn:
    worker = tree(level)
    worker.init()
    worker.record(lambda orch, _args, _config: orch.submit_sub(scene.hold)).replay()
    raise AssertionError


def be_closed(scene: Scene, level: int) -> NoReturn:
    worker = tree(level, AwkwardPlatform(scene, "close"), close_timeout=PATIENCE_S)
    worker.init()
    worker.close()
    raise AssertionError


@pytest.mark.parametrize(
    ("life", "level"),
    [
        *((life, level) for life in (come_up, be_idle, work, be_closed) for level in (3, 4, 5)),
        (orchestrate_for_long, 3),
        (orchestrate_for_long, 4),
        (wait_for_each_other, 3),
        (leave_processes_behind, 4),
        (replay, 3),
    ],
)
def test_nothing_of_a_tree_outlives_the_program_whatever_it_was_doing(
    scene: Scene, life: Callable[[Scene, int], NoReturn], level: int
) -> None:
    program = os.fork()
    if program == 0:
        try:
            life(scene, level)
        finally:
            os._exit(1)
    scene.pid_of("chip 0" + SUFFIXES[level] if life is not replay else "sub 0")
    pidfds = everybody_beneath_us()

    os.kill(program, signal.SIGKILL)

    assert os.waitpid(program, 0)[1] == signal.SIGKILL
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
        os.close(pidfd)
    assert len(pidfds) >= 3


UNDER_AN_AGENT = """
import os, signal, sys
from rankwise.workers import Worker

fifo = os.open(sys.argv[1], os.O_WRONLY)
root, inner = Worker(level=4), Worker(level=3, num_sub_workers=1)
root.add_worker(inner)
root.init()

def hold(_args):
    os.write(fifo, f"{os.getpid()}\\n".encode())
    signal.pause()

def go_down(orch, _args, _config):
    os.write(fifo, f"{os.getpid()} {os.getppid()} ".encode())
    orch.submit_sub(hold)

os.write(fifo, f"{os.getppid()} {os.getpid()} ".encode())
root.run(lambda orch, _args, _config: orch.submit_next_level(go_down))
"""


@pytest.mark.parametrize("victim", ["agent", "worker"])
def test_a_tree_inside_of_a_worker_of_a_run_ends_with_either(tmp_path: Path, victim: str) -> None:
    program, fifo = tmp_path / "tree.py", tmp_path / "pids"
    program.write_text(UNDER_AN_AGENT)
    os.mkfifo(fifo)
    agent = subprocess.Popen(
        [sys.executable, "-m", "rankwise", "run", "--nproc-per-node", "1", program, fifo],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with fifo.open() as told:
        pids = [int(pid) for pid in told.readline().split()]
    pidfds = [os.pidfd_open(pid) for pid in pids]

    os.kill(agent.pid if victim == "agent" else pids[1], signal.SIGKILL)

    assert agent.wait(PATIENCE_S) == (-signal.SIGKILL if victim == "agent" else 128 + 9)
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
        os.close(pidfd)
    assert (
        len(pids) == 5
    )  # the guardian, the worker, its fork server, the worker below, its sub worker
