"""Environment variables that must be there, a socket on a free port, macros in arguments."""

import os
import socket
from string import Template
from typing import Any

from rankwise.drivers.real.stores.names import addresses_of

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]


def get_env_variable_or_raise(env_name: str) -> str:
    """Read an environment variable that must be set.

    Raises:
        ValueError: it is not.
    """
    value = os.environ.get(env_name)
    if value is None:
        raise ValueError(f"Environment variable {env_name} expected, but not set")
    return value


def get_socket_with_port() -> socket.socket:
    """Listen on a free port of this host; close the socket right before the port is used.

    Raises:
        RuntimeError: no address family of this host lets us.
    """
    problems = []
    for family, kind, protocol, _, address in addresses_of("localhost"):
        # A family may be switched off altogether, so making the socket is part of the try.
        try:
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            problems.append(error)
            continue
        try:
            listener.bind(address)
            listener.listen(0)
        except OSError as error:
            listener.close()
            problems.append(error)
            continue
        return listener
    raise RuntimeError(f"Failed to create a socket: {'; '.join(map(str, problems))}")


class macros:  # noqa: N801  # torch's name
    """What may be written into a worker's arguments for what only its node knows."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: list[Any], local_rank: str) -> list[Any]:
        """The arguments with `${local_rank}` replaced in those that are texts."""
        return [
            Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg
            for arg in args
        ]
