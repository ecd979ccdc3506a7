"""`rankwise manifest`: writes down for another scheduler what `rankwise run` would be told.

`rankwise manifest kubernetes [OPTIONS] -- WORDS` takes the words of `rankwise run`, its options
and the program, and prints what `kubectl apply` reads. The words are checked here as far as this
machine can know: whether the program exists, the image decides. Nothing is asked of a cluster;
`rankwise manifest own` alone, which runs in the pods, asks it to let etcd end with the JobSet.

`rankwise manifest slurm [OPTIONS] -- WORDS` prints what `sbatch` reads. Both hand the nodes of the
run a random token.
"""

import os
import re
import secrets
import sys
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import click

from rankwise.base.errors import ConfigError, RankwiseError
from rankwise.base.units import SECOND
from rankwise.cli.main import CONTEXT_SETTINGS
from rankwise.cli.node_flags import NodeCounts, node_counts
from rankwise.cli.options import complete_file
from rankwise.drivers.real.stores.opening import TOKEN_VARIABLE

if TYPE_CHECKING:
    from rankwise.cli.run_job import RunOptions
    from rankwise.launch.manifests.kubernetes import SecretKey

ETCD_IMAGE = "quay.io/coreos/etcd:v3.5.21"
HEALTH_PORT = 8080
GRACE_S = 30
"""What `--shutdown-timeout` is by default."""
NAME_LENGTH_MAX = 40
"""Names of pods are longer, and may have 63 characters."""
NODES_MAX = 10_000

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"(\d+(\.\d*)?|\.\d+)(m|k|[KMGTPE]i?)?")
_DECIDED_HERE = {
    "nnodes": "give --nodes before the --",
    "rdzv_endpoint": "give --no-etcd --rdzv-endpoint before the --",
    "rdzv_id": "every Job gets a name of its own",
    "standalone": "a job of one node needs no manifest",
    "node_rank": "ranks are agreed upon when the pods meet",
    "master_addr": "the pods agree upon it when they meet",
    "local_addr": "every pod says its own address",
    "node_topology": "every pod names its machine",
}
"""Options of `rankwise run` that the manifest gives itself."""


@click.group("manifest", context_settings=CONTEXT_SETTINGS)
def manifest() -> None:
    """Write manifests for schedulers that start the nodes of a job."""


class _WithExample(click.Command):
    """A command whose epilog is an example, which its complaint about a missing word shows, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Say what could be written where something has to be."""
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            option = error.param if isinstance(error.param, click.Option) else None
            missing = "program" if option is None else option.opts[-1]
            raise click.UsageError(f"no {missing} given; {self.epilog}", ctx) from None


_OUTPUT = click.option(
    "-o",
    "--output",
    metavar="FILE",
    shell_complete=complete_file,
    help="Where to write. [default: stdout]",
)
_RUN_WORDS = click.argument(
    "words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="RUN_WORDS..."
)


