"""When the keys of a run are an earlier run's, which somebody who comes may replace.

```
              founded            closed            `run_ttl` after its last leader
   (no run) ──────────→ OPEN ──────────────→ OVER ────────────────────────────────→ (no run)
                         │ ↑ ↑                 │
             nobody leads│ │ └─────────────────┘ a newcomer founds another run in its place
                         ↓ │
                     ABANDONED ── a newcomer that wants the same goes on with it;
                                  one that wants something else founds another in its place
```

- A *newcomer* has not agreed to the run's charter: it has taken no part. All others learn how the
  run ended, however late: those who watch, since the end comes first in the order of changes; those
  who have to read anew find another founder than their own, and are told that the run is over.
- A run that is *over* has no workers any more: it is closed when all have ended. So nobody has to
  be waited for, and founding is one transaction, bound to the three shared keys being unchanged. Of
  many newcomers one founds the run; the others join it.
- *Abandoned* is what nobody has led for a lease and its fence: any node that is alive would have
  taken the lead. It is asked for only where the charters differ.
- What is not known: whether a newcomer was meant for the run that is over, and has come too late,
  or for another. It is taken for another's, unless `replaces_ended` is False: then run ids serve
  once, as Kubernetes' Jobs have them, and it is told how the run ended.
"""

from rankwise.base.errors import RemoteProtocolError
from rankwise.base.units import Duration, Instant, after
from rankwise.core.rendezvous.codec import decode_round
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.layout import RunKeys
from rankwise.core.rendezvous.records import Phase
from rankwise.core.rendezvous.shared import SharedKeys


class Succession:
    """What a newcomer makes of a run that it finds.

    Args:
        config: whether it may replace it, and how long nodes are believed to live.
        keys: where the run's records lie.
        shared: what lies there.
    """

    def __init__(self, config: RendezvousConfig, keys: RunKeys, shared: SharedKeys) -> None:
        self.obstacle = ""
        """Why this newcomer cannot take part as long as the run is not abandoned; empty if it can
        or may not wait for that."""
        self._config = config
        self._keys = keys
        self._shared = shared

    @property
    def is_over(self) -> bool:
        """Whether the run that lies there is closed, and may be replaced."""
        value = self._shared.round.value
        if value is None or not self._config.replaces_ended:
            return False
        try:
            return decode_round(value, self._keys.round).phase is Phase.CLOSED
        except RemoteProtocolError:
            return False

    @property
    def may_be_abandoned(self) -> bool:
        """Whether nobody leads it, so that it may be replaced soon."""
        return self._config.replaces_ended and self._shared.is_lead_free

    @property
    def abandoned_at(self) -> Instant | None:
        """When the run counts as abandoned; None while that is not waited for."""
        since = self._shared.lead_free_since
        if not self.obstacle or since is None:
            return None
        return after(since, Duration(self._config.lease_ttl + self._config.fence))

    def is_due(self, now: Instant) -> bool:
        """Whether it is time to found another run in its place."""
        if self._shared.charter.value is None:
            return True
        abandoned_at = self.abandoned_at
        return self.is_over or (abandoned_at is not None and now >= abandoned_at)
