"""The way between a simulated node's agent and its workers, through the guardian.

Orders travel to the guardian, and news travel back, each with a latency of its own. Orders stay in
order; so do the news of one worker, because a real worker's report pipe is drained before its end
is told. News of different workers, which travel through different pipes, may overtake each other.
"""

from collections.abc import Callable
from random import Random

from rankwise.base.units import Duration, Instant, after
from rankwise.drivers.virtual.agenda import Agenda
from rankwise.drivers.virtual.cluster.cluster_plan import Guardian

Channel = str | tuple[int, int]
"""What keeps its order on the way: the orders, the guardian's own news, the news of one worker."""
GUARDIAN = "guardian"
_ORDERS = "orders"


class GuardianLine:
    """What is on its way between an agent and its guardian, for one life of the agent at a time.

    Attributes:
        life: counts the agents of the node; what was on its way to one never reaches another.
        is_lost: whether the guardian is dead, and obeys no more.
    """

    def __init__(self, agenda: Agenda, guardian: Guardian, chance: Random) -> None:
        self.life = 0
        self.is_lost = False
        self._agenda = agenda
        self._guardian = guardian
        self._chance = chance
        self._last_arrival: dict[Channel, Instant] = {}

    def order(self, action: Callable[[], None]) -> None:
        """Carry an order to the guardian, which obeys while it lives."""
        if self._guardian.delays_orders:
            self.send(_ORDERS, lambda: None if self.is_lost else action())
        elif not self.is_lost:
            action()

    def send(self, channel: Channel, action: Callable[[], None]) -> None:
        """Let it happen when it has arrived, after what was sent through that channel before."""
        least, most = self._guardian.latency_min, self._guardian.latency_max
        if least == most:  # then it stays in order by itself
            self.later(least, action)
            return
        now = self._agenda.now()
        arrival = after(now, Duration(self._chance.randint(least, most)))
        arrival = max(arrival, self._last_arrival.get(channel, arrival))
        self._last_arrival[channel] = arrival
        self.later(Duration(arrival - now), action)

    def later(self, delay: Duration, action: Callable[[], None]) -> None:
        """Let it happen later, unless the agent has gone; a later agent never gets it."""
        life = self.life
        self._agenda.after(delay, lambda: action() if life == self.life else None)
