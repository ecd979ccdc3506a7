"""From the options of `rankwise run --on ray` to a job on a Ray cluster.

Only what concerns the cluster is read here; all other words are the agents' own, and checked by
them: the program may exist on the nodes alone.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rankwise.base.errors import ConfigError
from rankwise.base.units import SECOND, Duration
from rankwise.cli.node_flags import check_rendezvous, node_counts, parse_settings
from rankwise.cli.run_names import random_run_name
from rankwise.launch.limits import check_run_id
from rankwise.launch.on_ray.job import RayJob
from rankwise.launch.options import PREFIX_OF_NODES, RAY

if TYPE_CHECKING:
    from rankwise.cli.run_job import RunOptions

JOIN_TIMEOUT = Duration(600 * SECOND)
"""How long to wait for nodes, unless `--rdzv-conf join_timeout` says so."""
_DECIDED_HERE = ("--on", "--ray-resources", "--nnodes", "--rdzv-id", "--rdzv-backend")
_ALSO_DECIDED_HERE = ("--rdzv-endpoint", "--rdzv-conf")


def run_elsewhere(options: "RunOptions", words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run what the options ask for on the cluster that they name; returns the exit code.

    Args:
        options: what the words and the environment say.
        words: the words in strict spelling.
        environ: the environment, parts of which the agents get.

    Raises:
        ConfigError: a value cannot be used, Ray is missing, or there is no cluster.
    """
    job = ray_job(options, words)
    from rankwise.launch.on_ray.driver import run_on_ray  # noqa: PLC0415  # after all checks

    return run_on_ray(job, environ)


def ray_job(options: "RunOptions", words: Sequence[str]) -> RayJob:
    """Describe the job.

    Raises:
        ConfigError: a value cannot be used.
    """
    if options.training_script == "-":
        raise ConfigError(
            "script - is standard input, which agents on other machines do not have",
            hint="write the program to a file that all of them can read",
        )
    counts = node_counts(options.nnodes, 0, label=options.label("nnodes"))
    options.refuse_with(RAY)
    names_backend = "rdzv_backend" in options.origins
    if names_backend:
        check_rendezvous(options.rdzv_backend, options.rdzv_conf)
        if options.rdzv_backend == "static":
            raise ConfigError(
                "--rdzv-backend is 'static', and agents on Ray have no fixed ranks",
                hint="leave it out, or name etcd",
            )
    needs_endpoint = names_backend and options.rdzv_backend != "embedded"
    if needs_endpoint != bool(options.rdzv_endpoint):
        raise ConfigError(
            "with --on ray, --rdzv-endpoint and --rdzv-backend go together",
            hint="leave both out, and the nodes meet in a store in this process",
        )
    run_id = random_run_name() if options.rdzv_id == "none" else options.rdzv_id
    check_run_id(run_id, options.label("rdzv_id"))
    return RayJob(
        run_id=run_id,
        nodes_min=counts.least,
        nodes_max=counts.most,
        words=_words_of_agents(options, words),
        resources=_resources(options),
        backend=options.rdzv_backend if needs_endpoint else None,
        endpoint=options.rdzv_endpoint or None,
        settings=options.rdzv_conf,
        patience=_patience(options),
        is_quiet=options.quiet,
    )


def _words_of_agents(options: "RunOptions", words: Sequence[str]) -> tuple[str, ...]:
    end = list(words).index("--")
    own = (*_DECIDED_HERE, *_ALSO_DECIDED_HERE)
    kept = [word for word in words[:end] if word.partition("=")[0] not in own]
    if not {"log_prefix", "no_prefix"} & options.origins.keys():
        kept.append(f"--log-prefix={PREFIX_OF_NODES}")
    return (*kept, *words[end:])


def _resources(options: "RunOptions") -> dict[str, float | None]:
    label, text = options.label("ray_resources"), options.ray_resources
    if not text.strip():
        size = options.nproc_per_node
        if size.isdecimal():
            return {"CPU": float(size)}
        return {"CPU": 1.0, "GPU": None} if size in ("auto", "gpu") else {"CPU": 1.0}
    resources: dict[str, float | None] = {}
    for pair in text.split(","):
        name, _, amount = (part.strip() for part in pair.partition("="))
        try:
            resources[name] = float(amount)
        except ValueError:
            resources[name] = -1.0
        if not name or not 0 <= (resources[name] or 0.0) < 1e6:
            raise ConfigError(
                f"{label}: {pair!r} is not NAME=NUMBER, expected such as CPU=16,GPU=8"
            )
    return resources


def _patience(options: "RunOptions") -> Duration:
    seconds = parse_settings(options.rdzv_conf).get("join_timeout")
    if seconds is None:
        return JOIN_TIMEOUT
    try:
        return Duration(round(float(seconds) * SECOND))
    except (ValueError, OverflowError):
        raise ConfigError(f"--rdzv-conf: join_timeout is {seconds!r}, expected seconds") from None
