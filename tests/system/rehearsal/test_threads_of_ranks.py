"""Threads that simulated ranks start: they take turns, and a run hears signals in every state."""

import signal
from pathlib import Path

import pytest
from preloaded import Preloaded
from running import run, start, write_program

COLLECTIVES = """
import asyncio, os, queue, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
group = dist.new_group(list(range(size)))


def reduced(by=0.0, group=group):
    tensor = torch.full((2,), rank + by)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def beside_another():
    thread = threading.Thread(target=lambda: found.append(reduced()))
    thread.start()
    mine = reduced(1.0, None)
    thread.join()
    return mine, found.pop()


def in_group_of_all():
    thread = threading.Thread(
        target=lambda: found.append((reduced(group=None), dist.get_rank(), os.environ["RANK"]))
    )
    thread.start()
    thread.join()
    total, number, variable = found.pop()
    return total, number == rank, variable == str(rank)


def of_pool():
    with ThreadPoolExecutor(2) as pool:
        return [int(pool.submit(reduced, by).result()) for by in range(2)]


def by_queues():
    asked, answers = queue.Queue(), queue.SimpleQueue()

    def serve():
        while (by := asked.get()) is not None:
            answers.put(int(reduced(by)))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    told = []
    for by in range(3):
        asked.put(by)
        dist.barrier()
        told.append(answers.get())
    asked.put(None)
    thread.join()
    return told


def with_lock():
    lock, is_held = threading.Lock(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            found.append(reduced())

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    with lock:
        return found.pop()


async def both():
    return await asyncio.gather(asyncio.to_thread(reduced), asyncio.sleep(0.001, 5))


def handle_of_main_thread():
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join()
    return tensor[0].item()


def polled():
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(reduced)
        while not future.done():
            time.sleep(0.01)
        return future.result()


def by_store():
    store = dist.distributed_c10d._get_default_store()
    act = (lambda: store.set("key", "set")) if rank == 0 else (lambda: store.wait(["key"]))
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    return store.get("key")


def of_objects():
    gathered = [None] * size
    thread = threading.Thread(target=dist.all_gather_object, args=(gathered, rank))
    thread.start()
    thread.join()
    return gathered


found = []
for each in (
    beside_another, in_group_of_all, of_pool, by_queues, with_lock, handle_of_main_thread, polled,
    by_store, of_objects,
):
    print(each.__name__, each(), flush=True)
    dist.barrier()
print("awaited", asyncio.run(both()), flush=True)
"""

FORGOTTEN = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
first, second = dist.new_group(), dist.new_group()


def reduce(group):
    time.sleep(0.1)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    print("done", tensor[0].item(), flush=True)


threading.Thread(target=reduce, args=(first,)).start()
pool = ThreadPoolExecutor(2)
pool.submit(reduce, second)
"""

MISSED = """
import threading
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
group = dist.new_group()


def act():
    if dist.get_rank():
        dist.all_reduce(torch.ones(2), group=group)
    else:
        threading.Event().wait()


saver = threading.Thread(target=act, name="saver")
saver.start()
saver.join()
"""

CHECKPOINT = """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

dist.init_process_group("cpu:gloo")
values = {"weight": torch.arange(4.0), "step": dist.get_rank()}
saving = checkpoint.async_save(values, checkpoint_id="saved")
total = torch.ones(2)
dist.all_reduce(total)
saving.result()
found = {"weight": torch.zeros(4)}
checkpoint.load(found, checkpoint_id="saved")
print(total[0].item(), found["weight"].tolist(), flush=True)
"""

ORDERS = """
import threading
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
group, works = dist.new_group(), []


def act(group=None):
    works.append(dist.all_reduce(torch.ones(2), group=group, async_op=True))


def act_in_thread():
    thread = threading.Thread(target=act, args=(group,))
    thread.start()
    thread.join()


for each in (act, act_in_thread) if dist.get_rank() else (act_in_thread, act):
    each()
for work in works:
    work.wait()
"""

ENVIRONMENT = """
import os, subprocess, sys, threading, time

rank = os.environ["RANK"]
os.environ["MINE"] = rank
found = []


def look():
    for _ in range(20):
        time.sleep(0.001)
        found.extend((os.environ["RANK"], os.environb[b"MINE"].decode(), dict(os.environ)["MINE"]))
    program = "import os; print(os.environ['RANK'], os.environ['MINE'], end='')"
    found.extend(subprocess.check_output([sys.executable, "-c", program], text=True).split())
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, f"{os.environ['RANK']} {os.environ['MINE']}".encode())
        os._exit(0)
    found.extend(os.read(reading, 100).decode().split())
    os.wait()


