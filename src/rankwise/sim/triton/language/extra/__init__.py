"""`tl.extra`: functions beyond the language itself."""

from rankwise.sim.triton.language.extra import cuda, libdevice

__all__ = ["cuda", "libdevice"]
