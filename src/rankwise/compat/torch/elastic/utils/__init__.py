"""Small helpers under torch's names: environment, ports, macros."""

from rankwise.compat.torch.elastic.utils.api import get_env_variable_or_raise, get_socket_with_port
from rankwise.compat.torch.lazy_names import lazy_names

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]

__getattr__ = lazy_names(
    __name__,
    {
        "distributed": "distributed",
        "log_level": "log_level",
        "logging": "logging",
        "macros": "api",
        "process_state": "process_state",
        "store": "store",
    },
)
