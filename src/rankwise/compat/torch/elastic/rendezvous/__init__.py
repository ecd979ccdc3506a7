"""Where nodes meet: handlers by the name of their backend, and the errors of meeting."""

from rankwise.compat.torch.elastic.rendezvous.api import *  # noqa: F403  # all that it names
from rankwise.compat.torch.elastic.rendezvous.api import __all__ as __all__
from rankwise.compat.torch.elastic.rendezvous.registry import (
    _register_default_handlers,
    _register_out_of_tree_handlers,
)

_register_default_handlers()
_register_out_of_tree_handlers()
