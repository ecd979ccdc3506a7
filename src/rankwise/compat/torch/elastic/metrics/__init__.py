"""Counters and durations: `put_metric`, `prof`, and `configure` to say where they go.

A deployment may install a module `static_init` beside this file: its public names, above all its
own `initialize_metrics`, take the place of the ones here.
"""

from contextlib import suppress

from rankwise.compat.torch.elastic.metrics import api
from rankwise.compat.torch.elastic.metrics.api import *  # noqa: F403  # all that it names
from rankwise.compat.torch.elastic.metrics.api import MetricsConfig

__all__ = ["initialize_metrics"]
__all__ += api.__all__


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing; a deployment's `static_init` may configure handlers here."""


with suppress(ModuleNotFoundError):  # the usual case
    from rankwise.compat.torch.elastic.metrics.static_init import *  # type: ignore[import-not-found]  # noqa: F403
