"""One node's part in the rounds of a run, for callers that wait: what all handlers here share.

In place of torch's dynamic rendezvous, which rewrites one state, is the machine of
`core/rendezvous`, which runs in a thread as long as the node takes part. The agent above it counts
its own restarts, so the rendezvous has an unlimited budget.

- `next_world` ends what this node had in the last round, says that it is ready for the next, and
  waits until it is a member of one. A spare waits on.
- A round that is over, because a member is gone or a newcomer is wanted, shows itself in
  `is_dissolved`, upon which agents meet again.
- `close_run` ends the whole run; `leave` leaves it, as one who is done.
"""

import atexit
import os
import secrets
import socket
import threading
from collections.abc import Callable

import msgspec

from rankwise.base.failure import OutcomeStatus
from rankwise.compat.torch.elastic.events import NodeState, construct_and_record_rdzv_event
from rankwise.compat.torch.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousStateError,
    RendezvousTimeoutError,
)
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
from rankwise.launch.run.master_port import ReservedPort, address_here
from rankwise.ports.store import Store

UNLIMITED_RESTARTS = 1 << 30
CLOSING_PATIENCE_S = 5.0
"""How long `leave` waits, after `close_run`, until the run is over for all nodes."""
DONE_PATIENCE_S = 1.0
"""How long `leave` waits for the others, after this node's work was done.

Agents meet before they shut their handlers down, so it takes no longer than a message. A later node
would take a run that was not closed for one that goes on, and itself for a spare.
"""
_ERRORS = {
    RefusalKind.VERSION: RendezvousStateError,
    RefusalKind.CHARTER: RendezvousStateError,
    RefusalKind.TIMEOUT: RendezvousTimeoutError,
    RefusalKind.STORE: RendezvousConnectionError,
}


class NodeRounds:
    """One node's part in a run; see the module's text.

    Args:
        run_id: the run.
        config: how many nodes, and for how long they wait; restarts are the caller's business, and
            the last call is as long as it is.
        address: this node's, as others reach it.
        open_store: opens the store where the nodes meet; called once, by the first that needs it.
        let_go: is called when this node takes no part any more, before the store is closed.
    """

    def __init__(
        self,
        run_id: str,
        config: RendezvousConfig,
        address: str,
        open_store: Callable[[], Store],
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_id = run_id
        self._open_store = open_store
        self._before_going = let_go
        self._port = ReservedPort(address_here(address))
        # Agents of torch's start at different times, and count on the last call being as long as it
        # is: a short job would be over before a node that takes its time to import has come.
        self.config = msgspec.structs.replace(
            config,
            last_call_min=config.last_call,
            policy=RestartPolicy(restarts_max=UNLIMITED_RESTARTS),
        )
        # Handlers know nothing of workers: each node counts as one, and agents count the ranks.
        offer = NodeOffer(
            node_id=secrets.token_hex(4), host=socket.gethostname(), address=address, slots=1
        )
        self._rendezvous = Rendezvous(run_id, self.config, offer)
        self._thread: RendezvousThread | None = None
        self._changed = threading.Condition()
        self._world: World | None = None
        self._is_dissolved = False
        self._next_round = 0
        self._verdict: Verdict | None = None
        self._refusal: Refused | None = None
        self._is_closing = False
        self._was_spare = False

    def next_world(self) -> World:
        """Wait until this node is a member of a new round.

        Raises:
            RendezvousError: it never will be, or one of torch's other errors.
        """
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
            self.let_go()  # this node never takes part again
            raise error
        self._record(
            f"joined round {world.round} as node {world.node_rank} of {len(world.members)}"
        )
        return world

    @property
    def is_closed(self) -> bool:
        """Whether the run is over, as far as this node knows."""
        with self._changed:
            return self._verdict is not None or self._is_closing

    @property
    def is_dissolved(self) -> bool:
        """Whether the round is over and all meet again."""
        with self._changed:
            return self._is_dissolved

    def close_run(self) -> None:
        """End the run for all nodes."""
        self._is_closing = True
        self._begun().tell(DepartureRequested(Departure.PREEMPTED))

    def leave(self) -> None:
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
        self.let_go()

    def let_go(self) -> None:
        """Say goodbye, and end our threads.

        A program that ends without `shutdown`, as after a signal, comes here at its end: torch's
        C++ does not bear that Python goes away beneath a thread that waits in it.
        """
        atexit.unregister(self.let_go)
        self._before_going()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
        self._port.close()

    def _begun(self) -> RendezvousThread:
        if self._thread is None:
            atexit.register(self.let_go)
            self._thread = RendezvousThread(
                self._rendezvous, self._open_store(), SystemClock(), self._on_notification
            )
            self._thread.tell(Joined())
        return self._thread

    def _on_notification(self, notification: Effect) -> None:
        with self._changed:
            match notification:
                case Settled():
                    self._world = notification.world
                case Dissolved() | StopAgreed():
                    self._is_dissolved = self._world is not None
                case Closed():
                    self._verdict = notification.verdict
                    self._is_dissolved = self._world is not None
                case Refused():
                    self._refusal = notification
                case MadeSpare():
                    self._was_spare = True
                case _:
                    return  # for people, and handlers have no console of their own
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
                f"the run {self.run_id} had succeeded before this node could take part",
                hint="another run needs another run_id, as long as the store remembers this one",
            )
        if verdict.detail.startswith("too few nodes"):
            return RendezvousTimeoutError(verdict.detail)
        return RendezvousClosedError(verdict.detail or "the run is over")

    def _record(self, message: str, state: NodeState = NodeState.RUNNING) -> None:
        construct_and_record_rdzv_event(
            run_id=self.run_id, message=message, node_state=state, pid=os.getpid()
        )


class HandlerOfRounds(RendezvousHandler):
    """What a handler answers from its node's part in the rounds alone."""

    _rounds: NodeRounds

    def is_closed(self) -> bool:
        """Whether the run is over, as far as this node knows."""
        return self._rounds.is_closed

    def set_closed(self) -> None:
        """End the run for all nodes."""
        self._rounds.close_run()

    def num_nodes_waiting(self) -> int:
        """1 when the round is over and all meet again, else 0."""
        return int(self._rounds.is_dissolved)

    def shutdown(self) -> bool:
        """Leave the run, as one who is done, and let go of everything."""
        self._rounds.leave()
        return True
