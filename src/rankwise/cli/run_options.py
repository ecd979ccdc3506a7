"""The table of `rankwise run`'s options: torchrun's, and a few of our own.

Names, types and meaning of torchrun's options are torchrun's. Those that decide nothing when there
is one node, or when nothing is polled, are accepted so that existing command lines keep working.
"""

from typing import Any

import click

from rankwise.cli.options import (
    COMMA_LIST,
    DURATION,
    OptionWithVariable,
    complete_directory,
)

PROGRAM = "Program"
RANKS = "Ranks"
LOGS = "Logs"
FAILURES = "Failure handling"
RENDEZVOUS = "Rendezvous (several nodes)"
COMPATIBILITY = "Compatibility"

GROUPS = (PROGRAM, RANKS, LOGS, FAILURES, RENDEZVOUS, COMPATIBILITY)

START_METHODS = ["subprocess", "spawn", "forkserver", "fork"]
BINDINGS = ["node", "socket", "exclusive", "core-complex"]


def _flag(*names: str, group: str, help: str, is_torchrun: bool = True) -> OptionWithVariable:  # noqa: A002  # click's word
    return OptionWithVariable(
        names, group=group, help=help, is_flag=True, default=False, is_torchrun=is_torchrun
    )


def _value(*names: str, group: str, metavar: str, **attributes: Any) -> OptionWithVariable:
    return OptionWithVariable(names, group=group, metavar=metavar, **attributes)