@manifest.command(
    "kubernetes",
    cls=_WithExample,
    epilog="for example: rankwise manifest kubernetes --image example/train:1 -- train.py",
    context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
    options_metavar="--image IMAGE [OPTIONS] --",
)
@click.option(
    "--image", metavar="IMAGE", required=True, help="Container image with rankwise and the program."
)
@click.option(
    "--name", metavar="NAME", help="Name of the JobSet. [default: made from the program's name]"
)
@click.option("--namespace", metavar="NAME", help="Namespace. [default: kubectl's current one]")
@click.option(
    "--nodes",
    metavar="N|MIN:MAX",
    default="2",
    show_default=True,
    help="Number of pods: the job runs on at least MIN of them, and on up to MAX.",
)
@click.option(
    "--nproc-per-node",
    metavar="N|auto|gpu|…",
    help="Workers per pod. [default: one per GPU of --gpus, else 1]",
)
@click.option(
    "--gpus",
    metavar="N|RESOURCE=N",
    help="GPUs per pod; plain numbers mean nvidia.com/gpu, others are named: amd.com/gpu=8.",
)
@click.option("--cpu", metavar="QUANTITY", help="CPUs per pod, such as 4 or 500m.")
@click.option("--memory", metavar="QUANTITY", help="Memory per pod, such as 16Gi.")
@click.option(
    "--env", metavar="NAME=VALUE", multiple=True, help="A variable of the pods. Repeatable."
)
@click.option(
    "--secret-env",
    metavar="NAME=SECRET/KEY",
    multiple=True,
    help="A variable of the pods from a Secret that exists, such as RANKWISE_ETCD_PASSWORD.",
)
@click.option("--one-per-host", is_flag=True, help="Never put two pods on one machine.")
@click.option(
    "--etcd-image", metavar="IMAGE", default=ETCD_IMAGE, show_default=True, help="Image of etcd."
)
@click.option(
    "--etcd-storage",
    metavar="QUANTITY",
    default="1Gi",
    show_default=True,
    help="Disk of each of the three members.",
)
@click.option("--no-etcd", is_flag=True, help="The pods meet at --rdzv-endpoint instead.")
@click.option(
    "--rdzv-endpoint",
    metavar="HOST[:PORT],...",
    help="With --no-etcd: the address of the store, an etcd unless --rdzv-backend names another.",
)
@click.option(
    "--patch",
    metavar="FILE",
    multiple=True,
    shell_complete=complete_file,
    help="Strategic merge patches in YAML, one document per object, as for tolerations; - is "
    "standard input. May be given several times. See docs.",
)
@_OUTPUT
@_RUN_WORDS
def kubernetes(
    *,
    image: str,
    name: str | None,
    namespace: str | None,
    nodes: str,
    nproc_per_node: str | None,
    gpus: str | None,
    cpu: str | None,
    memory: str | None,
    env: tuple[str, ...],
    secret_env: tuple[str, ...],
    one_per_host: bool,
    etcd_image: str,
    etcd_storage: str,
    no_etcd: bool,
    rdzv_endpoint: str | None,
    patch: tuple[str, ...],
    output: str | None,
    words: tuple[str, ...],
) -> None:
    """Write a JobSet that runs `rankwise run RUN_WORDS...` on pods, and an etcd for it.

    RUN_WORDS are what would follow `rankwise run`: options, the program, its arguments.
    """
    from rankwise.cli.run import parse  # noqa: PLC0415  # not needed for --help
    from rankwise.launch.manifests.kubernetes import Etcd, KubernetesJob, etcd_endpoints, manifests  # noqa: PLC0415  # the same
    from rankwise.launch.manifests.patches import patches_in  # noqa: PLC0415  # the same

    options = parse(words, {})
    counts = _node_counts(nodes)
    name = _checked_name(name or _name_from(options), "--name")
    if namespace is not None:
        _checked_name(namespace, "--namespace")
    if no_etcd != (rdzv_endpoint is not None):
        raise ConfigError("--no-etcd and --rdzv-endpoint go together: the nodes have to meet")
    _check_words(options, brings_etcd=not no_etcd)
    if nproc_per_node is not None and "nproc_per_node" in options.origins:
        raise ConfigError(
            "--nproc-per-node is given before and after the --", hint="give it once, after the --"
        )
    patches = tuple(each for path in patch for each in patches_in(_read(path), path))
    gpu_resources = _gpu_resources(gpus)
    environment = dict(_variable(text, "--env") for text in env)
    secret_keys = dict(_secret(text) for text in secret_env)
    job = KubernetesJob(
        name=name,
        namespace=namespace,
        image=_nonempty(image, "--image"),
        nodes_min=counts.least,
        nodes_max=counts.most,
        nproc=None
        if "nproc_per_node" in options.origins
        else nproc_per_node or next(iter(gpu_resources.values()), "1"),
        backend=options.rdzv_backend if "rdzv_backend" in options.origins else "etcd",
        endpoint=rdzv_endpoint or etcd_endpoints(name),
        etcd=None
        if no_etcd
        else Etcd(
            image=_nonempty(etcd_image, "--etcd-image"),
            storage=_quantity(etcd_storage, "--etcd-storage"),
        ),
        words=words,
        grace_s=_grace_s(options),
        health_port=HEALTH_PORT if options.health_port is None else options.health_port,
        leaves_alone="on_preemption" not in options.origins or options.on_preemption == "leave",
        resources=_resources(cpu, memory) | gpu_resources,
        environment=environment,
        secrets=secret_keys,
        one_per_host=one_per_host,
        token=_new_token(environment, secret_keys),
    )
    _write(manifests(job, patches), output, mode=0o600 if job.token else 0o666)


