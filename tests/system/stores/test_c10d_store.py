"""A log in torch's store when clients die, wait and close, and when the server is gone."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import free_ports

from rankwise.base.errors import ConfigError, StoreUnavailable
from rankwise.base.keys import Committed, Put, Revision, Transaction
from rankwise.base.units import SECOND, Duration
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.stores.c10d import C10dConfig, C10dStore, open_c10d
from rankwise.drivers.real.stores.opening import open_store

pytestmark = [pytest.mark.system, pytest.mark.torch]

CLOCK = SystemClock()
PATIENCE = Duration(60 * SECOND)


@pytest.fixture
def shared() -> Any:
    return pytest.importorskip("torch.distributed").HashStore()


def put(store: C10dStore, key: str) -> Revision:
    result = store.commit(Transaction(puts=(Put(key, b""),)))
    assert isinstance(result, Committed)
    return result.revision


def test_a_server_lingers_until_the_others_have_heard_the_last_words() -> None:
    pytest.importorskip("torch")
    config = C10dConfig(host="127.0.0.1", port=free_ports(1)[0], namespace="run", linger=PATIENCE)
    host = open_c10d(config, CLOCK)
    other = open_c10d(config, CLOCK)
    watch = other.watch("", other.read("").revision)
    put(host, "verdict")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(host.close)

        assert [change.key for change in watch.next(PATIENCE)] == ["verdict"]
        assert not closing.done()
        other.close()
        closing.result(PATIENCE / SECOND)


def test_a_server_does_not_linger_after_an_exception() -> None:
    pytest.importorskip("torch")
    config = C10dConfig(host="127.0.0.1", port=free_ports(1)[0], namespace="run", linger=PATIENCE)
    with suppress(KeyboardInterrupt), open_c10d(config, CLOCK):
        other = open_c10d(config, CLOCK)
        begun = CLOCK.now()
        raise KeyboardInterrupt

    assert CLOCK.now() - begun < PATIENCE / 2
    other.close()


def test_a_wait_that_is_over_is_told_from_a_lost_store_whatever_torch_says() -> None:
    hash_store: Any = pytest.importorskip("torch.distributed").HashStore

    class InOtherWords(hash_store):  # type: ignore[misc]
        def wait(self, keys: list[str], patience: timedelta) -> None:
            try:
                hash_store.wait(self, keys, patience)
            except Exception as error:
                raise OSError("no such luck") from error

    with C10dStore(InOtherWords(), namespace="run", clock=CLOCK) as store:
        watch = store.watch("", store.read("").revision)

        assert watch.next(Duration(SECOND // 10)) == ()


def test_a_hole_that_a_dead_writer_left_is_filled(shared: Any) -> None:
    with C10dStore(shared, namespace="run", clock=CLOCK) as store:
        put(store, "a")
        shared.add("rankwise-log/run/next", 1)  # and then it died

        assert put(store, "b") == 2
        assert [entry.key for entry in store.read("").entries] == ["a", "b"]


def test_a_slow_writer_whose_hole_was_filled_writes_again(shared: Any) -> None:
    with C10dStore(shared, namespace="run", clock=CLOCK) as slow:
        taken = shared.add("rankwise-log/run/next", 0)
        shared.set(f"rankwise-log/run/{taken}", "filled by somebody who had waited")

        assert put(slow, "a") == 1
        assert shared.add("rankwise-log/run/next", 0) == taken + 2


def test_what_nobody_understands_is_passed_over_by_all(shared: Any) -> None:
    place = shared.add("rankwise-log/run/next", 1) - 1
    shared.set(f"rankwise-log/run/{place}", b"\xc1 no entry")

    with C10dStore(shared, namespace="run", clock=CLOCK) as store:
        assert put(store, "a") == 1


def test_renewals_do_not_lengthen_the_log_and_changes_do_by_one_entry_each(shared: Any) -> None:
    with C10dStore(shared, namespace="run", clock=CLOCK) as store:
        lease = store.grant_lease(Duration(3600 * SECOND))
        before = entries_in(shared)
        for _ in range(200):
            store.renew_lease(lease)
        renewed = entries_in(shared)
        for number in range(20):
            store.commit(Transaction(puts=(Put("node", b"%d" % number, lease),)))
        changed = entries_in(shared)

    assert renewed == before
    assert changed == before + 20


def entries_in(shared: Any) -> int:
    """How many entries the log has; adding nothing reads the counter."""
    return int(shared.add("rankwise-log/run/next", 0))


def test_runs_in_one_store_of_torch_do_not_meet(shared: Any) -> None:
    with (
        C10dStore(shared, namespace="one", clock=CLOCK) as one,
        C10dStore(shared, namespace="two", clock=CLOCK) as two,
    ):
        put(one, "a")

        assert two.read("").entries == ()


def test_the_second_agent_of_a_machine_joins_the_first() -> None:
    pytest.importorskip("torch")
    config = C10dConfig(host="127.0.0.1", port=free_ports(1)[0], namespace="run")
    with open_c10d(config, CLOCK) as first, open_c10d(config, CLOCK) as second:
        put(first, "a")

        assert len(second.read("").entries) == 1
        assert first._reaper is not None
        assert second._reaper is None


def test_who_must_serve_and_cannot_says_why() -> None:
    pytest.importorskip("torch")
    (port,) = free_ports(1)
    config = C10dConfig(host="192.0.2.1", port=port, namespace="run", is_host=False,
                        connect_timeout=Duration(SECOND))  # fmt: skip
    with pytest.raises(
        StoreUnavailable, match=rf"within 1 s from torch's TCPStore at 192\.0\.2\.1:{port}"
    ):
        open_c10d(config, CLOCK)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="missing/store"):
        open_store("c10d", str(tmp_path / "missing" / "store"), {"store_type": "file"}, run_id="r")


SERVE = """
import sys
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.stores.c10d import C10dConfig, open_c10d
config = C10dConfig(host="127.0.0.1", port=int(sys.argv[1]), namespace="run", is_host=True)
with open_c10d(config, SystemClock()):
    print("serving", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def served() -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A TCPStore in a process of its own, and its port."""
    pytest.importorskip("torch")
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        yield process, port
        process.kill()


def test_a_server_that_was_killed_is_unavailable_to_requests_and_watches(
    served: "tuple[subprocess.Popen[str], int]",
) -> None:
    process, port = served
    config = C10dConfig(host="127.0.0.1", port=port, namespace="run", is_host=False)
    with open_c10d(config, CLOCK) as store, ThreadPoolExecutor(1) as pool:
        watch = store.watch("", put(store, "a"))
        watch.next(Duration(SECOND // 100))
        waiting = pool.submit(watch.next, PATIENCE)
        process.send_signal(signal.SIGKILL)
        process.wait()

        with pytest.raises(StoreUnavailable, match="does not answer"):
            waiting.result(PATIENCE / SECOND)
        with pytest.raises(StoreUnavailable, match=f"TCPStore at 127.0.0.1:{port} does not answer"):
            store.commit(Transaction())
