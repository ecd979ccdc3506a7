"""A member of the run's own etcd, on each of the first three nodes (`--rdzv-own-etcd`).

Every agent is told the same three endpoints, and the one whose machine has an endpoint's address
runs that member, as a child that dies with it, and whose data are removed with it. Three members
survive the loss of one, the first included; what was lost does not come back, since a member that
has forgotten what it promised must not vote: an agent that is started again there is a client of
the other two.

- *A member ends*, as when a scheduler signals every process: it is started again, as long as its
  agent lives.
- *An agent ends*: its member goes with it, and the other two are a quorum. Where the run is over
  the member stays until the others have heard so, for `LINGER` at most.
- etcd from 3.5.0 to 3.5.5, and before 3.4.20, is refused: those lose or corrupt what they hold.
"""

import os
import re
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Self

from rankwise.base.errors import ConfigError, StoreError
from rankwise.base.units import SECOND, Duration
from rankwise.core.rendezvous.layout import RunKeys
from rankwise.drivers.real.hosting.prctl import die_with_parent
from rankwise.drivers.real.stores.addresses import is_here
from rankwise.drivers.real.stores.opening import ETCD_PORT, open_store, split_endpoint

MEMBERS = 3
LINGER = Duration(10 * SECOND)
RESTART_PAUSE_S = 0.5
RESTART_PAUSE_LONGEST_S = 30.0


class OwnEtcd:
    """This machine's member, if it has one of the endpoints; enter it to start it.

    Args:
        endpoints: of all members, between commas, the same on every node.
        run_id: names the cluster and its data.
        is_over: whether the verdict on the run is known, when it is left.
        data: a folder that is removed with the agent, also when that is killed; it is made here.

    Raises:
        ConfigError: there are not three different endpoints, or PATH has no etcd to be trusted.
    """

    def __init__(
        self, endpoints: str, run_id: str, is_over: Callable[[], bool], data: Path
    ) -> None:
        self._endpoints = endpoints
        self._run_id = run_id
        self._is_over = is_over
        self._places = [split_endpoint(one, ETCD_PORT) for one in endpoints.split(",")]
        if len(self._places) != MEMBERS or len(set(self._places)) != MEMBERS:
            raise ConfigError(
                f"--rdzv-own-etcd needs three different endpoints, and --rdzv-endpoint is"
                f" {endpoints!r}",
                hint="name the first three nodes, as in --rdzv-endpoint n1,n2,n3",
            )
        self._claim = socket.socket(socket.AF_UNIX)
        self._index = self._claimed_index()
        self._data = data
        self._is_closed = Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = Thread(target=self._keep, name="rankwise-etcd", daemon=True)
        if self._index is not None:
            check_version(etcd_version())

    def __enter__(self) -> Self:
        if self._index is not None:
            for folder in (self._data.parent, self._data):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._index is not None:
            if self._is_over():
                self._wait_for_others()
            self._is_closed.set()
            if self._process is not None:
                self._process.kill()
            self._thread.join()
        self._claim.close()

    def command(self) -> list[str]:
        """How the member is started."""
        assert self._index is not None, "asked where there is a member"
        host, port = self._places[self._index]
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        here = f"[{address}]" if ":" in str(address) else address
        peers = [
            f"m{n}=http://{_shown(host)}:{port + 1}" for n, (host, port) in enumerate(self._places)
        ]
        token = sha256(f"{self._run_id} {self._endpoints}".encode()).hexdigest()[:16]
        return [
            "etcd", "--name", f"m{self._index}", "--logger", "zap",
            "--data-dir", str(self._data / "data"),
            "--listen-client-urls", f"http://{here}:{port}",
            "--advertise-client-urls", f"http://{_shown(host)}:{port}",
            "--listen-peer-urls", f"http://{here}:{port + 1}",
            "--initial-advertise-peer-urls", f"http://{_shown(host)}:{port + 1}",
            "--initial-cluster", ",".join(peers), "--initial-cluster-token", token,
        ]  # fmt: skip

    def _claimed_index(self) -> int | None:
        """Which member this agent runs: one that its machine has, and no other agent here."""
        for index, (host, port) in enumerate(self._places):
            if is_here(host):
                with suppress(OSError):
                    self._claim.bind(f"\0rankwise-etcd/{host}:{port}")
                    return index
        return None

    def _keep(self) -> None:
        """In a thread: keep the member running. It dies with this thread, and so with the agent."""
        pause_s = RESTART_PAUSE_S
        with (self._data / "etcd.log").open("ab") as log:
            while not self._is_closed.is_set():
                self._process = subprocess.Popen(
                    self.command(),
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509  # one call
                )  # fmt: skip
                if self._is_closed.is_set():
                    self._process.kill()
                self._process.wait()
                self._is_closed.wait(pause_s)
                pause_s = min(2 * pause_s, RESTART_PAUSE_LONGEST_S)

    def _wait_for_others(self) -> None:
        """Serve until no node is registered any more: all know how the run ended."""
        ends_at = monotonic() + LINGER / SECOND
        nodes, notes = RunKeys(self._run_id).nodes, RunKeys(self._run_id).done_notes
        with suppress(StoreError), open_store("etcd", self._endpoints, {}, run_id="") as store:
            snapshot, watch = store.follow(nodes)
            alive = {entry.key for entry in snapshot.entries if not entry.key.startswith(notes)}
            while alive and (left_s := ends_at - monotonic()) > 0:
                for change in watch.next(Duration(int(left_s * SECOND))):
                    if change.value is None:
                        alive.discard(change.key)


def etcd_version() -> str:
    """The version of the etcd in PATH.

    Raises:
        ConfigError: there is none.
    """
    try:
        done = subprocess.run(["etcd", "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(
            f"--rdzv-own-etcd needs the program etcd: {error.strerror}",
            hint="install etcd 3.4.20 or later, or 3.5.6 or later, on the first three nodes",
        ) from error
    found = re.search(r"etcd Version: (\S+)", done.stdout)
    return found[1] if found else "unknown"


def check_version(version: str) -> None:
    """Refuse an etcd that cannot be trusted with what it holds.

    Raises:
        ConfigError: it is one of those.
    """
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if (3, 4, 20) <= numbers < (3, 5) or numbers >= (3, 5, 6):
        return
    raise ConfigError(
        f"the etcd in PATH is {version}, which may corrupt what it holds",
        hint="--rdzv-own-etcd needs 3.4.20 or later, or 3.5.6 or later",
    )


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
