"""The address under which this machine reaches itself: some have IPv6 alone."""

import socket

LOOPBACK = "127.0.0.1"


def loopback_address() -> str:
    """127.0.0.1; ::1 where that is the only one of the two which this machine has."""
    for family, address in ((socket.AF_INET, LOOPBACK), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as trial:
                trial.bind((address, 0))
                return address
        except OSError:
            continue
    return LOOPBACK  # who binds it says what is wrong
