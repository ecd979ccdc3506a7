"""A pytest plug-in: simulated ranks, the simulated machine of the default preset, Triton emulated.

pytest finds it by itself where rankwise is installed, so its fixtures have names that no other
project uses. The simulator is loaded when a test asks for a fixture, and not before.
"""

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.sim.hardware.topology import Topology


_ABOUT_A_DEVICE = re.compile(r"\b(cuda|gpus?|hip|rocm|nvidia|amd|device)\b", re.IGNORECASE)
"""Reasons of skipped tests that ask for an accelerator."""


class SimulatedMachine(NamedTuple):
    """What the fixture `rankwise_topology` gives.

    Attributes:
        topology_obj: the topology, with `.spec`.
    """

    topology_obj: "Topology"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--rankwise-triton`."""
    group = parser.getgroup("rankwise")
    group.addoption(
        "--rankwise-triton",
        action="store_true",
        help="let `import triton` find rankwise's emulator, so that tests of kernels need no GPU",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Install the emulator for the whole run if it is wanted: `conftest.py` may import Triton."""
    if early_config.known_args_namespace.rankwise_triton:
        from rankwise.sim.triton import installed  # noqa: PLC0415  # not in every pytest's start

        emulator = ExitStack()
        emulator.enter_context(installed())
        early_config.add_cleanup(emulator.close)


@pytest.fixture
def rankwise_topology() -> SimulatedMachine:
    """The topology of the default preset, as `.topology_obj`."""
    from rankwise.sim import load_topology  # noqa: PLC0415  # not in every pytest's start

    return SimulatedMachine(load_topology("default"))


@pytest.fixture
def rankwise_spec(rankwise_topology: SimulatedMachine) -> Any:
    """The mapping of the default preset."""
    return rankwise_topology.topology_obj.spec


@pytest.fixture
def rankwise_ranks() -> "Callable[..., list[Any]]":
    """Call a function on simulated ranks: `rankwise_ranks(fn, *args, nprocs=4, **options)`.

    It returns the results by rank, or raises `WorkersFailed`; `options` are those of
    `rankwise.run`, `args=` too. No process is started.
    """
    from rankwise.launch.api import run  # noqa: PLC0415  # not in every pytest's start

    def call(function: "Callable[..., Any]", *args: Any, nprocs: int = 4, **options: Any) -> Any:
        __tracebackhide__ = True
        args += tuple(options.pop("args", ()))
        return run(function, args, nprocs, on="sim", **options)

    return call


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say why tests of kernels were skipped although the emulator is there."""
    if not config.getoption("rankwise_triton"):
        return
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = [str(each.longrepr[-1]) for each in skipped if isinstance(each.longrepr, tuple)]
    count = sum(bool(_ABOUT_A_DEVICE.search(reason)) for reason in reasons)
    if count:
        terminalreporter.line(
            f"rankwise: skipped for want of a GPU: {count} test{'s' * (count > 1)};"
            " torch.cuda.is_available() stays false under --rankwise-triton. To run them, let their"
            ' skipif accept the emulator: triton.jit.__module__.startswith("rankwise")'
        )