thread = threading.Thread(target=look)
thread.start()
while thread.is_alive():
    time.sleep(0.01)
print(set(found) == {rank}, len(found), flush=True)
"""

STUBBORN = """
import signal, sys, threading
from rankwise.simranks.world.gates import Gate
from rankwise.simranks.world.world import present_world, running_rank

state, never = sys.argv[1], Gate()


def compute():
    while True:
        sum(range(1000))


if running_rank().number == 1:
    thread = threading.Thread(target=compute)
    thread.start()
    print("begun", flush=True)
    if state == "joins it":
        thread.join()
    try:
        present_world().scheduler.wait(never)
    finally:
        if state == "cleans up for ever":
            compute()
"""

STATES = """
import os, signal, sys, threading
from rankwise.simranks.world.gates import Gate
from rankwise.simranks.world.world import present_world, running_rank

state, rank, scheduler = sys.argv[1], running_rank(), present_world().scheduler
never, goes_on = Gate(), threading.Event()


def wait_in_turn():
    with scheduler.turns.turn():
        goes_on.set()
        scheduler.wait(never)


def thread(target):
    started = threading.Thread(target=target, daemon=True)  # Python waits for others at its end
    started.start()
    return started


def block():
    os.read(os.pipe()[0], 1)


def compute():
    while True:
        sum(range(1000))


def handle(number, frame):
    print("handled", flush=True)
    sys.exit(3)


if rank.number == 1:
    if state == "main handles it":
        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)
    print("begun", flush=True)
    if state == "main computes":
        thread(wait_in_turn)
        compute()
    elif state == "main joins a thread at a gate":
        thread(wait_in_turn).join()
    elif state == "main joins a thread that blocks":
        thread(block).join()
    elif state == "main joins a thread that computes":
        thread(compute).join()
    elif state == "main waits at a gate, a thread blocks":
        thread(block)
        scheduler.wait(never)
    elif state == "main waits at a gate, a thread too":
        thread(wait_in_turn)
        goes_on.wait()
        scheduler.sleep(10**9)
        thread(block)
        scheduler.wait(never)
    elif state == "main has ended":
        threading.Thread(target=block).start()
    elif state == "main handles it":
        thread(block).join()
    elif state == "main waits for a descriptor":
        import selectors

        thread(block)
        selector = selectors.DefaultSelector()
        selector.register(os.pipe()[0], selectors.EVENT_READ)
        selector.select()
elif state == "main joins a thread at a gate":
    while True:  # or that would be a deadlock, which is told at once
        scheduler.sleep(10**9)
"""
_STATES = sorted(
    {
        line.partition('"')[2].partition('"')[0]
        for line in STATES.splitlines()
        if "if state ==" in line
    }
)


@pytest.mark.torch
@pytest.mark.system
def test_threads_of_ranks_call_collectives_and_wait_for_each_other(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, COLLECTIVES)

    finished = preloaded.run(
        "run", "--on=sim", "--nproc-per-node=3", "--no-prefix", "--hang-timeout=30s", program,
        cwd=tmp_path,
    )  # fmt: skip

    assert finished.code == 0, finished.stderr
    assert sorted(set(finished.lines)) == [
        "awaited [3.0, 5]",
        "beside_another (6.0, 3.0)",
        "by_queues [3, 6, 9]",
        "by_store b'set'",
        "handle_of_main_thread 3.0",
        "in_group_of_all (3.0, True, True)",
        "of_objects [0, 1, 2]",
        "of_pool [3, 6]",
        "polled 3.0",
        "with_lock 3.0",
    ]
    assert len(finished.lines) == 30


@pytest.mark.torch
@pytest.mark.system
def test_ranks_wait_at_their_end_for_threads_and_pools(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, FORGOTTEN)

    finished = preloaded.run("run", "--on=sim", "--nproc-per-node=2", "--no-prefix", program)

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["done 2.0"] * 4


@pytest.mark.torch
@pytest.mark.system
def test_deadlock_of_threads_is_reported_at_once_with_their_names(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, MISSED)

    finished = preloaded.run("run", "--on=sim", "--nproc-per-node=2", program)

    assert finished.code == 1
    assert "rank 0 has not come to all_reduce #1" in finished.stderr
    assert "waits for the end of thread 'saver'; its thread 'saver' for another" in finished.stderr


CHILD = """\
import subprocess
import torch
import torch.distributed as dist

