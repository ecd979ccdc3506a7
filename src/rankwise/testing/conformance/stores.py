"""What every store must do, so that nodes meet alike in all of them.

A behaviour is a function that takes a way to *connect* (each call opens one more client of the same
store) and a prefix of its own, under which no other client writes; so one store serves all of them,
one after another, and may hold other keys. Real stores are slow on a busy machine: each wait here
is for an event, with a patience that is far away from everything that must not be missed.
"""

import uuid

from rankwise.testing.conformance import (
    store_clients,
    store_leases,
    store_transactions,
    store_watches,
)
from rankwise.testing.conformance.store_calls import Behaviour, Connect

STORE_BEHAVIOURS: dict[str, Behaviour] = {
    name: behaviour
    for part in (store_transactions, store_watches, store_clients, store_leases)
    for name, behaviour in vars(part).items()
    if not name.startswith("_") and getattr(behaviour, "__module__", "") == part.__name__
}
"""Every behaviour by its name, for suites that want one test for each."""


def check_store(connect: Connect) -> None:
    """Assert every behaviour, each under a prefix of its own.

    Args:
        connect: opens one more client of one and the same store. The suite closes what it opens;
            no other client writes to the store meanwhile.

    Raises:
        AssertionError: with a note that names the behaviour.
    """
    for name, behaviour in STORE_BEHAVIOURS.items():
        try:
            behaviour(connect, f"conformance/{uuid.uuid4().hex}/")
        except AssertionError as error:
            error.add_note(f"expected of a store: {name.replace('_', ' ')}")
            raise
