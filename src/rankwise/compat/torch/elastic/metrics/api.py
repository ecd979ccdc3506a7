"""Counters and durations by group, handed to whatever handler a program configures.

Nothing is stored here: `put_metric` makes a `MetricData` and gives it to the handler of its group,
in the calling thread.
"""

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


class MetricData(NamedTuple):
    """One value of one metric; `timestamp` is seconds since 1970."""

    timestamp: float
    group_name: str
    name: str
    value: float


class MetricsConfig:
    """Settings for the code that initializes metrics in a deployment."""

    __slots__ = ("params",)

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = params or {}


class MetricHandler(ABC):
    """Takes metrics to where they are kept."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one value; called in the thread that measured it."""


class ConsoleMetricHandler(MetricHandler):
    """Prints every value."""

    def emit(self, metric_data: MetricData) -> None:
        """Print the value as `[timestamp][group]: name=value`."""
        moment, group, name, value = metric_data
        print(f"[{moment}][{group}]: {name}={value}")  # noqa: T201  # this is its purpose


class NullMetricHandler(MetricHandler):
    """Forgets every value."""

    def emit(self, metric_data: MetricData) -> None:
        """Do nothing."""


class MetricStream:
    """The metrics of one group on their way to one handler."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Give a value, with the present time, to the handler."""
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_handler_by_group: dict[str | None, MetricHandler] = {}
"""`None` is the group of all that have no handler of their own."""


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Give a group its handler; without a group, all groups that have none of their own."""
    _handler_by_group[group] = handler


def getStream(group: str) -> MetricStream:  # noqa: N802  # torch's name
    """Make a stream to the group's present handler."""
    handler = _handler_by_group.get(group) or _handler_by_group.get(None) or NullMetricHandler()
    return MetricStream(group, handler)


def put_metric(metric_name: str, metric_value: float, metric_group: str = "torchelastic") -> None:
    """Give a value to the handler of its group."""
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """Do what `put_metric` does. Deprecated."""
    warnings.warn(
        "publish_metric is deprecated, use put_metric", category=FutureWarning, stacklevel=2
    )
    getStream(metric_group).add_value(metric_name, metric_value)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Whole milliseconds since a reading of `time.time()`."""
    return int((time.time() - start_time_in_seconds) * 1000)


@overload
def prof(
    fn: Callable[ParamsT, ResultT], group: str = "torchelastic"
) -> Callable[ParamsT, ResultT]: ...
@overload
def prof(
    fn: None = None, group: str = "torchelastic"
) -> Callable[[Callable[ParamsT, ResultT]], Callable[ParamsT, ResultT]]: ...
def prof(fn: Callable[..., Any] | None = None, group: str = "torchelastic") -> Any:
    """Decorate a function so that each call puts its duration, and a success or a failure.

    The metrics are `<key>.duration.ms` and `<key>.success` or `<key>.failure`, where the key is
    `Class.method` for a method and `<last part of the module>.<function>` for a function.

    Args:
        fn: the function, when used as `@prof`.
        group: the metrics' group, when used as `@prof(group=…)`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return _measured(function, _get_metric_name(function), group)

    return decorate if fn is None else decorate(fn)


def profile(
    group: str | None = None,
) -> Callable[[Callable[ParamsT, ResultT]], Callable[ParamsT, ResultT]]:
    """Decorate as `prof` does, with the function's bare name as key. Deprecated."""
    warnings.warn("profile is deprecated, use prof", category=FutureWarning, stacklevel=2)

    def decorate(function: Callable[ParamsT, ResultT]) -> Callable[ParamsT, ResultT]:
        return _measured(function, function.__name__, group)  # type: ignore[arg-type]  # None is torch's default

    return decorate


def _measured(
    function: Callable[ParamsT, ResultT], key: str, group: str
) -> Callable[ParamsT, ResultT]:
    @wraps(function)
    def measured(*args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        start = time.monotonic()
        try:
            result = function(*args, **kwargs)
            put_metric(f"{key}.success", 1, group)
        except Exception:
            put_metric(f"{key}.failure", 1, group)
            raise
        finally:
            put_metric(f"{key}.duration.ms", int((time.monotonic() - start) * 1000), group)
        return result

    return measured


def _get_metric_name(function: Callable[..., Any]) -> str:
    qualified = function.__qualname__
    if "." in qualified or not function.__module__:
        return qualified
    return f"{function.__module__.rpartition('.')[2]}.{qualified}"
