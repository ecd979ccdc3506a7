"""The conformance suite of stores, for every store there is."""

import pytest

from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.stores.memory import MemoryStore
from rankwise.testing.conformance import STORE_BEHAVIOURS

PREFIX = "conformance/"


@pytest.mark.parametrize("name", STORE_BEHAVIOURS)
def test_the_memory_store_keeps_what_is_expected(name: str) -> None:
    STORE_BEHAVIOURS[name](MemoryStore(SystemClock()).connect, PREFIX)
