"""torch's TCPStore, made with patience, and free ports. Making a store imports torch."""

import os
import socket
from contextlib import closing
from datetime import timedelta
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.compat.torch.elastic.utils.api import get_socket_with_port as _get_socket_with_port
from rankwise.compat.torch.elastic.utils.logging import get_logger

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]

logger = get_logger(__name__)

_IN_USE = "in use"


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = (60 * 10),
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> Any:
    """Make a `torch.distributed.TCPStore`.

    Args:
        is_server: whether it listens.
        server_addr: where.
        server_port: its port; -1 takes a free one, which only a server without clients may.
        world_size: how many members it has.
        timeout: seconds that its operations wait.
        wait_for_workers: whether to return only when all members are there.
        retries: how often another free port is tried when one has just been taken.
        use_libuv: torch's newer daemon, or its older one; None means what USE_LIBUV says, or the
            newer.

    Raises:
        ValueError: several members and no port to meet at.
        ConfigError: torch is not installed.
        RuntimeError: torch's own errors, such as DistNetworkError.
    """
    if server_port == -1 and world_size > 1:
        raise ValueError(
            f"server_port must be specified when world_size > 1, got server_port={server_port}, "
            f"world_size={world_size}"
        )
    dist = torch_distributed()
    if use_libuv is None:
        use_libuv = os.environ.get("USE_LIBUV", "1") == "1"
    for attempts_left in range(retries - 1, -1, -1):
        port = get_free_port() if server_port == -1 else server_port
        try:
            return dist.TCPStore(
                host_name=server_addr,
                port=port,
                world_size=world_size,
                is_master=is_server,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=wait_for_workers,
                use_libuv=use_libuv,
            )
        except RuntimeError as error:
            was_taken = _IN_USE in str(error).lower() or "EADDRINUSE" in str(error)
            if not was_taken or server_port != -1 or attempts_left == 0:
                raise
            logger.warning("port %s was taken meanwhile; trying another", port)
    raise RuntimeError(f"retries is {retries}, expected at least 1")


def get_free_port() -> int:
    """A port that was free a moment ago."""
    with closing(_get_socket_with_port()) as listener:
        port: int = listener.getsockname()[1]
    return port


def get_socket_with_port() -> socket.socket:
    """Listen on a free port of this host; see `utils.api`."""
    return _get_socket_with_port()


def torch_distributed(
    lack: str = "a c10d store is torch's", hint: str = "pip install torch"
) -> Any:
    """The module, whose import takes two seconds.

    Raises:
        ConfigError: torch is not installed; begins with what lacks it.
    """
    try:
        import torch.distributed as dist  # noqa: PLC0415  # see above
    except ImportError as error:
        raise ConfigError(f"{lack}, and torch is not installed", hint=hint) from error
    return dist
