"""The worker of `simpler.worker`."""

from typing import Any

from rankwise.base.errors import RemoteTraceback
from rankwise.compat.simpler.task_errors import task_error
from rankwise.compat.simpler.task_interface import platform_of
from rankwise.workers import worker
from rankwise.workers.failures import root_cause_of

__all__ = ["Worker"]


class Worker(worker.Worker):
    """A worker whose tasks' exceptions are `RuntimeError`s too.

    A tensor's address at which nothing lies only orders the tasks that name it.
    """

    _takes_tokens = True

    def __init__(self, level: int, *configs: Any, platform: Any = "sim", **config: Any) -> None:
        super().__init__(level, *configs, platform=platform_of(platform), **config)

    @property
    def _initialized(self) -> bool:
        return self.is_initialized

    def _run(self, *given: Any, **options: Any) -> None:
        try:
            super()._run(*given, **options)
        except Exception as error:
            if not isinstance(error.__cause__, RemoteTraceback):
                raise
            raise task_error(error, root_cause_of(self.failures).child) from error.__cause__

    def _run_chip(self, *given: Any) -> None:
        try:
            super()._run_chip(*given)
        except Exception as error:
            if isinstance(error, RuntimeError):
                raise
            raise task_error(error, "chip") from error
