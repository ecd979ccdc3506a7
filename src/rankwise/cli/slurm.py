"""What `srun rankwise run …` need not be told, because SLURM has said it already.

srun starts one task per node, and describes the step to each of them in variables. From these the
nodes know, all alike, how many they are (SLURM_STEP_NUM_NODES), what their run is called
(`<job>.<step>`, with `-1` behind it once the job was requeued), and where they meet, on a port
that follows from job and step:

- *three nodes or more, with an etcd to be trusted*: in an etcd of their own on the first three
  hosts of the step (SLURM_STEP_NODELIST), so that any node may be lost. Each node decides that for
  itself, so what is installed has to be so on all; where it is not, nodes meet something at the
  common port that they do not understand, and say so.
- *else*: in an embedded store on the first host. Each knows which node it is (SLURM_NODEID): the
  first one serves, so no name has to be looked up for that.

The user's options win: with --standalone, or as soon as one option or PET_ variable says where or
as whom this node meets the others, nothing is taken from SLURM but the sizes behind
`--nproc-per-node auto`, and the run's name where nodes meet in an etcd. A run inside a worker of
another run takes nothing at all, although it inherits the variables.

Nothing here asks SLURM's commands or daemons.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.wording import counted
from rankwise.cli.node_flags import parse_settings
from rankwise.drivers.real.cpus import usable_cpu_count

if TYPE_CHECKING:
    from rankwise.cli.run_job import RunOptions

OWN_ETCD_NODES_MIN = 3
PORT_MIN = 20000
PORT_COUNT = 9000
"""The store listens on a port of 20000 to 28999: below what Linux gives out by itself."""
_STEP_STRIDE = 1009
"""How far apart the ports of two steps of a job are, which may run at the same time."""

_MEETING_OPTIONS = ("rdzv_endpoint", "master_addr", "master_port", "node_rank", "standalone")
"""With one of these the user has said how the nodes meet."""
_SETTINGS_OF_EMBEDDED = frozenset({"token", "token_file", "encrypts", "is_host", "linger"})
"""With one of these in --rdzv-conf, the store is an embedded one."""
_SERVED_BY_A_NODE = ("static", "embedded", "c10d")
"""Backends whose store lives in an agent, so that it can be on the first host."""

_WORD = re.compile(r"(?:[^,\s\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_ITEM = re.compile(r"(\d+)(?:-(\d+))?")
_BOX = re.compile(r"([0-9A-Z]+)x([0-9A-Z]+)")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class SlurmStep(NamedTuple):
    """A step of a SLURM job, as one of its tasks sees it.

    Attributes:
        job, step: their numbers.
        node_count, task_count: of the whole step.
        node_index: of this node in the step, from 0.
        host_list: the step's hosts, compressed.
        requeue_count: how many times SLURM has begun the job again.
    """

    job: int
    step: int
    node_count: int
    task_count: int
    node_index: int
    host_list: str
    requeue_count: int = 0

    @property
    def run_id(self) -> str:
        """What SLURM calls the step; a requeued job's steps have the same numbers again."""
        name = f"{self.job}.{self.step}"
        return f"{name}-{self.requeue_count}" if self.requeue_count else name

    @property
    def port(self) -> int:
        """Where its nodes meet."""
        return PORT_MIN + (self.job + _STEP_STRIDE * self.step) % PORT_COUNT


class Completed(NamedTuple):
    """Options with what SLURM has said, and what to tell the user of it."""

    options: "RunOptions"
    notice: str | None


