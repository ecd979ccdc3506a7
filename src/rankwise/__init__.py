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

    from rankwise.base.errors import CollectiveError as CollectiveError
    from rankwise.base.errors import CollectiveTimeout as CollectiveTimeout
    from rankwise.base.errors import ConfigError as ConfigError
    from rankwise.base.errors import GangError as GangError
    from rankwise.base.errors import PeerDied as PeerDied
    from rankwise.base.errors import RankwiseError as RankwiseError
    from rankwise.base.errors import RunTimeout as RunTimeout
    from rankwise.base.errors import SpawnFailed as SpawnFailed
    from rankwise.base.errors import WorkerDied as WorkerDied
    from rankwise.base.errors import WorkersFailed as WorkersFailed
    from rankwise.base.failure import ErrorRecord as ErrorRecord
    from rankwise.base.failure import ExitStatus as ExitStatus
    from rankwise.base.failure import Failure as Failure
    from rankwise.base.failure import FailureCause as FailureCause
    from rankwise.drivers.real.pool.errors import BrokenPool as BrokenPool
    from rankwise.launch.api import run as run
    from rankwise.launch.fork_server import ForkServer as ForkServer
    from rankwise.launch.inside.rank_identity import local_rank as local_rank
    from rankwise.launch.inside.rank_identity import rank as rank
    from rankwise.launch.inside.rank_identity import restart_count as restart_count
    from rankwise.launch.inside.rank_identity import run_id as run_id
    from rankwise.launch.inside.rank_identity import world_size as world_size
    from rankwise.launch.inside.recovery import Recalled as Recalled
    from rankwise.launch.inside.recovery import recover as recover
    from rankwise.launch.inside.sections import section as section
    from rankwise.launch.inside.stopping import should_stop as should_stop
    from rankwise.launch.pool import Pool as Pool
    from rankwise.launch.spawning import ProcessExitedException as ProcessExitedException
    from rankwise.launch.spawning import ProcessRaisedException as ProcessRaisedException
    from rankwise.launch.spawning import SpawnContext as SpawnContext
    from rankwise.launch.spawning import spawn as spawn

__version__ = "0.1.0"

_NAMES = {
    "rankwise.base.errors": (
        "CollectiveError CollectiveTimeout ConfigError GangError PeerDied RankwiseError "
        "RunTimeout SpawnFailed WorkerDied WorkersFailed"
    ),
    "rankwise.base.failure": "ErrorRecord ExitStatus Failure FailureCause",
    "rankwise.drivers.real.pool.errors": "BrokenPool",
    "rankwise.launch.api": "run",
    "rankwise.launch.fork_server": "ForkServer",
    "rankwise.launch.inside.rank_identity": "local_rank rank restart_count run_id world_size",
    "rankwise.launch.inside.recovery": "Recalled recover",
    "rankwise.launch.inside.sections": "section",
    "rankwise.launch.spawning": "ProcessExitedException ProcessRaisedException SpawnContext spawn",
    "rankwise.launch.inside.stopping": "should_stop",
    "rankwise.launch.pool": "Pool",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

_SUBPACKAGES = ("collectives", "sim", "workers")
"""Reached by `import rankwise` alone, as what they hold is part of the interface."""

if not TYPE_CHECKING:  # type checkers see what is imported as itself
    __all__ = sorted(_HOMES)  # noqa: PLE0605  # the names are above, once


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
    return sorted({*globals(), *_HOMES})
