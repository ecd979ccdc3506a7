"""How handlers of a rendezvous end: ours alone, since torch's have other threads."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rankwise.compat.torch.elastic.rendezvous import RendezvousParameters
from rankwise.compat.torch.elastic.rendezvous.registry import get_rendezvous_handler
from rankwise.compat.torch.elastic.utils.distributed import get_free_port

pytestmark = pytest.mark.system

LONG_S = 100.0

ENDS_WITHOUT_SHUTDOWN = """
import atexit, sys, threading

def tell():
    print(sorted(thread.name for thread in threading.enumerate()))

atexit.register(tell)  # before the handler's own, so it is called after that
from rankwise.compat.torch.elastic.rendezvous import RendezvousParameters
from rankwise.compat.torch.elastic.rendezvous.registry import get_rendezvous_handler

handler = get_rendezvous_handler(RendezvousParameters(*sys.argv[1:4], 1, 1))
print(handler.next_rendezvous().rank)
"""


@pytest.mark.parametrize("backend", ["embedded", pytest.param("c10d", marks=pytest.mark.torch)])
def test_a_program_that_ends_without_shutdown_leaves_no_thread_waiting(
    backend: str, tmp_path: Path
) -> None:
    # A thread that waits inside torch while Python goes away may abort the whole program.
    if backend == "c10d":
        pytest.importorskip("torch")
    script = tmp_path / "ends.py"
    script.write_text(ENDS_WITHOUT_SHUTDOWN)

    ended = subprocess.run(
        [sys.executable, script, backend, "localhost:0", "nobody shuts it down"],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (0, "0\n['MainThread']\n"), ended.stderr


def test_an_agent_that_is_told_to_host_the_store_uses_it_too() -> None:
    endpoint = f"localhost:{get_free_port()}"
    handler = get_rendezvous_handler(
        RendezvousParameters("embedded", endpoint, "one host", 1, 1, is_host=True)
    )

    meeting = handler.next_rendezvous()

    meeting.store.set("key", "value")
    assert meeting.store.get("key") == b"value"
    assert handler.shutdown()
    host, port = endpoint.split(":")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), LONG_S)
