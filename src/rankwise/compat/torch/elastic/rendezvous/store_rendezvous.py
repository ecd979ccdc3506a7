"""torch's handler over rankwise's rendezvous: for the backends c10d, embedded, etcd and etcd-v2.

What torch's dynamic rendezvous does by rewriting one state is done by the machine of
`core/rendezvous`, which runs in a thread as long as the handler lives. The agent above it counts
its own restarts, so the rendezvous has as many as anybody wants.

- `next_rendezvous` ends what this node had in the last round, says that it is ready for the next,
  and waits until it is a member of one. A spare waits on.
- A round that is over, because a member is gone or a newcomer is wanted, shows itself as a node
  that waits (`num_nodes_waiting`), upon which agents meet again.
- `set_closed` ends the whole run; `shutdown` leaves it, as one who is done.
"""

import atexit
import os
import secrets
import socket
import threading
from typing import Any

import msgspec

from rankwise.base.failure import OutcomeStatus
from rankwise.compat.torch.elastic.events import NodeState, construct_and_record_rdzv_event
from rankwise.compat.torch.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from rankwise.compat.torch.elastic.rendezvous.torch_store import TorchStore
from rankwise.compat.torch.elastic.utils.distributed import get_free_port
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig, RestartPolicy
from rankwise.core.rendezvous.machine import Rendezvous
from rankwise.core.rendezvous.records import Departure, Verdict
from rankwise.core.rendezvous.vocabulary import (
    Closed,
    DepartureRequested,
    Dissolved,
    Effect,
    GangEnded,
    Joined,
    MadeSpare,
    NodeReady,
    RefusalKind,
    Refused,
    Settled,
    StopAgreed,
    World,
)
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.rendezvous_thread import RendezvousThread
from rankwise.drivers.real.stores.opening import open_store
from rankwise.launch.cluster.addresses import own_address
from rankwise.launch.cluster.settings import RUN_TTL, split_settings, with_timing
from rankwise.launch.master_port import ReservedPort
from rankwise.ports.store import Store

__all__ = ["StoreRendezvousHandler", "create_handler"]

UNLIMITED_RESTARTS = 1 << 30
CLOSING_PATIENCE_S = 5.0
"""How long `shutdown` waits, after `set_closed`, until the run is over for everybody."""
DONE_PATIENCE_S = 1.0
"""How long `shutdown` waits for the others, after this node's work was done.

Agents meet before they shut their handlers down, so it takes no longer than a message. A run that
nobody has closed would look to whoever comes later as if it went on, and as if it might be a spare.
"""
_STORE_IN_AN_AGENT = frozenset({"is_host", "store_type", "etcd_prefix"})
_STORE_OF_ITS_OWN = frozenset(
    {"protocol", "etcd_prefix", "cacert", "ca_cert", "cert", "ssl_cert", "key", "ssl_cert_key"}
)
_MEANINGLESS = {
    "etcd": _STORE_IN_AN_AGENT,
    "etcd-v2": _STORE_IN_AN_AGENT,
    "c10d": _STORE_OF_ITS_OWN,
    "embedded": _STORE_OF_ITS_OWN | {"store_type"},
}
"""Settings of torch's that are another backend's: programs pass the same to all of them.

So is the prefix of etcd's keys, since ours begin with the run id anyway.
"""
_ERRORS = {
    RefusalKind.VERSION: RendezvousStateError,
    RefusalKind.CHARTER: RendezvousStateError,
    RefusalKind.TIMEOUT: RendezvousTimeoutError,
    RefusalKind.STORE: RendezvousConnectionError,
}


