"""Whether this Python can encrypt with what the nodes of a run know; `tls` does it.

Apart from that module, which loads `ssl`: who cannot encrypt need not load it.
"""

import sys
from importlib.util import find_spec

_FIRST_WITH_PSK = 0x030D0000


def encryption_lack() -> str | None:
    """Why nothing can be encrypted here; None: it can."""
    if has_psk() or has_certificates():
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"Python {version} needs the extra rankwise[tls] for that, and 3.13 does not"


def has_psk() -> bool:
    """Whether TLS can be had with a key that both sides know already."""
    if sys.hexversion < _FIRST_WITH_PSK:
        return False
    import ssl  # noqa: PLC0415  # takes ms

    return bool(getattr(ssl, "HAS_PSK", False))


def has_certificates() -> bool:
    """Whether certificates can be made."""
    return find_spec("cryptography") is not None
