"""rankwise: run a program of many ranks anywhere.

    import rankwise

    def hello() -> str:
        return f"rank {rankwise.rank()} of {rankwise.world_size()}"

    print(rankwise.run(hello, nprocs=4))

Names are loaded when they are first used, so that importing rankwise costs next to nothing:
workers import it too.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwise.base.errors import (
        CollectiveError,
        CollectiveTimeout,
        ConfigError,
        GangError,
        PeerDied,
        RankwiseError,
        RunTimeout,
        SpawnFailed,
        WorkersFailed,
    )
    from rankwise.base.failure import ErrorRecord, ExitStatus, Failure, FailureCause
    from rankwise.launch.api import run
    from rankwise.launch.fork_server import ForkServer
    from rankwise.launch.ranks import local_rank, rank, restart_count, run_id, world_size
    from rankwise.launch.recovery import Recalled, recover
    from rankwise.launch.sections import section
    from rankwise.launch.spawning import (
        ProcessExitedException,
        ProcessRaisedException,
        SpawnContext,
        spawn,
    )
    from rankwise.launch.stopping import should_stop

__version__ = "0.1.0"

_NAMES = {
    "rankwise.base.errors": (
        "CollectiveError CollectiveTimeout ConfigError GangError PeerDied RankwiseError "
        "RunTimeout SpawnFailed WorkersFailed"
    ),
    "rankwise.base.failure": "ErrorRecord ExitStatus Failure FailureCause",
    "rankwise.launch.api": "run",
    "rankwise.launch.fork_server": "ForkServer",
    "rankwise.launch.ranks": "local_rank rank restart_count run_id world_size",
    "rankwise.launch.recovery": "Recalled recover",
    "rankwise.launch.sections": "section",
    "rankwise.launch.spawning": "ProcessExitedException ProcessRaisedException SpawnContext spawn",
    "rankwise.launch.stopping": "should_stop",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

_SUBPACKAGES = ("collectives", "sim", "workers")
"""Reached by `import rankwise` alone, as what they hold is part of the interface."""

__all__ = [  # spelled out, since type checkers read this list and cannot run code
    "CollectiveError",
    "CollectiveTimeout",
    "ConfigError",
    "ErrorRecord",
    "ExitStatus",
    "Failure",
    "FailureCause",
    "ForkServer",
    "GangError",
    "PeerDied",
    "ProcessExitedException",
    "ProcessRaisedException",
    "RankwiseError",
    "Recalled",
    "RunTimeout",
    "SpawnContext",
    "SpawnFailed",
    "WorkersFailed",
    "local_rank",
    "rank",
    "recover",
    "restart_count",
    "run",
    "run_id",
    "section",
    "should_stop",
    "spawn",
    "world_size",
]


def __getattr__(name: str) -> "Any":
    home = _HOMES.get(name)
    if home is None and name not in _SUBPACKAGES:
        raise AttributeError(f"module 'rankwise' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  # not needed by workers that only boot

    if home is None:
        return import_module(f"rankwise.{name}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