class StoreRendezvousHandler(RendezvousHandler):
    """One node's part in the rendezvous of a run; see the module's text.

    Args:
        params: the backend, its endpoint and settings, the run, the numbers of nodes.

    Raises:
        ConfigError: a setting cannot be used; it is a ValueError.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        settings = split_settings(_for_backend(params), label="rdzv_configs")
        self._params = params
        self._store_settings = settings.store
        self._endpoint = _endpoint(params)
        host = socket.gethostname()
        address = params.local_addr or own_address(params.endpoint)
        self._port = ReservedPort(address)
        config = RendezvousConfig(
            nodes_min=params.min_nodes,
            nodes_max=params.max_nodes,
            policy=RestartPolicy(restarts_max=UNLIMITED_RESTARTS),
            run_ttl=RUN_TTL,
        )
        config = with_timing(config, settings, "rdzv_configs")
        # Agents of torch's start at different times, and count on the last call being as long as it
        # is: a short job would be over before a node that takes its time to import has come.
        config = msgspec.structs.replace(config, last_call_min=config.last_call)
        # Handlers know nothing of workers: each node counts as one, and agents count the ranks.
        offer = NodeOffer(node_id=secrets.token_hex(4), host=host, address=address, slots=1)
        self._rendezvous = Rendezvous(params.run_id, config, offer)
        self._thread: RendezvousThread | None = None
        self._shared_store: Store | None = None
        self._changed = threading.Condition()
        self._world: World | None = None
        self._is_dissolved = False
        self._next_round = 0
        self._verdict: Verdict | None = None
        self._refusal: Refused | None = None
        self._is_closing = False
        self._was_spare = False

    def get_backend(self) -> str:
        """The backend's name."""
        return self._params.backend

    def get_run_id(self) -> str:
        """The run."""
        return self._params.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is a member of a new round."""
        self._record("trying to join the next round")
        thread = self._begun()
        with self._changed:
            last, self._world, self._is_dissolved = self._world, None, False
        if last is not None:
            thread.tell(GangEnded(round=last.round, is_done=False))
            self._next_round = last.round + 1
        thread.tell(NodeReady(self._next_round, self._port.number))
        world = self._wait_for_world()
        if world is None:
            error = self._error()
            self._record(str(error), NodeState.FAILED)
            raise error
        self._record(
            f"joined round {world.round} as node {world.node_rank} of {len(world.members)}"
        )
        store = TorchStore(
            self._opened_store(), f"rankwise/{self.get_run_id()}/agents/{world.round}/"
        )
        listens = RendezvousStoreInfo(world.master_address, world.master_port)
        return RendezvousInfo(store, world.node_rank, len(world.members), listens)

    def is_closed(self) -> bool:
        """Whether the run is over, as far as this node knows."""
        with self._changed:
            return self._verdict is not None or self._is_closing

    def set_closed(self) -> None:
        """End the run for everybody."""
        self._is_closing = True
        self._begun().tell(DepartureRequested(Departure.PREEMPTED))

    def num_nodes_waiting(self) -> int:
        """1 when the round is over and all meet again, else 0."""
        with self._changed:
            return int(self._is_dissolved)

    def shutdown(self) -> bool:
        """Leave the run, as one who is done, and let go of everything."""
        if self._thread is not None:
            with self._changed:
                world, is_dissolved = self._world, self._is_dissolved
            if world is not None:
                self._thread.tell(GangEnded(round=world.round, is_done=not self._is_closing))
            if self._is_closing or (world is not None and not is_dissolved):
                # It may be this node that leads, and so must write that the run is over.
                patience = CLOSING_PATIENCE_S if self._is_closing else DONE_PATIENCE_S
                with self._changed:
                    self._changed.wait_for(self._knows_the_end, patience)
        self._let_go()
        return True

    def _let_go(self) -> None:
        """Say goodbye, and end our threads.

        A program that ends without `shutdown`, as after a signal, comes here at its end: torch's
        C++ does not bear that Python goes away beneath a thread that waits in it.
        """
        atexit.unregister(self._let_go)
        # Ours first: whoever hosts the store waits for its clients to leave.
        store, self._shared_store = self._shared_store, None
        if store is not None:
            store.close()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
        self._port.close()

    def _begun(self) -> RendezvousThread:
        if self._thread is None:
            atexit.register(self._let_go)
            self._thread = RendezvousThread(
                self._rendezvous, self._open_store(may_host=True), SystemClock(), self._on_tiding
            )
            self._thread.tell(Joined())
        return self._thread

    def _opened_store(self) -> Store:
        """A connection of our own: the machine's must not wait behind ours."""
        if self._shared_store is None:
            self._shared_store = self._open_store(may_host=False)
        return self._shared_store

    def _open_store(self, *, may_host: bool) -> Store:
        settings = dict(self._store_settings)
        if not may_host and self._params.backend == "c10d":
            settings["is_host"] = "false"
        elif not may_host and self._params.get_as_bool("is_host"):
            settings.pop("is_host", None)  # we serve already, and are not to do so twice
        return open_store(
            self._params.backend, self._endpoint, settings, run_id=self._params.run_id
        )

    def _on_tiding(self, tiding: Effect) -> None:
        with self._changed:
            match tiding:
                case Settled():
                    self._world = tiding.world
                case Dissolved() | StopAgreed():
                    self._is_dissolved = self._world is not None
                case Closed():
                    self._verdict = tiding.verdict
                    self._is_dissolved = self._world is not None
                case Refused():
                    self._refusal = tiding
                case MadeSpare():
                    self._was_spare = True
                case _:
                    return  # for people; whoever wants to hear it runs `rankwise run`
            self._changed.notify_all()

    def _wait_for_world(self) -> World | None:
        """Wait until this node is a member of a round, or never will be: the machine has limits."""
        with self._changed:
            self._changed.wait_for(self._is_decided)
            return self._world

    def _is_decided(self) -> bool:
        return any((self._world, self._verdict, self._refusal))

    def _knows_the_end(self) -> bool:
        return self._verdict is not None or self._refusal is not None

    def _error(self) -> RendezvousError:
        if self._refusal is not None:
            kind = _ERRORS.get(self._refusal.kind, RendezvousError)
            return kind(self._refusal.why, hint=self._refusal.hint or None)
        verdict = self._verdict
        assert verdict is not None, "something has been decided, and it is no round"
        if verdict.status is OutcomeStatus.SUCCEEDED:
            if self._was_spare:
                return RendezvousGracefulExitError("the other nodes have finished without this one")
            return RendezvousClosedError(
                f"the run {self.get_run_id()} had succeeded before this node could take part",
                hint="another run needs another run_id, as long as the store remembers this one",
            )
        if verdict.detail.startswith("too few nodes"):
            return RendezvousTimeoutError(verdict.detail)
        return RendezvousClosedError(verdict.detail or "the run is over")

    def _record(self, message: str, state: NodeState = NodeState.RUNNING) -> None:
        construct_and_record_rdzv_event(
            run_id=self.get_run_id(), message=message, node_state=state, pid=os.getpid()
        )


def _for_backend(params: RendezvousParameters) -> dict[str, Any]:
    """The settings that concern this backend, or nobody that is known: these are refused later."""
    ignored = _MEANINGLESS[params.backend]
    return {key: value for key, value in params.config.items() if key not in ignored}


def _endpoint(params: RendezvousParameters) -> str:
    """Where the store is; port 0 of torch's store is any port, which only this node will know."""
    host, colon, port = params.endpoint.rpartition(":")
    if params.backend == "c10d" and colon and port.strip() == "0":
        return f"{host}:{get_free_port()}"
    return params.endpoint


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler of one of rankwise's own backends."""
    return StoreRendezvousHandler(params)