def completed(
    options: "RunOptions", environ: Mapping[str, str], words: Sequence[str] = ()
) -> Completed:
    """The options with whatever they leave open and SLURM knows.

    Args:
        options: as given.
        environ: with SLURM's variables.
        words: what followed `rankwise run`, to be shown with `srun` before it.

    Raises:
        ConfigError: the job has several nodes, and this is no task of a step; the step has several
            tasks on one node; or a variable cannot be read.
    """
    if "SLURM_JOB_ID" not in environ or "RANKWISE_RUN_ID" in environ:
        return Completed(options, None)
    options = _with_allotted_size(options, environ)
    says_how_to_meet = any(name in options.origins for name in _MEETING_OPTIONS)
    if options.rdzv_own_etcd and not says_how_to_meet and (step := step_in(environ)) is not None:
        return _rendezvous_in_own_etcd(options, step)
    if "rdzv_id" not in options.origins and options.rdzv_backend not in _SERVED_BY_A_NODE:
        step = step_in(environ)
        return Completed(
            options if step is None else msgspec.structs.replace(options, rdzv_id=step.run_id), None
        )
    if says_how_to_meet or options.rdzv_backend not in _SERVED_BY_A_NODE:
        return Completed(options, None)
    if "nnodes" in options.origins and options.nnodes.strip() in ("1", "1:1"):
        return Completed(options, None)
    step = step_in(environ)
    if step is None:
        _refuse_half_a_job(environ, words)
        return Completed(options, None)
    if step.task_count > step.node_count:
        raise ConfigError(
            f"srun has started {step.task_count} tasks on {step.node_count} node(s), and each is a "
            "rankwise run of its own, which starts its workers itself",
            hint="use srun --ntasks-per-node 1 with --nproc-per-node for the workers, or "
            "--standalone if every task should be a separate run",
        )
    if step.node_count == 1 and "nnodes" not in options.origins:
        return Completed(options, None)
    if "rdzv_backend" in options.origins:
        return _rendezvous_in_step(options, step, options.rdzv_backend)
    lack = _own_etcd_lack(options, step, environ)
    if lack is None:
        options = msgspec.structs.replace(options, rdzv_own_etcd=True)
        return _rendezvous_in_own_etcd(options, step)
    return _rendezvous_in_step(
        options, step, f"embedded, since {lack}: the loss of node 0 ends the run"
    )


def step_in(environ: Mapping[str, str]) -> SlurmStep | None:
    """The step whose task this process is; None if it is in none.

    Raises:
        ConfigError: a variable is no number.
    """
    if "SLURM_STEP_NUM_NODES" not in environ:
        return None
    return SlurmStep(
        job=_number(environ, "SLURM_JOB_ID"),
        step=_number(environ, "SLURM_STEP_ID"),
        node_count=_number(environ, "SLURM_STEP_NUM_NODES"),
        task_count=_number(environ, "SLURM_STEP_NUM_TASKS"),
        node_index=_number(environ, "SLURM_NODEID"),
        host_list=environ.get("SLURM_STEP_NODELIST", ""),
        requeue_count=_number(environ, "SLURM_RESTART_COUNT", "0"),
    )


def hosts_in(host_list: str) -> Iterator[str]:
    """The hosts of a compressed list, in its order: `node[01-03,7],gpu3`.

    Several brackets in one name stand for all combinations, and so does a box of several
    dimensions, `bgl[000x133]`, whose digits go from 0 to Z.

    Raises:
        ConfigError: it is no such list.
    """
    if not host_list.strip(", \t\n"):
        raise _unreadable(host_list)
    position = 0
    for found in _WORD.finditer(host_list):
        if host_list[position : found.start()].strip(", \t\n"):
            raise _unreadable(host_list)
        position = found.end()
        parts = [
            [literal] if literal else _members(inside, host_list)
            for inside, literal in _PART.findall(found[0])
        ]
        yield from map("".join, product(*parts))
    if host_list[position:].strip(", \t\n"):
        raise _unreadable(host_list)


def _members(inside: str, host_list: str) -> list[str]:
    """What stands for a pair of brackets."""
    members: list[str] = []
    for item in inside.split(","):
        if (box := _BOX.fullmatch(item)) is not None and len(box[1]) == len(box[2]):
            edges = [
                _DIGITS[_DIGITS.index(low) : _DIGITS.index(high) + 1]
                for low, high in zip(box[1], box[2], strict=True)
            ]
            members += map("".join, product(*edges))
            continue
        if (found := _ITEM.fullmatch(item)) is None:
            # A single place in several dimensions has letters too.
            if not item or not set(item) <= set(_DIGITS):
                raise _unreadable(host_list)
            members.append(item)
            continue
        low, high = found[1], found[2] or found[1]
        if int(low) > int(high):
            raise _unreadable(host_list)
        members += (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))
    if not members:
        raise _unreadable(host_list)
    return members


def _own_etcd_lack(
    options: "RunOptions", step: SlurmStep, environ: Mapping[str, str]
) -> str | None:
    """Why the nodes of the step do not run an etcd of their own."""
    if step.node_count < OWN_ETCD_NODES_MIN:
        return f"the step has {counted(step.node_count, 'node')}"
    if given := sorted(_SETTINGS_OF_EMBEDDED & parse_settings(options.rdzv_conf).keys()):
        return f"--rdzv-conf has {given[0]}"
    from rankwise.launch.cluster.etcd_program import own_etcd_lack  # noqa: PLC0415  # takes ms

    return own_etcd_lack(environ.get("PATH", ""))


