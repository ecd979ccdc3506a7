"""A member of the run's own etcd, on each of the first three nodes (`--rdzv-own-etcd`).

Every agent is told the same three endpoints, and the one whose machine has an endpoint's address
runs that member, as a child that dies with it, and whose data are removed with it. Three members
survive the loss of any one, the first included. The death of each party:

- *A member ends*: it is started again with its data, as long as its agent lives.
- *Every process of the job is told to end*, as by SLURM or systemd: the agents are, and a member
  ignores such signals, and ends with its agent.
- *An agent ends*: its member goes with it, and the other two are a quorum. Where the run is over
  the member stays until the others have read so, for `LINGER` at most (`own_etcd_end`).
- *The agent is started again there*: its member comes back as a new one in the old one's place
  (`etcd_beginning`), so that the quorum is whole again, and another loss is survived.
- *Two agents of the three are gone at once*: there is no quorum, and the run ends as with any store
  that does not answer.

Both ports require the certificate derived from the run's token, which all nodes have
(`token_certificate`). Without the extra `rankwise[tls]` etcd requires no certificate, and `rankwise
run` warns.
"""

import os
import socket
import ssl
import subprocess
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from signal import (
    SIGALRM,
    SIGHUP,
    SIGINT,
    SIGIO,
    SIGKILL,
    SIGPWR,
    SIGTERM,
    SIGUSR1,
    SIGUSR2,
    SIGVTALRM,
    SIGXCPU,
)
from threading import Event, Thread
from typing import BinaryIO, Self

from rankwise.base.errors import ConfigError, StoreError
from rankwise.base.units import SECOND, Duration
from rankwise.core.rendezvous.records import RunKeys
from rankwise.drivers.real.hosting.prctl import die_with_parent
from rankwise.drivers.real.hosting.signal_shield import ignore_for_good
from rankwise.drivers.real.stores.encryption import has_certificates
from rankwise.drivers.real.stores.etcd_members import EtcdConfig
from rankwise.drivers.real.stores.names import Names
from rankwise.drivers.real.stores.opening import ETCD_PORT, host_and_port, open_store
from rankwise.drivers.real.stores.patience import describe
from rankwise.launch.cluster.etcd_beginning import PATIENCE_S, MemberAddress, find_beginning
from rankwise.launch.cluster.etcd_program import check_version, etcd_version
from rankwise.launch.cluster.own_etcd_end import RegisteredNodes
from rankwise.launch.run.private_places import OF_ETCD, held_folder

MEMBERS = 3
LINGER = Duration(10 * SECOND)
RESTART_PAUSE_S = 0.5
RESTART_PAUSE_LONGEST_S = 30.0
SIGNALS_OF_A_JOB = (
    SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGXCPU, SIGPWR, SIGIO
)  # fmt: skip
"""By which a job is told to end, or of its end, whatever runs it: they reach all its processes."""


