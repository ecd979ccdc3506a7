"""The backends that there are: ours, and those of installed packages."""

import logging
from importlib.metadata import entry_points

from rankwise.compat.torch.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousParameters,
)
from rankwise.compat.torch.elastic.rendezvous.api import (
    rendezvous_handler_registry as handler_registry,
)

__all__ = ["get_rendezvous_handler"]

log = logging.getLogger(__name__)


def _create_static_handler(params: RendezvousParameters) -> RendezvousHandler:
    from rankwise.compat.torch.elastic.rendezvous.static_tcp_rendezvous import (  # noqa: PLC0415
        create_rdzv_handler,  # it pays for torch
    )

    return create_rdzv_handler(params)


def _create_store_handler(params: RendezvousParameters) -> RendezvousHandler:
    from rankwise.compat.torch.elastic.rendezvous.store_rendezvous import (  # noqa: PLC0415
        create_handler,  # it pays for stores
    )

    return create_handler(params)


def _register_default_handlers() -> None:
    handler_registry.register("static", _create_static_handler)
    for backend in ("c10d", "embedded", "etcd", "etcd-v2"):
        handler_registry.register(backend, _create_store_handler)


def _register_out_of_tree_handlers() -> None:
    """Register what installed packages offer in the group `torchrun.handlers`.

    Each entry point is a function without arguments that returns a creator.
    """
    for point in entry_points(group="torchrun.handlers"):
        try:
            handler_registry.register(point.name, point.load()())
        except Exception:  # another project's broken package must not end every launch
            log.warning("the rendezvous handler %r cannot be used", point.name, exc_info=True)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler of `params.backend`.

    Raises:
        ValueError: there is no such backend.
    """
    return handler_registry.create_handler(params)
