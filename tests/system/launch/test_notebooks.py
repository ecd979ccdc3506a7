"""`rankwise.run` in the kernel of a notebook, which takes signals over in a way of its own."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel", reason="needs ipykernel and jupyter_client")
manager = pytest.importorskip("jupyter_client.manager", reason="needs jupyter_client")

pytestmark = pytest.mark.system

EXAMPLE = Path(__file__).parents[3] / "examples" / "ranks.ipynb"
PATIENCE_S = 120
STAY = """
import rankwise, time
def stay():
    print("begun", flush=True)
    time.sleep(1000)
rankwise.run(stay, nprocs=2)
"""
POOL_MADE = """
import rankwise
pool = rankwise.Pool(2)
step = 1
def moved(x):
    return x + step
list(pool.map(moved, range(3)))
"""
POOL_STAYS = """
import time
def stay():
    print("begun", flush=True)
    time.sleep(1000)
pool.submit(stay).result()
"""
POOL_GOES_ON = """
step = 10
list(pool.map(moved, range(3)))
"""
POOL_IN_LOOP = """
import asyncio
import threading
def in_thread():
    global from_thread
    from_thread = pool.submit(moved, 5).result()
thread = threading.Thread(target=in_thread)
thread.start()
awaited = await asyncio.wrap_future(pool.submit(moved, 1))
thread.join()
awaited, from_thread
"""
NEXT = """
rankwise.run(rankwise.rank, nprocs=2)
"""


@pytest.fixture
def kernel() -> Iterator[tuple[Any, Any]]:
    """A kernel's manager, and a client of it."""
    # Under pytest a kernel does not show what is written to its descriptors.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST")}
    made, client = manager.start_new_kernel(startup_timeout=PATIENCE_S, env=environment)
    yield made, client
    client.stop_channels()
    made.shutdown_kernel(now=True)


def wait_for_output(client: Any, text: str, count: int) -> None:
    """Read what the kernel shows until a text has come so often."""
    deadline, shown = time.monotonic() + PATIENCE_S, ""
    while shown.count(text) < count:
        message = client.get_iopub_msg(timeout=deadline - time.monotonic())
        shown += message["content"].get("text", "")


def reply_to(client: Any, cell: str) -> Any:
    """What became of a cell."""
    while True:
        message = client.get_shell_msg(timeout=PATIENCE_S)
        if message["parent_header"].get("msg_id") == cell:
            return message["content"]


def result_of(client: Any, cell: str) -> str:
    """Run a cell, and return its value, or what it prints, as text."""
    shown = []

    def note(message: dict[str, Any]) -> None:
        if message["msg_type"] == "execute_result":
            shown.append(message["content"]["data"]["text/plain"])
        if message["msg_type"] == "stream":
            shown.append(message["content"]["text"])

    reply = client.execute_interactive(cell, timeout=PATIENCE_S, output_hook=note)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(shown)


def test_a_cell_that_is_interrupted_ends_at_once_and_the_next_one_runs(
    kernel: tuple[Any, Any],
) -> None:
    made, client = kernel
    for _ in range(3):
        # By default a kernel refuses, for a moment after an error, cells that it takes for queued.
        cell = client.execute(STAY, stop_on_error=False)
        wait_for_output(client, "begun", 2)

        made.interrupt_kernel()

        reply = reply_to(client, cell)
        assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
        assert result_of(client, NEXT) == "[0, 1]"


def test_each_cell_of_the_example_runs_and_shows_its_result(kernel: tuple[Any, Any]) -> None:
    _, client = kernel
    cells = json.loads(EXAMPLE.read_text())["cells"]

    shown = [
        result_of(client, "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"
    ]

    squares, failure, total, simulated, timeline = shown
    assert squares == "[0, 1, 4, 9]"
    assert "could not convert string to float: 'oops'" in failure
    assert "every rank got {2016}" in total
    assert " operations in " in simulated
    assert timeline.count("#") >= 20


def test_pool_of_one_cell_serves_the_next_ones_also_after_an_interrupt(
    kernel: tuple[Any, Any],
) -> None:
    made, client = kernel
    assert result_of(client, POOL_MADE) == "[1, 2, 3]"
    cell = client.execute(POOL_STAYS, stop_on_error=False)
    wait_for_output(client, "begun", 1)

    made.interrupt_kernel()

    reply = reply_to(client, cell)
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    assert result_of(client, POOL_GOES_ON) == "[10, 11, 12]"
    assert result_of(client, POOL_IN_LOOP) == "(11, 15)"