@manifest.command("own", hidden=True, context_settings=CONTEXT_SETTINGS)
@click.argument("job_set", metavar="JOBSET")
@click.argument("objects", metavar="OBJECT...", nargs=-1, required=True)
def own(job_set: str, objects: tuple[str, ...]) -> None:
    """Make JOBSET the owner of OBJECTS, from a pod of it: the first container of each does.

    A refusal is a line and exit code 0: the run does not depend on it.
    """
    from rankwise.launch.manifests.ownership import ApiServer, OwnedObject  # noqa: PLC0415  # rare
    from rankwise.launch.manifests.ownership import own as make_owner  # noqa: PLC0415  # the same

    owned = [OwnedObject.parsed(text) for text in objects]
    try:
        host, port = (os.environ[f"KUBERNETES_SERVICE_{part}"] for part in ("HOST", "PORT"))
    except KeyError as error:
        raise ConfigError(
            f"{error.args[0]} is not set, so this is not a pod of a Kubernetes cluster"
        ) from None
    try:
        api = ApiServer(host, int(port))
        try:
            make_owner(api, job_set, owned)
        finally:
            api.close()
    except RankwiseError as error:
        click.echo(
            f"rankwise: JobSet {job_set} does not own its etcd: {error}; after the run, delete "
            "the manifest's objects (kubectl delete -f)",
            err=True,
        )


@manifest.command(
    "slurm",
    cls=_WithExample,
    epilog="for example: rankwise manifest slurm --nodes 2 -- train.py",
    context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
    options_metavar="--nodes N [OPTIONS] --",
)
@click.option("--nodes", metavar="N", type=click.IntRange(1), required=True, help="Nodes.")
@click.option(
    "--sbatch",
    metavar="OPTION",
    multiple=True,
    help="One more option of sbatch, such as --gpus-per-node=8. Repeatable.",
)
@_OUTPUT
@_RUN_WORDS
def slurm(
    *, nodes: int, sbatch: tuple[str, ...], output: str | None, words: tuple[str, ...]
) -> None:
    """Write a batch script that runs `rankwise run RUN_WORDS...` on the nodes of a SLURM job.

    RUN_WORDS are what would follow `rankwise run`: options, the program, its arguments.
    """
    from rankwise.cli.run import parse  # noqa: PLC0415  # not needed for --help
    from rankwise.launch.manifests.slurm import SlurmJob, batch_script  # noqa: PLC0415  # the same

    parse(words, {})
    for option in sbatch:
        _check_directive(option)
    _write(batch_script(SlurmJob(nodes=nodes, directives=sbatch, words=words)), output)


def _check_directive(option: str) -> None:
    if not option.startswith("-") or "\n" in option:
        raise ConfigError(f"--sbatch is {option!r}, expected an option of sbatch, as --time=60")
    name = option.partition("=")[0]
    if name in ("--nodes", "-N", "--ntasks-per-node", "--ntasks", "-n", "--export"):
        raise ConfigError(
            f"--sbatch is {option!r}, and the script says that itself",
            hint="--nodes before the -- says how many; rankwise starts the workers of a node",
        )


def _new_token(environment: Mapping[str, str], secret_names: Collection[str]) -> str | None:
    """A token for the pods, unless they are told one."""
    if TOKEN_VARIABLE in environment or TOKEN_VARIABLE in secret_names:
        return None
    return secrets.token_hex(16)


def _node_counts(nodes: str) -> NodeCounts:
    counts = node_counts(nodes, 0, label="--nodes")
    if not 2 <= counts.most <= NODES_MAX:
        raise ConfigError(
            f"--nodes is {nodes!r}, expected 2 to {NODES_MAX} pods",
            hint="one pod needs no rendezvous: a plain Job with `rankwise run` does",
        )
    return counts


