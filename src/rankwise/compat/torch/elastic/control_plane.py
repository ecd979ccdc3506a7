"""torch's `worker_main`: a worker that answers over HTTP on a Unix socket while it works."""

from rankwise.compat.torch.lazy_names import names_of_torch

__all__ = [  # noqa: F822  # found by `__getattr__`
    "worker_main",
]

__getattr__ = names_of_torch(__name__)
