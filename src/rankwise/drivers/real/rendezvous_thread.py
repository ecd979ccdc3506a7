"""A rendezvous in a thread of its own, for callers that wait instead of having a reactor.

The thread owns the machine and a reactor: answers and facts are posted there from any thread,
and its notifications come out through `on_notification`, called in the thread. It ends when the
machine has said goodbye, or when `close` will not wait for that any longer.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Self

from rankwise.core.rendezvous.machine import Rendezvous
from rankwise.core.rendezvous.vocabulary import Effect, LeaveSettled, Left, Order, Stimulus
from rankwise.drivers.feed import Feeder
from rankwise.drivers.real.reactor import Reactor
from rankwise.drivers.real.store_client import StoreClient
from rankwise.ports.clock import Clock
from rankwise.ports.store import Store

GOODBYE_PATIENCE_S = 5.0
"""How long `close` waits for the store to take the goodbye; the lease tells the rest."""


class RendezvousThread:
    """Turns one machine.

    Args:
        rendezvous: the machine; it has no other feeder.
        store: where its nodes meet; belongs to the thread from now on.
        clock: tells when a fact arrives.
        on_notification: is told, in the thread, what concerns the agent.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        store: Store,
        clock: Clock,
        on_notification: Callable[[Effect], None],
    ) -> None:
        self._rendezvous = rendezvous
        self._feeder: Feeder[Stimulus, Effect] = Feeder(
            "rendezvous", rendezvous, self._carry_out, clock, None
        )
        self._on_notification = on_notification
        self._is_abandoned = False
        self._reactor = Reactor(clock)
        self._client = StoreClient(
            store,
            reactor=self._reactor,
            clock=clock,
            deliver=self._feeder.deliver,
            request_timeout=rendezvous.config.request_timeout,
        )
        self._thread = threading.Thread(target=self._turn, name="rankwise-rendezvous", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self, stimulus: Stimulus) -> None:
        """Tell the machine a fact, from any thread."""
        self._reactor.post(partial(self._feeder.deliver, stimulus))

    def close(self) -> None:
        """Say goodbye, and let go of everything. Harmless the second time."""
        self.tell(Left())
        self._thread.join(GOODBYE_PATIENCE_S)
        self._reactor.post(self._abandon)
        self._client.close()
        self._thread.join()
        self._reactor.close()

    def _turn(self) -> None:
        while not self._rendezvous.is_over and not self._is_abandoned:
            self._reactor.run_once(self._feeder.next_deadline)
            self._feeder.wake()

    def _abandon(self) -> None:
        self._is_abandoned = True

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Order):
            self._client.submit(effect)
        elif not isinstance(effect, LeaveSettled):
            self._on_notification(effect)