class OwnEtcd:
    """This machine's member, if it has one of the endpoints; enter it to start it.

    Args:
        endpoints: of all members, between commas, the same on every node.
        run_id: names the cluster and its data.
        token: what all nodes of the run know.
        is_over: whether the verdict on the run is known, when it is left.
        own_hosts: hosts of endpoints that are this machine.
        place: a directory that is removed with the agent, also when that is killed; it is made
            here.

    Raises:
        ConfigError: there are not three different endpoints, or PATH has no etcd to be trusted.
    """

    def __init__(
        self,
        endpoints: str,
        run_id: str,
        token: str,
        is_over: Callable[[], bool],
        *,
        own_hosts: Collection[str],
        place: Path,
    ) -> None:
        self._endpoints = endpoints
        self._run_id = run_id
        self._is_over = is_over
        self._token = token
        self._scheme = "https" if has_certificates() else "http"
        self._places = [
            self._place(number, *host_and_port(one, ETCD_PORT))
            for number, one in enumerate(endpoints.split(","))
        ]
        if len({each.peer_url for each in self._places}) != MEMBERS or len(self._places) != MEMBERS:
            raise ConfigError(
                f"--rdzv-own-etcd needs three different endpoints, and --rdzv-endpoint is"
                f" {endpoints!r}",
                hint="name the first three nodes, as in --rdzv-endpoint n1,n2,n3",
            )
        with ExitStack() as stack:
            self._claim = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._own = self._claimed_place(own_hosts)
            if self._own is not None:
                check_version(etcd_version())
            self._stack = stack.pop_all()
        self.settings: dict[str, str] = {}
        """What a client of this etcd needs to know, once this object is entered."""
        self._inherited: tuple[int, ...] = ()
        """What the member needs of this process: its certificate and key."""
        self._folder = place
        """Once this object is entered, where the data are, and what the member says."""
        self._is_closed = Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = Thread(target=self._keep, name="rankwise-etcd", daemon=True)

    def __enter__(self) -> Self:
        if self._scheme == "https":
            self.settings = self._certificate_settings()
        if self._own is not None:
            held = held_folder(str(self._folder), OF_ETCD)
            self._folder = Path(self._stack.enter_context(held))
            self._thread.start()
            self._stack.callback(self._end_member)
            store = open_store("etcd", self._endpoints, self.settings, run_id="")
            nodes = self._stack.enter_context(RegisteredNodes(store, RunKeys(self._run_id)))
            self._stack.callback(self._serve_to_the_end, nodes)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end_member(self) -> None:
        self._is_closed.set()
        if self._process is not None and self._process.returncode is None:
            _kill(self._process)
        self._thread.join()

    def command(self) -> list[str]:
        """How the member is started.

        Raises:
            StoreError: it has no data, and the others cannot tell now how it begins.
        """
        own = self._own
        assert own is not None, "asked where there is a member"
        address = Names().addresses(own.host, own.port, PATIENCE_S)[0][4][0]
        here = _shown(address)
        data = self._folder / "data"
        words = [
            "etcd", "--name", own.name, "--logger", "zap", "--data-dir", str(data),
            "--listen-client-urls", f"{self._scheme}://{here}:{own.port}",
            "--advertise-client-urls", f"{self._scheme}://{_shown(own.host)}:{own.port}",
            "--listen-peer-urls", f"{self._scheme}://{here}:{own.port + 1}",
            "--initial-advertise-peer-urls", own.peer_url, *self._guards(),
            "--pre-vote",  # or one that was cut off for 3 s makes the others elect again, by 3.4
        ]  # fmt: skip
        if (data / "member").exists():
            return words
        beginning = find_beginning(self._places, own, self._client_config(), self._tls())
        name = sha256(f"{self._run_id} {self._endpoints}".encode()).hexdigest()[:16]
        return [
            *words, "--initial-cluster-token", name,
            "--initial-cluster-state", beginning.state, "--initial-cluster", beginning.cluster,
        ]  # fmt: skip

    def _place(self, number: int, host: str, port: int) -> MemberAddress:
        return MemberAddress(
            f"m{number}", host, port, f"{self._scheme}://{_shown(host)}:{port + 1}"
        )

    def _certificate_settings(self) -> dict[str, str]:
        from rankwise.drivers.real.stores.token_certificate import certificate_files  # noqa: PLC0415  # the extra

        hosts = [each.host for each in self._places]
        files = self._stack.enter_context(certificate_files(self._token.encode(), hosts))
        self._inherited = tuple(files)
        # Files without names, which the member inherits: no key outlives the agent.
        certificate, key = (f"/proc/self/fd/{fd}" for fd in files)
        return {"protocol": "https", "cacert": certificate, "cert": certificate, "key": key}

    def _guards(self) -> list[str]:
        """Both ports require the run's certificate, whatever machine that comes from."""
        if not self.settings:
            return []
        certificate, key = self.settings["cert"], self.settings["key"]
        return [
            "--client-cert-auth", "--trusted-ca-file", certificate,
            "--cert-file", certificate, "--key-file", key,
            "--peer-client-cert-auth", "--peer-trusted-ca-file", certificate,
            "--peer-cert-file", certificate, "--peer-key-file", key,
        ]  # fmt: skip

    def _client_config(self) -> EtcdConfig:
        get = self.settings.get
        return EtcdConfig(
            endpoints=(),
            use_tls=bool(self.settings),
            cacert=get("cacert"),
            cert=get("cert"),
            key=get("key"),
        )

    def _tls(self) -> ssl.SSLContext | None:
        if not self.settings:
            return None
        context = ssl.create_default_context(cafile=self.settings["cacert"])
        context.load_cert_chain(self.settings["cert"], self.settings["key"])
        return context

    def _claimed_place(self, own_hosts: Collection[str]) -> MemberAddress | None:
        """Which member this agent runs: one that its machine has, and no other agent here."""
        for place in self._places:
            if place.host in own_hosts:
                with suppress(OSError):
                    self._claim.bind(f"\0rankwise-etcd/{place.host}:{place.port}")
                    return place
        return None

    def _serve_to_the_end(self, nodes: RegisteredNodes) -> None:
        if self._is_over():
            # The others may have to read the verdict, and need two members for that.
            others = [(each.host, each.port) for each in self._places if each is not self._own]
            nodes.wait_until_none(others, LINGER)

    def _keep(self) -> None:
        """In a thread: keep the member running. It dies with this thread, and so with the agent."""
        pause_s = RESTART_PAUSE_S
        with (self._folder / "etcd.log").open("ab", buffering=0) as log:
            while not self._is_closed.is_set():
                try:
                    command = self.command()
                except (OSError, StoreError) as error:
                    log.write(
                        f"rankwise: the member does not begin yet: {describe(error)}\n".encode()
                    )
                    self._is_closed.wait(RESTART_PAUSE_S)
                    continue
                self._run_member(command, log)
                self._is_closed.wait(pause_s)
                pause_s = min(2 * pause_s, RESTART_PAUSE_LONGEST_S)

    def _run_member(self, command: list[str], log: BinaryIO) -> None:
        """Start the member, and wait for its end. The processes of a wrapper end with that."""
        self._process = subprocess.Popen(
            command,
            env=_environment(),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=self._inherited,
            preexec_fn=partial(_prepare_member, os.getpid()),  # noqa: PLW1509  # two calls
        )  # fmt: skip
        if not self._is_closed.is_set():
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        _kill(self._process)
        self._process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill it and its group, which is its own. It must not have been waited for."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, SIGKILL)


def _prepare_member(agent: int) -> None:
    die_with_parent(agent)
    # The agents need their store while they agree where their ranks stop.
    with suppress(OSError):  # where that cannot be done, etcd ends within seconds of a signal
        ignore_for_good(SIGNALS_OF_A_JOB)


def _environment() -> dict[str, str]:
    """Without settings of another etcd, which would contradict ours.

    A peer may come from another address than the one by which it is known, as machines have
    several. That option has two names, by version; a variable that etcd does not know is no error.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    option = "PEER_SKIP_CLIENT_SAN_VERIFICATION"
    return {**kept, f"ETCD_{option}": "true", f"ETCD_EXPERIMENTAL_{option}": "true"}


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