def _rendezvous_in_step(options: "RunOptions", step: SlurmStep, how: str) -> Completed:
    hosts = hosts_in(step.host_list)
    first, second = next(hosts), next(hosts, None)
    serves = step.node_index == 0
    is_static = options.rdzv_backend == "static" and "rdzv_backend" in options.origins
    endpoint = f"{first}:{step.port}"
    found: dict[str, object] = {
        "rdzv_endpoint": endpoint,
        "rdzv_backend": options.rdzv_backend if "rdzv_backend" in options.origins else "embedded",
    }
    if is_static:
        found["node_rank"] = step.node_index
    if "is_host" not in options.rdzv_conf:
        conf = f"is_host={'true' if serves else 'false'}"
        found["rdzv_conf"] = f"{options.rdzv_conf},{conf}" if options.rdzv_conf.strip() else conf
    if serves and second is not None and "local_addr" not in options.origins:
        found |= _address_towards(second)
    return _completed(options, step, found, f"at {endpoint} ({how})")


def _rendezvous_in_own_etcd(options: "RunOptions", step: SlurmStep) -> Completed:
    """The first three nodes of the step run the members of an etcd for it."""
    endpoint = ",".join(f"{host}:{step.port}" for host in islice(hosts_in(step.host_list), 3))
    found: dict[str, object] = {"rdzv_endpoint": endpoint, "rdzv_backend": "etcd"}
    where = f"in an etcd of their own at {endpoint}, which survives the loss of any node"
    return _completed(options, step, found, where)


def _completed(
    options: "RunOptions", step: SlurmStep, found: dict[str, object], where: str
) -> Completed:
    if "nnodes" not in options.origins:
        found["nnodes"] = str(step.node_count)
    if "rdzv_id" not in options.origins:
        found["rdzv_id"] = step.run_id
    options = msgspec.structs.replace(options, **found)
    return Completed(
        options,
        f"SLURM step {step.run_id}: this is node {step.node_index} of {step.node_count}; run "
        f"{options.rdzv_id} on {options.nnodes} nodes, which meet {where}",
    )


def _address_towards(host: str) -> dict[str, str]:
    """The first node's own address: its own name often means the loopback to itself."""
    from rankwise.drivers.real.loopback import loopback_address  # noqa: PLC0415  # sockets take ms
    from rankwise.launch.cluster.addresses import own_address  # noqa: PLC0415  # the same

    address = own_address(host)
    return {} if address == loopback_address() else {"local_addr": address}


def _with_allotted_size(options: "RunOptions", environ: Mapping[str, str]) -> "RunOptions":
    """`auto` means what this job was given of the node, not what the node has."""
    if options.nproc_per_node != "auto":
        return options
    from rankwise.launch.run.devices import visible_gpu_count  # noqa: PLC0415  # for auto alone

    visible = visible_gpu_count(environ)
    if (gpus := _allotted(environ, "SLURM_GPUS_ON_NODE")) > 0:
        size = min(gpus, visible) or gpus
    elif visible or (cpus := _allotted(environ, "SLURM_CPUS_ON_NODE")) <= 0:
        return options
    else:
        size = min(cpus, usable_cpu_count())
    return msgspec.structs.replace(options, nproc_per_node=str(size))


def _allotted(environ: Mapping[str, str], variable: str) -> int:
    return _number(environ, variable) if environ.get(variable) else 0


def _refuse_half_a_job(environ: Mapping[str, str], words: Sequence[str]) -> None:
    """A batch script runs on the first node alone: a part of the world would be taken for all.

    Raises:
        ConfigError: the job has other nodes, too.
    """
    count = environ.get("SLURM_JOB_NUM_NODES", "1")
    if count == "1":
        return
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    srun = ["srun", "--ntasks-per-node", "1", *(["--cpus-per-task", cpus] if cpus else [])]
    raise ConfigError(
        f"the SLURM job has {count} nodes, and this runs on one of them, since srun has not started"
        " it",
        hint=f"write {shlex.join([*srun, 'rankwise', 'run', *words])}, or give --standalone to use"
        " this node alone",
    )


def _number(environ: Mapping[str, str], variable: str, otherwise: str = "") -> int:
    text = environ.get(variable, otherwise)
    if not text.isdecimal():
        raise ConfigError(
            f"{variable} is {text!r}, expected a number, as SLURM sets it",
            hint="give --nnodes and --rdzv-endpoint, then SLURM's variables are not read",
        )
    return int(text)


def _unreadable(host_list: str) -> ConfigError:
    return ConfigError(
        f"SLURM_STEP_NODELIST is {host_list!r}, expected a list of hosts such as node[01-04],gpu3",
        hint="give --nnodes and --rdzv-endpoint, then SLURM's variables are not read",
    )
