"""What to run on a Ray cluster: values, and the words and variables that each agent is given."""

import secrets
from collections.abc import Mapping

import msgspec

from rankwise.base.units import Duration
from rankwise.drivers.real.stores.opening import TOKEN_VARIABLE

_PASSED_ON = ("PET_", "RANKWISE_", "TORCH", "NCCL_", "GLOO_", "OMP_", "PYTHON")
"""Beginnings of the variables that agents get from where the command was given."""
_NOT_PASSED_ON = ("PET_ON", "PET_RAY_RESOURCES", "PET_NNODES", "PET_STANDALONE", "PET_NODE_RANK")
"""What has had its effect here already."""


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose agents run in a placement group of Ray.

    Attributes:
        run_id: its name.
        nodes_min, nodes_max: how few nodes may run, and how many at most.
        words: of `rankwise run`, in strict spelling: options, `--`, program, its arguments. Without
            those that say how many nodes there are and where they meet.
        resources: what each agent takes of its node, by Ray's names. GPU is None for all that a
            node has.
        backend, endpoint: where the nodes meet; None for a store in this process.
        settings: `--rdzv-conf`.
        patience: how long to wait for the nodes.
        is_quiet: whether to say nothing but what the agents say.
    """

    run_id: str
    nodes_min: int
    nodes_max: int
    words: tuple[str, ...]
    resources: dict[str, float | None]
    backend: str | None = None
    endpoint: str | None = None
    settings: str = ""
    patience: Duration
    is_quiet: bool = False


class RayRendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the agents of one run meet, as words for each of them.

    Attributes:
        token: the secret of the nodes alone; None: what they are told anyway.
    """

    backend: str
    endpoint: str
    settings: str
    token: str | None = None


def token_for_agents(environ: Mapping[str, str]) -> str | None:
    """A random token for agents that meet where the user says, unless the user has given one."""
    return None if environ.get(TOKEN_VARIABLE) else secrets.token_hex(16)


def agent_words(job: RayJob, bundle_count: int, place: RayRendezvous | None) -> list[str]:
    """The words of `rankwise run` for each agent; None for `place` if there is one node."""
    words = [f"--rdzv-id={job.run_id}"]
    if place is not None:
        words += [
            f"--nnodes={min(job.nodes_min, bundle_count)}:{bundle_count}",
            f"--rdzv-backend={place.backend}",
            f"--rdzv-endpoint={place.endpoint}",
            f"--rdzv-conf={place.settings}",
            "--rdzv-once",  # an agent that takes another's place may come when all is over
        ]
    return [*words, *job.words]


def agent_environment(environ: Mapping[str, str], place: RayRendezvous | None) -> dict[str, str]:
    """The variables that agents get in addition to those of their node."""
    passed_on = {
        name: value
        for name, value in environ.items()
        if name.startswith(_PASSED_ON)
        and name not in _NOT_PASSED_ON
        and not name.startswith("PET_RDZV_")
    }
    if place is not None and place.token is not None:
        passed_on[TOKEN_VARIABLE] = place.token
    return passed_on
