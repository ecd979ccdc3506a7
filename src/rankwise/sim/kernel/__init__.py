"""The discrete-event kernel: simulated time, processes, resources, greenlets.

It has no knowledge of accelerators. Time is an integer whose unit is the model's choice.
"""

from rankwise.base.errors import Deadlock, SimulationError, TimeLimit, Waiting
from rankwise.sim.kernel.futures import EndOfMany, Future, Process, Steps, all_of
from rankwise.sim.kernel.greenlets import Fiber, RankGreenlet, main_greenlet, park, start_fiber
from rankwise.sim.kernel.places import SourceLine, frames_of_stack, line_of, users_line, where_of
from rankwise.sim.kernel.resources import Channel, CreditPool, Server
from rankwise.sim.kernel.simulator import Simulator

__all__ = [
    "Channel",
    "CreditPool",
    "Deadlock",
    "EndOfMany",
    "Fiber",
    "Future",
    "Process",
    "RankGreenlet",
    "Server",
    "SimulationError",
    "Simulator",
    "SourceLine",
    "Steps",
    "TimeLimit",
    "Waiting",
    "all_of",
    "frames_of_stack",
    "line_of",
    "main_greenlet",
    "park",
    "start_fiber",
    "users_line",
    "where_of",
]
