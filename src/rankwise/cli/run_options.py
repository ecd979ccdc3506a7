"""The table of `rankwise run`'s options: torchrun's, and a few of our own.

Names, types and meaning of torchrun's options are torchrun's. Those that decide nothing when there
is one node, or when nothing is polled, are accepted so that existing command lines keep working.
"""

from typing import Any

import click

from rankwise.cli.options import (
    COMMA_LIST,
    DURATION,
    ELSEWHERE,
    PRESETS_IN_WORDS,
    SIZE,
    OptionWithVariable,
    complete_directory,
    complete_file,
)

PROGRAM = "Program"
RANKS = "Ranks"
LOGS = "Logs"
FAILURES = "Failure handling"
RENDEZVOUS = "Rendezvous (several nodes)"
REHEARSAL = "Simulated ranks (--on sim)"
COMPATIBILITY = "Compatibility"

GROUPS = (PROGRAM, RANKS, LOGS, FAILURES, RENDEZVOUS, REHEARSAL, COMPATIBILITY)

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
        help="SCRIPT is an executable of any kind, and is run without Python.",
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
        default_shown="the script's own top-level imports from outside its folder",
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
        default_shown="a temporary directory, kept if log files were requested",
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
        "--log-size",
        group=LOGS,
        metavar="SIZE",
        type=SIZE,
        default=None,
        default_shown="no limit",
        is_torchrun=False,
        help="Limit of a rank's log file (64K, 100M, 2G): a full one is renamed, stdout.log to "
        "stdout.log.1, in place of the one before, and another is begun.",
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
        help="Prefix of each line on the console; ${role_name}, ${local_rank}, ${rank}, ${date} "
        "and ${time} are filled in. With ${time}, rankwise's own lines have it as well.",
    ),
    OptionWithVariable(
        ["--log-format"],
        group=LOGS,
        type=click.Choice(["text", "json"]),
        default="text",
        is_torchrun=False,
        help="Format of rankwise's own messages on stderr: text, or one JSON object for each "
        "notice, round, failure and restart. Output of workers is not changed.",
    ),
    _flag(
        "--no-prefix",
        group=LOGS,
        is_torchrun=False,
        help="Lines on the console have no prefix.",
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
    _value(
        "--report",
        group=LOGS,
        metavar="FILE",
        default=None,
        default_shown="none",
        shell_complete=complete_file,
        is_torchrun=False,
        help="Write one HTML page when the run is over: a timeline of the ranks, who made others "
        "wait, failures, CPU and memory over time; of simulated ranks, the prediction. Of several "
        "nodes, that of rank 0 writes it; `rankwise report` joins their journals.",
    ),
    _value(
        "--trace",
        group=LOGS,
        metavar="FILE",
        default=None,
        default_shown="none",
        shell_complete=complete_file,
        is_torchrun=False,
        help="Write a timeline of all ranks for Perfetto; compressed if FILE ends in .gz. As for "
        "--report, that of several nodes is made of their journals.",
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
        "is tried.",
    ),
    _flag(
        "--retry-startup-errors",
        group=FAILURES,
        is_torchrun=False,
        help="Use restarts also when a worker cannot be started.",
    ),
    _value(
        "--max-no-progress",
        group=FAILURES,
        metavar="N",
        type=click.INT,
        default=None,
        default_shown="no limit",
        is_torchrun=False,
        help="Give up after N failures in a row without progress: no step farther than before "
        "(rankwise.should_stop counts them), or no run of five minutes.",
    ),
    _value(
        "--max-node-failures",
        group=FAILURES,
        metavar="N",
        type=click.INT,
        default=None,
        default_shown="no limit",
        is_torchrun=False,
        help="Leave out a node on which N failures began, if enough others remain; one node alone "
        "gives up.",
    ),
    _value(
        "--hang-timeout",
        group=FAILURES,
        metavar="SECONDS",
        type=DURATION,
        default=None,
        default_shown="never",
        is_torchrun=False,
        help="If no worker makes progress for this time (30s, 5m), print every rank's stack and "
        "count it as a failure. Progress is: another collective call, section or step; and outside "
        "of a call, to compute, read or write, also in threads and child processes. Output is "
        "none.",
    ),
    _value(
        "--on-failure",
        group=FAILURES,
        metavar="COMMAND",
        default=None,
        default_shown="none",
        is_torchrun=False,
        help="A shell command to run when ranks have failed, also before a restart, with the "
        "failures and the report as JSON on its stdin. Of several nodes the one with the root "
        "cause runs it.",
    ),
    _value(
        "--timeout",
        group=FAILURES,
        metavar="SECONDS",
        type=DURATION,
        default=None,
        default_shown="no limit",
        is_torchrun=False,
        help="Stop the run when it has taken this long (90m, 8h), restarts included: ranks are "
        "told to stop as by SIGTERM, and the exit code is 124. On several nodes the first one "
        "whose time is over stops all.",
    ),
    _flag(
        "--no-ledger",
        group=FAILURES,
        is_torchrun=False,
        help="Do not enter the ranks' collective calls in memory, from which the failure report "
        "tells who kept the others waiting.",
    ),
    _flag(
        "--keep-children",
        group=FAILURES,
        is_torchrun=False,
        help="Let processes live on that ranks have left running, such as an upload, when all "
        "ranks have ended well. They are killed otherwise, as they are after a failure.",
    ),
    _value(
        "--shutdown-timeout",
        group=FAILURES,
        metavar="SECONDS",
        type=DURATION,
        default=None,
        default_shown="30s",
        variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
        help="Time that workers have to end after they are told to stop, before they are killed.",
    ),
    _value(
        "--signals-to-handle",
        group=FAILURES,
        metavar="NAME,...",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        help="Signals that end the run gracefully; a second one kills the workers immediately.",
    ),
    _value(
        "--nnodes",
        group=RENDEZVOUS,
        metavar="N|MIN:MAX",
        default="1:1",
        help="Number of nodes: the job runs on at least MIN nodes, and on up to MAX if they are "
        "available.",
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
        help="Run on this node alone; the --rdzv options are ignored.",
    ),
    _value(
        "--master-addr",
        group=RENDEZVOUS,
        metavar="HOST",
        default="127.0.0.1",
        help="Address on which rank 0 listens; with --rdzv-backend static also the rendezvous of "
        "the nodes.",
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
        default_shown="a short random name; none on several nodes, and with etcd it must be given",
        help="The run's name, the same on all its nodes; shown by `rankwise ps` and used for log "
        "directories.",
    ),
    _flag(
        "--rdzv-own-etcd",
        group=RENDEZVOUS,
        help="Start an etcd of three members for this run, on the nodes that --rdzv-endpoint names "
        "(under SLURM: the first three), with the etcd in PATH. The run survives the loss of any "
        "of them.",
        is_torchrun=False,
    ),
    _flag(
        "--rdzv-once",
        group=RENDEZVOUS,
        help="Use the run's name once: a node that starts after the end of the run reports how it "
        "ended, and does not start another run of that name.",
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
        help="Address of the rendezvous; with the static backend it means --master-addr and "
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
        help="Address under which other nodes reach this node, or the name of its interface.",
    ),
    _value(
        "--spares",
        group=RENDEZVOUS,
        metavar="N",
        type=click.INT,
        default=0,
        is_torchrun=False,
        help="Number of spare nodes: they wait, and replace a node that is lost.",
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
        default_shown="disk, memory and clock, on several nodes",
        is_torchrun=False,
        help="A command that must succeed before this node takes part; may be given several times.",
    ),
    OptionWithVariable(
        ["--on-preemption"],
        group=RENDEZVOUS,
        type=click.Choice(["stop", "leave"]),
        default="stop",
        is_torchrun=False,
        help="Effect of a signal to one of several nodes: stop the whole job at one step, or leave "
        "the job while the other nodes go on.",
    ),
    OptionWithVariable(
        ["--on"],
        group=RENDEZVOUS,
        type=ELSEWHERE,
        default=None,
        default_shown="this machine is one of the nodes",
        is_torchrun=False,
        help="Run elsewhere: ray starts an agent on each of --nnodes nodes of a Ray cluster, in a "
        "placement group (needs the extra: pip install 'rankwise[ray]'); sim simulates --nnodes "
        "times --nproc-per-node ranks in one process, in virtual time, on nodes that come and go "
        "if --nnodes is MIN:MAX; sim:MACHINE, a preset "
        f"({PRESETS_IN_WORDS}) or a topology file, also predicts how long they take.",
    ),
    _flag(
        "--virtual-clock",
        group=REHEARSAL,
        is_torchrun=False,
        help="Python's time functions and CUDA events show ranks the virtual time only.",
    ),
    _value(
        "--ray-resources",
        group=RENDEZVOUS,
        metavar="NAME=N,...",
        default="",
        default_shown="a CPU per worker; all GPUs of a node where --nproc-per-node is gpu or auto",
        is_torchrun=False,
        help="Resources that each agent reserves with --on ray, such as CPU=16,GPU=8.",
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
    OptionWithVariable(
        ["--schedule"],
        group=REHEARSAL,
        type=click.Choice(["queue", "random"]),
        default="queue",
        is_torchrun=False,
        help="Which rank runs next, and which message is received first: in the order in which "
        "they are ready, or at random from --seed.",
    ),
    _value(
        "--seed",
        group=REHEARSAL,
        metavar="N",
        type=click.INT,
        default=0,
        is_torchrun=False,
        help="Seed of everything random: --schedule random, --explore, and random states that the "
        "program does not seed.",
    ),
    _value(
        "--explore",
        group=REHEARSAL,
        metavar="N",
        type=click.IntRange(1),
        default=None,
        default_shown="one run",
        is_torchrun=False,
        help="Run the program with N different schedules, or with all if there are fewer. Its "
        "output is not shown; a failure is shown with the command that replays it.",
    ),
    _value(
        "--replay",
        group=REHEARSAL,
        metavar="FILE",
        default=None,
        default_shown="none",
        is_torchrun=False,
        help="Run with the schedule that --explore has written to FILE.",
    ),
    OptionWithVariable(
        ["--device"],
        group=REHEARSAL,
        type=click.Choice(["cpu", "cuda"]),
        default="cpu",
        is_torchrun=False,
        help="Device of the ranks: cuda models a CUDA device for each rank on the CPU, for PyTorch "
        "scripts that need one.",
    ),
    _value(
        "--import-per-rank",
        group=REHEARSAL,
        metavar="PACKAGE",
        multiple=True,
        default=(),
        default_shown="accelerate, megatron",
        is_torchrun=False,
        help="An installed package that simulated ranks do not share, since it keeps the rank's "
        "state in globals. May be given several times.",
    ),
    _value(
        "--faults",
        group=REHEARSAL,
        metavar="FAULT|PLAN.yaml",
        multiple=True,
        default=(),
        default_shown="none",
        is_torchrun=False,
        help="Faults of ranks and nodes, such as kill:rank=3@collective=9, slow:rank=2,by=10ms or "
        "kill:node=1,at=10s,back_after=30s; docs/howto/faults.md has them all. May be given "
        "several times.",
    ),
    _value(
        "--health-host",
        group=RENDEZVOUS,
        metavar="ADDRESS",
        default=None,
        default_shown="this node's, as the others reach it",
        is_torchrun=False,
        help="The address that --health-port listens on; 0.0.0.0 for all. With "
        "RANKWISE_HEALTH_TOKEN in the environment, requests must have it (Authorization: Bearer).",
    ),
    _value(
        "--monitor-interval",
        group=COMPATIBILITY,
        metavar="SECONDS",
        type=click.FLOAT,
        default=0.1,
        help="Accepted and without effect: rankwise does not poll workers.",
    ),
    _value(
        "--event-log-handler",
        group=COMPATIBILITY,
        metavar="NAME",
        default="null",
        help="Handler of rankwise.compat.torch.elastic.events that gets the run's events: null, "
        "console, or the name of a plug-in.",
    ),
)
