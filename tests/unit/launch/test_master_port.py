"""At which address a port is reserved for rank 0, and until when."""

import os
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from rankwise.base.errors import ConfigError
from rankwise.cli.run import config_from_cli
from rankwise.drivers.real.clock import SystemClock
from rankwise.drivers.real.reactor import Reactor
from rankwise.launch.cluster.node_host import RealNodeHost
from rankwise.launch.run.master_port import ReservedPort, address_here
from rankwise.launch.run.run_parts import RunParts


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


def test_no_port_is_reserved_any_more_when_the_run_is_over() -> None:
    words = ["--nnodes=2", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-backend=embedded"]
    job = config_from_cli([*words, "--no-python", "true"], os.environ)
    delivered: list[object] = []
    with ExitStack() as run, Reactor(SystemClock()) as reactor:
        nothing = cast("Any", None)
        parts = RunParts(
            job=job, stack=run, clock=SystemClock(), reactor=reactor, host=nothing, planner=nothing,
            evidence=nothing, describe=nothing, journal=None, recorder=nothing, watches=nothing,
            history=nothing, say=nothing,
        )  # fmt: skip
        host = RealNodeHost(parts, job.plan, delivered.append)
        run.close()
        before = sorted(each.name for each in Path("/proc/self/fd").iterdir())

        host.prepare_round(0)
        for thread in threading.enumerate():
            if thread.name == "rankwise-node":
                thread.join()

        assert sorted(each.name for each in Path("/proc/self/fd").iterdir()) == before
        reactor.run_once(SystemClock().now())
    assert delivered == []
