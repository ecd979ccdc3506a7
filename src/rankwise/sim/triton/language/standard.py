"""What libraries use of Triton's inner module `triton.language.standard`; else the language."""

from typing import Any

from rankwise.sim.triton import language
from rankwise.sim.triton.constants import constexpr, plain


def _log2(i: Any) -> constexpr:
    """How often a power of two can be halved."""
    return constexpr(int(plain(i)).bit_length() - 1)


def __getattr__(name: str) -> Any:
    return getattr(language, name)
