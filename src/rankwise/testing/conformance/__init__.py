"""Suites that an implementation of a port must pass, one per port.

from rankwise.testing.conformance import check_process_host

def test_my_host() -> None:
    check_process_host(MyWorld)

def test_my_store() -> None:
    check_store(lambda: MyStore(address))
"""

from rankwise.testing.conformance.process_hosts import (
    PROCESS_HOST_BEHAVIOURS,
    ProcessWorld,
    WorldRecord,
    check_process_host,
)
from rankwise.testing.conformance.stores import STORE_BEHAVIOURS, check_store

__all__ = [
    "PROCESS_HOST_BEHAVIOURS",
    "STORE_BEHAVIOURS",
    "ProcessWorld",
    "WorldRecord",
    "check_process_host",
    "check_store",
]
