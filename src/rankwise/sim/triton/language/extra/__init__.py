"""`tl.extra`: functions beyond the language itself."""

from rankwise.sim.triton.language.extra import libdevice

__all__ = ["libdevice"]