def _check_words(options: "RunOptions", *, brings_etcd: bool) -> None:
    """Refuse what would contradict the manifest."""
    for option, hint in _DECIDED_HERE.items():
        if option in options.origins:
            raise ConfigError(
                f"{options.label(option)} is given after the --, but the manifest sets it itself",
                hint=hint,
            )
    if brings_etcd and "rdzv_backend" in options.origins and options.rdzv_backend != "etcd":
        raise ConfigError(
            f"{options.label('rdzv_backend')} is {options.rdzv_backend!r}, but the manifest brings "
            "an etcd",
            hint="give --no-etcd --rdzv-endpoint HOST:PORT before the --",
        )
    if options.rdzv_backend == "static" and "rdzv_backend" in options.origins:
        raise ConfigError(
            "--rdzv-backend is 'static', and pods that are replaced have no fixed ranks",
            hint="name etcd, c10d or embedded",
        )
    if options.health_port is not None and not 0 < options.health_port <= 65535:
        raise ConfigError(f"--health-port is {options.health_port}, expected 1 to 65535")


def _name_from(options: "RunOptions") -> str:
    """A name such as `train-digits`, from the program's."""
    script = options.training_script
    stem = script if options.module else PurePosixPath(script).stem
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return name[:NAME_LENGTH_MAX].strip("-") if name[:1].isalpha() else "rankwise"


def _checked_name(name: str, label: str) -> str:
    if _NAME.fullmatch(name) is None or len(name) > NAME_LENGTH_MAX:
        raise ConfigError(
            f"{label} is {name!r}, expected lower-case letters, digits and dashes, a letter first, "
            f"at most {NAME_LENGTH_MAX} of them"
        )
    return name


def _nonempty(text: str, label: str) -> str:
    if not text or text != "".join(text.split()):
        raise ConfigError(f"{label} is {text!r}, expected an image such as registry/name:tag")
    return text


def _gpu_resources(gpus: str | None) -> dict[str, str]:
    if gpus is None:
        return {}
    resource, _, count = gpus.rpartition("=")
    if not count.isdecimal() or int(count) == 0:
        raise ConfigError(f"--gpus is {gpus!r}, expected a number or RESOURCE=NUMBER")
    return {resource or "nvidia.com/gpu": count}


def _resources(cpu: str | None, memory: str | None) -> dict[str, str]:
    given = {"cpu": cpu, "memory": memory}
    return {name: _quantity(text, f"--{name}") for name, text in given.items() if text is not None}


def _quantity(text: str, label: str) -> str:
    if _QUANTITY.fullmatch(text) is None:
        raise ConfigError(f"{label} is {text!r}, expected a quantity such as 4, 500m, 16Gi")
    return text


def _variable(text: str, label: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or _VARIABLE.fullmatch(name) is None:
        raise ConfigError(f"{label} is {text!r}, expected NAME=VALUE")
    return name, value


def _secret(text: str) -> "tuple[str, SecretKey]":
    from rankwise.launch.manifests.kubernetes import SecretKey  # noqa: PLC0415  # not for --help

    name, where = _variable(text, "--secret-env")
    secret, _, key = where.partition("/")
    if not secret or not key:
        raise ConfigError(f"--secret-env is {text!r}, expected NAME=SECRET/KEY")
    return name, SecretKey(secret, key)


def _read(patch: str) -> str:
    try:
        if patch == "-":
            return sys.stdin.read()
        with open(patch, encoding="utf-8") as file:  # noqa: PTH123  # pathlib costs ms
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--patch {patch!r} cannot be read: {reason}") from error


def _grace_s(options: "RunOptions") -> int:
    if options.shutdown_timeout is None:
        return GRACE_S
    return -(-options.shutdown_timeout // SECOND)


def _write(text: str, output: str | None, mode: int = 0o666) -> None:
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        # As `open` does it, but for this user alone where there is a secret in it.
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123  # pathlib costs ms
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--output {output!r} cannot be written: {error.strerror}") from error
