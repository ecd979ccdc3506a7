"""The variables that a worker finds, in torchrun's words.

Unmodified PyTorch programs read RANK, WORLD_SIZE, MASTER_ADDR and the rest; the `TORCHELASTIC_…`
ones make `torch.distributed.is_torchelastic_launched()` true and tell `record` where to write.
`TORCHELASTIC_USE_AGENT_STORE` is False: rank 0 hosts the store on MASTER_PORT itself, which the
agent keeps reserved for it.
"""

from collections.abc import Mapping

from rankwise.base.errors import ConfigError
from rankwise.launch.run.job import Job
from rankwise.launch.run.node_ranks import NodeRanks

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
MEANINGS_OF_VARIABLES = {
    "RANK": "this rank, counted over all nodes",
    "WORLD_SIZE": "number of ranks on all nodes",
    "LOCAL_RANK": "this rank, counted on its node; 0 with `--virtual-local-rank`",
    "LOCAL_WORLD_SIZE": "number of ranks on this node",
    "GROUP_RANK": "this node",
    "GROUP_WORLD_SIZE": "number of nodes",
    "ROLE_RANK": "equal to `RANK`",
    "ROLE_WORLD_SIZE": "equal to `WORLD_SIZE`",
    "ROLE_NAME": "value of `--role`",
    "MASTER_ADDR": "address at which rank 0 listens",
    "MASTER_PORT": "port at which rank 0 listens",
    "TORCHELASTIC_RESTART_COUNT": "restarts so far",
    "TORCHELASTIC_MAX_RESTARTS": "restarts allowed",
    "TORCHELASTIC_RUN_ID": "name of the run",
    "TORCHELASTIC_USE_AGENT_STORE": "False: rank 0 serves torch's store itself",
}
"""What workers learn of their place, whatever their environment says. docs/settings.md is generated
from this table."""
VARIABLES_OF_RANKS = frozenset(MEANINGS_OF_VARIABLES)


def worker_environment(
    job: Job,
    ranks: NodeRanks,
    *,
    local_rank: int,
    attempt: int,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """The whole environment of one worker: what is inherited, what the job adds, the ranks.

    Raises:
        ConfigError: virtual local ranks were asked for and there are fewer devices than workers.
    """
    rank = str(ranks.rank(local_rank))
    environment = {
        **inherited,
        **job.environment,
        **job.environment_by_rank.get(local_rank, {}),
        "RANKWISE_RUN_ID": job.run_id,
        "RANKWISE_LOCAL_RANK": str(local_rank),  # whatever the program is told about LOCAL_RANK
    }
    if not job.rank_variables:
        return environment
    # Last: a run inside of a rank inherits the variables of the outer one.
    environment |= {
        "LOCAL_RANK": str(local_rank),
        "RANK": rank,
        "GROUP_RANK": str(ranks.node_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": job.role,
        "LOCAL_WORLD_SIZE": str(job.gang.size),
        "WORLD_SIZE": str(ranks.size),
        "GROUP_WORLD_SIZE": str(ranks.node_count),
        "ROLE_WORLD_SIZE": str(ranks.size),
        "MASTER_ADDR": ranks.master_addr,
        "MASTER_PORT": str(ranks.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt if ranks.restarts is None else ranks.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(job.restarts_allowed),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if ranks.collectives_key:
        environment["RANKWISE_COLLECTIVES_KEY"] = ranks.collectives_key
    # As torchrun does; a value of the user's wins.
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if job.virtual_local_rank:
        environment["LOCAL_RANK"] = "0"
        environment[DEVICES_VARIABLE] = _device_of(local_rank, inherited.get(DEVICES_VARIABLE))
    return environment


def _device_of(local_rank: int, visible: str | None) -> str:
    """The one device that a worker with a virtual local rank sees."""
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise ConfigError(
            f"--virtual-local-rank: local rank {local_rank} has no device, "
            f"{DEVICES_VARIABLE} names only {len(devices)} ({visible})",
            hint="start fewer workers or make more devices visible",
        )
    return devices[local_rank]