OPTIONS: tuple[OptionWithVariable, ...] = (
    _flag(
        "-m",
        "--module",
        group=PROGRAM,
        help="SCRIPT is the name of a Python module, run as `python -m` does.",
    ),
    _flag(
        "--no-python",
        group=PROGRAM,
        help="SCRIPT is a program of any kind and is executed itself, not given to Python.",
    ),
    _flag(
        "--run-path",
        group=PROGRAM,
        help="Run SCRIPT by runpy.run_path in a worker that is a Python function; wins over "
        "--no-python and --module.",
    ),
    OptionWithVariable(
        ["--start-method"],
        group=PROGRAM,
        type=click.Choice(START_METHODS),
        default="subprocess",
        help="How workers are made. spawn means the same as subprocess for scripts. forkserver "
        "imports once what the workers need and forks them, which is fastest; fork means "
        "forkserver too, since forking a process that has threads is not safe.",
    ),
    _value(
        "--preload",
        group=PROGRAM,
        metavar="MODULE,...",
        type=COMMA_LIST,
        default=None,
        default_shown="the script's own top-level imports that lie outside its folder",
        is_torchrun=False,
        help="Modules that the fork server imports before it forks. It looks where the workers "
        "look: first beside the script, or with -m in the working directory.",
    ),
    _value(
        "--nproc-per-node",
        group=RANKS,
        metavar="N|auto|cpu|gpu|xpu|NAME",
        default="1",
        help="Workers on this node: a number, or one per CPU or device; auto counts GPUs, and "
        "CPUs where there is none. At most 4096.",
    ),
    _value("--role", group=RANKS, metavar="NAME", default="default", help="The workers' role."),
    OptionWithVariable(
        ["--numa-binding"],
        group=RANKS,
        type=click.Choice(BINDINGS),
        default=None,
        default_shown="ranks are not bound",
        help="Bind each rank to CPUs: those of the NUMA node or socket of its GPU, an exclusive "
        "share of the node's cores, or one last-level cache. Ranks without GPU are spread over "
        "the nodes.",
    ),
    _flag(
        "--virtual-local-rank",
        group=RANKS,
        help="Every worker sees LOCAL_RANK=0 and one device in CUDA_VISIBLE_DEVICES.",
    ),
    _value(
        "--log-dir",
        group=LOGS,
        metavar="DIR",
        default=None,
        default_shown="a temporary directory, kept when log files were asked for",
        shell_complete=complete_directory,
        help="Where log files go; each run makes a directory of its own in it.",
    ),
    _value(
        "-r",
        "--redirects",
        group=LOGS,
        metavar="STREAMS",
        default="0",
        help="Write streams to files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; "
        "or per local rank, as in 0:3,1:2.",
    ),
    _value(
        "-t",
        "--tee",
        group=LOGS,
        metavar="STREAMS",
        default="0",
        help="Write streams to files and to the console; values as for --redirects.",
    ),
    _value(
        "--local-ranks-filter",
        group=LOGS,
        metavar="RANK,...",
        default="",
        default_shown="all",
        help="Local ranks whose output reaches the console; files are not affected.",
    ),
    _value(
        "--duplicate-stdout-filters",
        group=LOGS,
        metavar="TEXT,...",
        type=COMMA_LIST,
        default=[],
        default_shown="none",
        help="Write stdout lines that contain one of these texts to filtered_stdout.log too; ,, "
        "stands for a comma.",
    ),
    _value(
        "--duplicate-stderr-filters",
        group=LOGS,
        metavar="TEXT,...",
        type=COMMA_LIST,
        default=[],
        default_shown="none",
        help="The same for stderr and filtered_stderr.log.",
    ),
    _value(
        "--log-prefix",
        group=LOGS,
        metavar="TEMPLATE",
        default=None,
        default_shown="[${role_name}${local_rank}]:",
        variables=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",),
        is_torchrun=False,
        help="What stands before each line on the console; ${role_name}, ${local_rank} and "
        "${rank} are filled in.",
    ),
    _flag(
        "--no-prefix",
        group=LOGS,
        is_torchrun=False,
        help="Nothing stands before the lines on the console.",
    ),
    _value(
        "--logs-specs",
        group=LOGS,
        metavar="NAME",
        default=None,
        default_shown="rankwise's own layout",
        help="An installed plug-in of the entry-point group torchrun.logs_specs that decides "
        "where logs go.",
    ),
    _flag(
        "--quiet",
        group=LOGS,
        is_torchrun=False,
        help="rankwise itself prints nothing: no notices, no report of failures.",
    ),
    _value(
        "--max-restarts",
        group=FAILURES,
        metavar="N",
        type=click.INT,
        default=0,
        help="How many times all workers are started again after one has failed.",
    ),
    _value(
        "--restart-backoff",
        group=FAILURES,
        metavar="SECONDS",
        type=DURATION,
        default=None,
        default_shown="1s",
        is_torchrun=False,
        help="Pause before the second restart, doubling up to a minute; the first is immediate.",
    ),
    _value(
        "--no-retry",
        group=FAILURES,
        metavar="NAME|CODE,...",
        type=COMMA_LIST,
        default=[],
        default_shown="none",
        is_torchrun=False,
        help="Exceptions (ValueError, mypackage.BadConfig) and exit codes after which no restart "
        "is tried, on several nodes.",
    ),
    _flag(
        "--retry-startup-errors",
        group=FAILURES,
        is_torchrun=False,
        help="Spend restarts also on workers that cannot even be started, on several nodes.",
    ),
    _value(
        "--max-no-progress",
        group=FAILURES,
        metavar="N",
        type=click.INT,
        default=None,
        default_shown="no limit",
        is_torchrun=False,
        help="Give up after N failures in a row without progress, on several nodes: no step "
        "farther than before (rankwise.should_stop counts them), or no run of five minutes.",
    ),
    _value(
        "--max-node-failures",
        group=FAILURES,
        metavar="N",
        type=click.INT,
        default=None,
        default_shown="no limit",
        is_torchrun=False,
        help="Leave out a node on which N failures began, if enough others remain.",
    ),
    _value(
        "--hang-timeout",
        group=FAILURES,
        metavar="SECONDS",
        type=DURATION,
        default=None,
        default_shown="never",
        is_torchrun=False,
        help="When no worker has shown a sign of life for so long (30s, 5m), print every rank's "
        "stack and count it as a failure.",
    ),
    _value(
        "--shutdown-timeout",
        group=FAILURES,
        metavar="SECONDS",
        type=DURATION,
        default=None,
        default_shown="30s",
        variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
        help="How long workers may take to end once told to, before they are killed.",
    ),
    _value(
        "--signals-to-handle",
        group=FAILURES,
        metavar="NAME,...",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        help="Signals that end the run gracefully; a second one kills the workers at once.",
    ),
    _value(
        "--nnodes",
        group=RENDEZVOUS,
        metavar="N|MIN:MAX",
        default="1:1",
        help="Number of nodes: the job runs on at least MIN of them, and on up to MAX while they "
        "are there.",
    ),
    _value(
        "--node-rank",
        group=RENDEZVOUS,
        metavar="N",
        type=click.INT,
        default=0,
        help="This node's number, where --rdzv-backend is static.",
    ),
    _flag(
        "--standalone",
        group=RENDEZVOUS,
        help="One node that needs nobody else, whatever the --rdzv options say.",
    ),
    _value(
        "--master-addr",
        group=RENDEZVOUS,
        metavar="HOST",
        default="127.0.0.1",
        help="Address on which rank 0 listens, and at which nodes meet with --rdzv-backend static.",
    ),
    _value(
        "--master-port",
        group=RENDEZVOUS,
        metavar="PORT",
        type=click.INT,
        default=None,
        default_shown="a free port, reserved for the run; 29500 where nodes meet there",
        help="Port on which rank 0 listens; on several nodes with --rdzv-backend static and no "
        "--rdzv-endpoint, the one at which they meet.",
    ),
    _value(
        "--rdzv-id",
        group=RENDEZVOUS,
        metavar="NAME",
        default="none",
        default_shown="a short random name; none on several nodes",
        help="The run's name, the same on all its nodes; shown by `rankwise ps` and used for log "
        "directories.",
    ),
    _flag(
        "--rdzv-once",
        group=RENDEZVOUS,
        help="The run's name serves once: a node that comes when the run is over is told how it "
        "ended, instead of beginning another run of that name.",
        is_torchrun=False,
    ),
    _value(
        "--rdzv-backend",
        group=RENDEZVOUS,
        metavar="NAME",
        default="static",
        help="Where several nodes meet: static (each has its --node-rank), etcd, c10d (torch's "
        "TCPStore), embedded (a store inside the first agent), or the name of a plug-in.",
    ),
    _value(
        "--rdzv-endpoint",
        group=RENDEZVOUS,
        metavar="HOST[:PORT]",
        default="",
        default_shown="none",
        help="Address of the rendezvous; with the static backend it stands for --master-addr and "
        "--master-port.",
    ),
    _value(
        "--rdzv-conf",
        group=RENDEZVOUS,
        metavar="KEY=VALUE,...",
        default="",
        default_shown="none",
        help="Settings of the rendezvous and its store, such as join_timeout=600, "
        "last_call_timeout=30, lease_ttl=5, cacert=FILE. Without effect on one node.",
    ),
    _value(
        "--local-addr",
        group=RENDEZVOUS,
        metavar="HOST",
        default=None,
        default_shown="the one that packets to the endpoint leave from",
        help="This node's address as the others reach it, or the name of its interface.",
    ),
    _value(
        "--spares",
        group=RENDEZVOUS,
        metavar="N",
        type=click.INT,
        default=0,
        is_torchrun=False,
        help="How many nodes wait in reserve, for when one is lost, rather than run.",
    ),
    _value(
        "--node-topology",
        group=RENDEZVOUS,
        metavar="TEXT",
        default="",
        default_shown="none",
        variables=("SLURM_TOPOLOGY_ADDR",),
        is_torchrun=False,
        help="Where this node is, such as rack7.switch2.node12: nodes get their ranks in this "
        "order, so that neighbours are near each other.",
    ),
    _value(
        "--node-check",
        group=RENDEZVOUS,
        metavar="COMMAND",
        multiple=True,
        default=(),
        default_shown="disk, memory and clock",
        is_torchrun=False,
        help="A command that must succeed before this node takes part; may be given several times.",
    ),
    OptionWithVariable(
        ["--on-preemption"],
        group=RENDEZVOUS,
        type=click.Choice(["stop", "leave"]),
        default="stop",
        is_torchrun=False,
        help="What a signal to one of several nodes means: stop the whole job at one step, or "
        "leave it and let the others go on.",
    ),
    OptionWithVariable(
        ["--on"],
        group=RENDEZVOUS,
        type=click.Choice(["ray"]),
        default=None,
        default_shown="this machine is one of the nodes",
        is_torchrun=False,
        help="Start the agents elsewhere: ray starts one on each of --nnodes nodes of a Ray "
        "cluster, in a placement group (needs the extra: pip install 'rankwise[ray]').",
    ),
    _value(
        "--ray-resources",
        group=RENDEZVOUS,
        metavar="NAME=N,...",
        default="",
        default_shown="a CPU per worker; all GPUs of a node where --nproc-per-node is gpu or auto",
        is_torchrun=False,
        help="What each agent takes of its node with --on ray, such as CPU=16,GPU=8.",
    ),
    _value(
        "--health-port",
        group=RENDEZVOUS,
        metavar="PORT",
        type=click.INT,
        default=None,
        default_shown="none",
        variables=("TORCHELASTIC_HEALTH_CHECK_PORT",),
        is_torchrun=False,
        help="Answer GET /health and GET /metrics (Prometheus) on this port.",
    ),
    _value(
        "--monitor-interval",
        group=COMPATIBILITY,
        metavar="SECONDS",
        type=click.FLOAT,
        default=0.1,
        help="Accepted and without effect: rankwise is told of a worker's end and never polls.",
    ),
    _value(
        "--event-log-handler",
        group=COMPATIBILITY,
        metavar="NAME",
        default="null",
        help="Which handler of rankwise.compat.torch.elastic.events is told what became of the "
        "run: null, console, or one that a plug-in has registered.",
    ),
)