subprocess.run(["echo", "from a child"], check=True)
dist.init_process_group("gloo")
dist.recv(torch.ones(1), 1 - dist.get_rank())
"""


@pytest.mark.torch
@pytest.mark.system
def test_reader_of_what_children_print_is_no_thread_of_the_rank(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, CHILD)

    finished = preloaded.run("run", "--on=sim", "--nproc-per-node=2", program)

    assert finished.code == 1
    assert "ranks wait for each other" in finished.stderr
    assert "its thread" not in finished.stderr


@pytest.mark.torch
@pytest.mark.system
def test_asynchronous_checkpoint_is_saved_beside_the_training(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, CHECKPOINT)

    finished = preloaded.run(
        "run", "--on=sim", "--nproc-per-node=2", "--no-prefix", "--hang-timeout=30s", program,
        cwd=tmp_path,
    )  # fmt: skip

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["2.0 [0.0, 1.0, 2.0, 3.0]"] * 2


@pytest.mark.system
@pytest.mark.parametrize(
    ("state", "number"),
    [
        *((state, signal.SIGTERM) for state in _STATES),
        *((state, signal.SIGINT) for state in _STATES if "joins" in state or "handles" in state),
    ],
)
def test_signal_ends_a_run_whatever_threads_of_its_ranks_do(
    state: str, number: signal.Signals, tmp_path: Path
) -> None:
    program = write_program(tmp_path, STATES)

    options = ("--on=sim", "--nproc-per-node=2", "--shutdown-timeout=1s")
    with start("run", *options, program, state) as running:
        running.wait_for("[default1]:begun")
        running.signal(number)
        finished = running.finish()

    assert finished.code == 128 + number, finished.stderr
    assert f"stopped by {number.name}" in finished.stderr
    assert ("[default1]:handled" in finished.lines) == (state == "main handles it")
    assert "killed" not in finished.stderr


@pytest.mark.system
@pytest.mark.parametrize("state", ["joins it", "cleans up for ever", "waits for ranks"])
def test_thread_that_computes_does_not_put_off_the_end_of_a_stopped_run(
    state: str, tmp_path: Path
) -> None:
    program = write_program(tmp_path, STUBBORN)

    options = ("--on=sim", "--nproc-per-node=2", "--shutdown-timeout=1s")
    with start("run", *options, program, state) as running:
        running.wait_for("[default1]:begun")
        running.signal(signal.SIGINT)
        finished = running.finish()

    assert finished.code == 128 + signal.SIGINT, finished.stderr
    assert "rank 1 did not end within 1 s: killed" in finished.stderr


@pytest.mark.torch
@pytest.mark.system
def test_groups_that_threads_use_have_no_order(preloaded: Preloaded, tmp_path: Path) -> None:
    program = write_program(tmp_path, ORDERS)

    finished = preloaded.run("run", "--on=sim", "--nproc-per-node=2", program)

    assert finished.code == 0, finished.stderr
    assert "order" not in finished.stderr


@pytest.mark.torch  # what `preloaded` has imported
@pytest.mark.system
def test_thread_of_a_rank_and_its_children_have_the_environment_of_that_rank(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, ENVIRONMENT)

    finished = preloaded.run("run", "--on=sim", "--nproc-per-node=3", "--no-prefix", program)

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["True 64"] * 3


@pytest.mark.system
def test_operations_that_threads_cannot_call_are_refused_in_the_thread(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        "import threading\nfrom rankwise import collectives\n"
        "saver = threading.Thread(target=collectives.barrier, name='saver')\n"
        "saver.start()\nsaver.join()\nprint('joined')\n",
    )

    finished = run("run", "--on=sim", "--nproc-per-node=2", program)

    assert finished.code == 0, finished.stderr
    assert sorted(finished.lines) == ["[default0]:joined", "[default1]:joined"]
    message = "thread 'saver' of rank 1 has made an operation of rankwise.collectives"
    assert message in finished.stderr


POOLS = {
    "deadlock": ("pool.submit(threading.Event().wait).result()", 124),
    "error": ("pool.submit(queue.Queue().get); raise ValueError('wrong')", 1),
    "child": ("pool.submit(subprocess.run, ['sleep', '60']); time.sleep(0.2); os._exit(3)", 3),
}


@pytest.mark.system
@pytest.mark.parametrize("state", POOLS)
def test_launcher_ends_though_a_pool_thread_of_a_failed_rank_waits(
    state: str, tmp_path: Path
) -> None:
    ending, code = POOLS[state]
    program = write_program(
        tmp_path,
        "import os, queue, subprocess, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        f"pool = ThreadPoolExecutor(2)\n{ending}\n",
    )

    options = ("--on=sim", "--nproc-per-node=1", "--shutdown-timeout=1s")
    finished = run("run", *options, program)

    assert finished.code == code, finished.stderr
