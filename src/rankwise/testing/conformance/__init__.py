"""Suites that an implementation of a port must pass, one per port.

from rankwise.testing.conformance import check_process_host

def test_my_host() -> None:
    check_process_host(MyWorld)
"""

from rankwise.testing.conformance.process_hosts import (
    PROCESS_HOST_BEHAVIOURS,
    ProcessWorld,
    WorldRecord,
    check_process_host,
)

__all__ = ["PROCESS_HOST_BEHAVIOURS", "ProcessWorld", "WorldRecord", "check_process_host"]
