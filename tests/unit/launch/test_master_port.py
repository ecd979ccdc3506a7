"""At which address a port is reserved for rank 0."""

import socket

import pytest

from rankwise.base.errors import ConfigError
from rankwise.launch.master_port import ReservedPort, address_here


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_an_address_of_this_machine_means_itself(address: str) -> None:
    assert address_here(address) == address


def test_a_name_means_an_address_at_which_a_port_can_be_reserved() -> None:
    address = address_here("localhost")

    with ReservedPort(address) as port, ReservedPort(address) as other:
        assert port.number != other.number
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, port.number), family=family):
            pass  # rank 0 may listen there all the same


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("192.0.2.77", "no port can be reserved on --master-addr '192.0.2.77'"),
        (f"{'a' * 70}.test", "--master-addr 'a{70}.test' cannot be resolved"),
    ],
)
def test_a_name_that_is_not_of_this_machine_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        address_here(name)
