"""A pytest plug-in: the simulated machine of the default preset, for tests of simulated programs.

pytest finds it by itself where rankwise is installed. The simulator is loaded when a test asks for
a fixture, and not before.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from rankwise.sim.hardware.topology import Topology


class SimulatedMachine(NamedTuple):
    """What the fixture `topology` gives.

    Attributes:
        topology_obj: the topology, with `.spec`.
    """

    topology_obj: "Topology"


@pytest.fixture
def topology() -> SimulatedMachine:
    """The topology of the default preset, as `.topology_obj`."""
    from rankwise.sim import load_topology  # noqa: PLC0415  # not in every pytest's start

    return SimulatedMachine(load_topology("default"))


@pytest.fixture
def spec(topology: SimulatedMachine) -> Any:
    """The mapping of the default preset."""
    return topology.topology_obj.spec
