"""How a notebook shows what the lower floors of the simulator hold."""

from importlib import import_module
from typing import Any


def in_notebook(function: str, what: Any) -> str:
    """HTML by a function of `reporting.notebook`.

    That floor is above this one and draws, so it is loaded when a notebook asks.
    """
    html: str = getattr(import_module("rankwise.sim.reporting.notebook"), function)(what)
    return html
