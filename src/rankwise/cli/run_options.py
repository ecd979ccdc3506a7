"""The table of `rankwise run`'s options: torchrun's, and a few of our own.

Names, types and meaning of torchrun's options are torchrun's. Those that decide nothing when there
is one node, or when nothing is polled, are accepted so that existing command lines keep working.
"""

from collections.abc import Callable
from functools import partial
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


_Option = Callable[[str], OptionWithVariable]
"""Makes an option of the group that it is given."""


def _torchruns(usage: str, help: str, **attributes: Any) -> _Option:  # noqa: A002  # click's word
    """An option of torchrun's: `--name METAVAR`, or a flag where there is neither that nor a type.

    One without a default is None when it is not given; `default_shown` says what that means.
    """
    names, metavar = _names_and_metavar(usage)
    if metavar is None and "type" not in attributes:
        attributes |= {"is_flag": True, "default": False}
    elif "default" not in attributes:
        attributes = {"default": None, "default_shown": "none", **attributes}
    return partial(_made, names, metavar=metavar, help=help, **attributes)


def _ours(usage: str, help: str, **attributes: Any) -> _Option:  # noqa: A002  # the same
    """An option that torchrun does not have."""
    return _torchruns(usage, help, is_torchrun=False, **attributes)


def _names_and_metavar(usage: str) -> tuple[list[str], str | None]:
    *short, last = usage.split(", ")
    long, _, metavar = last.partition(" ")
    return [*short, long], metavar or None


def _made(names: list[str], group: str, **attributes: Any) -> OptionWithVariable:
    return OptionWithVariable(names, group=group, **attributes)


def _group(group: str, *options: _Option) -> tuple[OptionWithVariable, ...]:
    return tuple(option(group) for option in options)


OPTIONS: tuple[OptionWithVariable, ...] = (
    *_group(
        PROGRAM,
        _torchruns(
            "-m, --module", "SCRIPT is the name of a Python module, run as `python -m` does."
        ),
        _torchruns(
            "--no-python", "SCRIPT is an executable of any kind, and is run without Python."
        ),
        _torchruns(
            "--run-path",
            "Run SCRIPT by runpy.run_path in a worker that is a Python function; wins over "
            "--no-python and --module.",
        ),
        _torchruns(
            "--start-method",
            "How workers are made. spawn means the same as subprocess for scripts. forkserver "
            "imports once what the workers need and forks them, which is fastest; fork means "
            "forkserver too, since forking a process that has threads is not safe.",
            type=click.Choice(START_METHODS),
            default="subprocess",
        ),
        _ours(
            "--preload MODULE,...",
            "Modules that the fork server imports before it forks. It looks where the workers "
            "look: first beside the script, or with -m in the working directory.",
            type=COMMA_LIST,
            default_shown="the script's own top-level imports from outside its folder",
        ),
    ),
    *_group(
        RANKS,
        _torchruns(
            "--nproc-per-node N|auto|cpu|gpu|xpu|NAME",
            "Workers on this node: a number, or one per CPU or device; auto counts GPUs, and "
            "CPUs where there is none. A CPU quota counts. At most 4096.",
            default="1",
        ),
        _torchruns("--role NAME", "The workers' role.", default="default"),
        _torchruns(
            "--numa-binding",
            "Bind each rank to CPUs: those of the NUMA node or socket of its GPU, an exclusive "
            "share of the node's cores, or one last-level cache. Ranks without GPU are spread over "
            "the nodes.",
            type=click.Choice(BINDINGS),
            default_shown="ranks are not bound",
        ),
        _torchruns(
            "--virtual-local-rank",
            "Every worker sees LOCAL_RANK=0 and one device in CUDA_VISIBLE_DEVICES.",
        ),
    ),
    *_group(
        LOGS,
        _torchruns(
            "--log-dir DIR",
            "Where log files go; each run makes a directory of its own in it.",
            default_shown="a temporary directory, kept if log files were requested",
            shell_complete=complete_directory,
        ),
        _torchruns(
            "-r, --redirects STREAMS",
            "Write streams to files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; "
            "or per local rank, as in 0:3,1:2.",
            default="0",
        ),
        _torchruns(
            "-t, --tee STREAMS",
            "Write streams to files and to the console; values as for --redirects.",
            default="0",
        ),
        _ours(
            "--log-size SIZE",
            "Limit of a rank's log file (64K, 100M, 2G): a full one is renamed, stdout.log to "
            "stdout.log.1, in place of the one before, and another is begun.",
            type=SIZE,
            default_shown="no limit",
        ),
        _torchruns(
            "--local-ranks-filter RANK,...",
            "Local ranks whose output reaches the console; files are not affected.",
            default="",
            default_shown="all",
        ),
        _torchruns(
            "--duplicate-stdout-filters TEXT,...",
            "Write stdout lines that contain one of these texts to filtered_stdout.log too; ,, "
            "stands for a comma.",
            type=COMMA_LIST,
            default=[],
            default_shown="none",
        ),
        _torchruns(
            "--duplicate-stderr-filters TEXT,...",
            "The same for stderr and filtered_stderr.log.",
            type=COMMA_LIST,
            default=[],
            default_shown="none",
        ),
        _ours(
            "--log-prefix TEMPLATE",
            "Prefix of each line on the console; ${role_name}, ${local_rank}, ${rank}, ${date} "
            "and ${time} are filled in. With ${time}, rankwise's own lines have it as well.",
            default_shown="[${role_name}${local_rank}]:",
            variables=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",),
        ),
        _ours(
            "--log-format",
            "Format of rankwise's own messages on stderr: text, or one JSON object for each "
            "notice, round, failure and restart. Output of workers is not changed.",
            type=click.Choice(["text", "json"]),
            default="text",
        ),
        _ours("--no-prefix", "Lines on the console have no prefix."),
        _torchruns(
            "--logs-specs NAME",
            "An installed plug-in of the entry-point group torchrun.logs_specs that decides "
            "where logs go.",
            default_shown="rankwise's own layout",
        ),
        _ours(
            "--report FILE",
            "Write one HTML page when the run is over: a timeline of the ranks, who made others "
            "wait, failures, CPU and memory over time; with --on sim:MACHINE, the prediction. Of "
            "several nodes, that of rank 0 writes it; `rankwise report` joins their journals.",
            shell_complete=complete_file,
        ),
        _ours(
            "--trace FILE",
            "Write a timeline of all ranks for Perfetto; compressed if FILE ends in .gz. As for "
            "--report, that of several nodes is made of their journals.",
            shell_complete=complete_file,
        ),
        _ours("--quiet", "rankwise itself prints nothing: no notices, no report of failures."),
    ),
    *_group(
        FAILURES,
        _torchruns(
            "--max-restarts N",
            "How many times all workers are started again after one has failed.",
            type=click.INT,
            default=0,
        ),
        _ours(
            "--restart-backoff SECONDS",
            "Pause before the second restart, doubling up to a minute; the first is immediate.",
            type=DURATION,
            default_shown="1s",
        ),
        _ours(
            "--no-retry NAME|CODE,...",
            "Exceptions (ValueError, mypackage.BadConfig) and exit codes after which no restart "
            "is tried.",
            type=COMMA_LIST,
            default=[],
            default_shown="none",
        ),
        _ours("--retry-startup-errors", "Use restarts also when a worker cannot be started."),
        _ours(
            "--max-no-progress N",
            "Give up after N failures in a row without progress: no step farther than before "
            "(rankwise.should_stop counts them), or no run of five minutes.",
            type=click.INT,
            default_shown="no limit",
        ),
        _ours(
            "--max-node-failures N",
            "Leave out a node on which N failures began, if enough others remain; one node alone "
            "gives up.",
            type=click.INT,
            default_shown="no limit",
        ),
        _ours(
            "--hang-timeout SECONDS",
            "If no worker makes progress for this time (30s, 5m), print every rank's stack and "
            "count it as a failure. Progress is: another collective call, section or step; "
            "and outside "
            "of a call, to compute, read or write, also in threads and child processes. Output is "
            "none.",
            type=DURATION,
            default_shown="never",
        ),
        _ours(
            "--start-timeout SECONDS",
            "Time that starting all ranks may take, with what a fork server imports for them. With "
            "--hang-timeout, an import that neither computes nor reads for that time ends it, too.",
            type=DURATION,
            default_shown="10m",
        ),
        _ours(
            "--on-failure COMMAND",
            "A shell command to run when ranks have failed, also before a restart, or --timeout "
            "has ended the run, with the failures and the report as JSON on its stdin. Of several "
            "nodes the one with the root cause runs it.",
        ),
        _ours(
            "--timeout SECONDS",
            "Stop the run when it has taken this long (90m, 8h), restarts included: ranks are "
            "told to stop as by SIGTERM, and the exit code is 124. On several nodes the first one "
            "whose time is over stops all.",
            type=DURATION,
            default_shown="no limit",
        ),
        _ours(
            "--no-ledger",
            "Do not enter the ranks' collective calls in memory, from which the failure report "
            "tells who kept the others waiting.",
        ),
        _ours(
            "--keep-children",
            "Let processes live on that ranks have left running, such as an upload, when all "
            "ranks have ended well. They are killed otherwise, as they are after a failure.",
        ),
        _torchruns(
            "--shutdown-timeout SECONDS",
            "Time that workers have to end after they are told to stop, before they are killed.",
            type=DURATION,
            default_shown="30s",
            variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
        ),
        _torchruns(
            "--signals-to-handle NAME,...",
            "Signals that end the run gracefully; a second one kills the workers immediately.",
            default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        ),
        _ours(
            "--forward-signals NAME,...|none",
            "Signals that are passed on to the ranks that catch them. With none, SIGUSR1 and "
            "SIGUSR2 do nothing.",
            default="SIGUSR1,SIGUSR2",
        ),
    ),
    *_group(
        RENDEZVOUS,
        _torchruns(
            "--nnodes N|MIN:MAX",
            "Number of nodes: the job runs on at least MIN nodes, and on up to MAX if they are "
            "available.",
            default="1:1",
        ),
        _torchruns(
            "--node-rank N",
            "This node's number, where --rdzv-backend is static.",
            type=click.INT,
            default=0,
        ),
        _torchruns("--standalone", "Run on this node alone; the --rdzv options are ignored."),
        _torchruns(
            "--master-addr HOST",
            "Address on which rank 0 listens; with --rdzv-backend static also the rendezvous of "
            "the nodes.",
            default="127.0.0.1",
        ),
        _torchruns(
            "--master-port PORT",
            "Port on which rank 0 listens; on several nodes with --rdzv-backend static and no "
            "--rdzv-endpoint, the one at which they meet.",
            type=click.INT,
            default_shown="a free port, reserved for the run; 29500 where nodes meet there",
        ),
        _torchruns(
            "--rdzv-id NAME",
            "The run's name, the same on all its nodes; shown by `rankwise ps` and used for log "
            "directories.",
            default="none",
            default_shown="a short random name; none on several nodes, and with etcd it must be "
            "given",
        ),
        _ours(
            "--rdzv-own-etcd",
            "Start an etcd of three members for this run, on the nodes that --rdzv-endpoint names "
            "(under SLURM: the first three), with the etcd in PATH. The run survives the loss "
            "of any "
            "of them.",
        ),
        _ours(
            "--rdzv-once",
            "Use the run's name once: a node that starts after the end of the run reports how it "
            "ended, and does not start another run of that name.",
        ),
        _torchruns(
            "--rdzv-backend NAME",
            "Where several nodes meet: static (each has its --node-rank), etcd, c10d (torch's "
            "TCPStore), embedded (a store inside the first agent), or the name of a plug-in.",
            default="static",
        ),
        _torchruns(
            "--rdzv-endpoint HOST[:PORT]",
            "Address of the rendezvous; with the static backend it means --master-addr and "
            "--master-port.",
            default="",
            default_shown="none",
        ),
        _torchruns(
            "--rdzv-conf KEY=VALUE,...",
            "Settings of the rendezvous and its store, such as join_timeout=600, "
            "last_call_timeout=30, lease_ttl=5, cacert=FILE. Without effect on one node.",
            default="",
            default_shown="none",
        ),
        _torchruns(
            "--local-addr HOST",
            "Address under which other nodes reach this node, or the name of its interface.",
            default_shown="the one that packets to the endpoint leave from",
        ),
        _ours(
            "--spares N",
            "Number of spare nodes: they wait, and replace a node that is lost.",
            type=click.INT,
            default=0,
        ),
        _ours(
            "--node-topology TEXT",
            "Where this node is, such as rack7.switch2.node12: nodes get their ranks in this "
            "order, so that neighbours are near each other.",
            default="",
            default_shown="none",
            variables=("SLURM_TOPOLOGY_ADDR",),
        ),
        _ours(
            "--node-check COMMAND",
            "A command that must succeed before this node takes part; may be given several times.",
            multiple=True,
            default=(),
            default_shown="disk, memory and clock, on several nodes",
        ),
        _ours(
            "--on-preemption",
            "Effect of a signal to one of several nodes: stop the whole job at one step, or leave "
            "the job while the other nodes go on.",
            type=click.Choice(["stop", "leave"]),
            default="stop",
        ),
        _ours(
            "--on",
            "Run elsewhere: ray starts an agent on each of --nnodes nodes of a Ray cluster, in a "
            "placement group (needs the extra: pip install 'rankwise[ray]'); sim simulates "
            "--nnodes "
            "times --nproc-per-node ranks in one process, in virtual time, on nodes that come "
            "and go "
            "if --nnodes is MIN:MAX; sim:MACHINE, a preset "
            f"({PRESETS_IN_WORDS}) or a topology file, also predicts how long they take.",
            type=ELSEWHERE,
            default_shown="this machine is one of the nodes",
        ),
        _ours(
            "--ray-resources NAME=N,...",
            "Resources that each agent reserves with --on ray, such as CPU=16,GPU=8.",
            default="",
            default_shown="a CPU per worker; all GPUs of a node where --nproc-per-node is gpu or "
            "auto",
        ),
        _ours(
            "--health-port PORT",
            "Answer GET /health and GET /metrics (Prometheus) on this port.",
            type=click.INT,
            variables=("TORCHELASTIC_HEALTH_CHECK_PORT",),
        ),
        _ours(
            "--health-host ADDRESS",
            "The address that --health-port listens on; 0.0.0.0 for all. With "
            "RANKWISE_HEALTH_TOKEN in the environment, requests must have it (Authorization: "
            "Bearer).",
            default_shown="this node's, as the others reach it",
        ),
    ),
    *_group(
        REHEARSAL,
        _ours(
            "--virtual-clock",
            "Python's time functions and CUDA events show ranks the virtual time only.",
        ),
        _ours(
            "--schedule",
            "Which rank runs next, and which message is received first: in the order in which "
            "they are ready, or at random from --seed.",
            type=click.Choice(["queue", "random"]),
            default="queue",
        ),
        _ours(
            "--seed N",
            "Seed of everything random: --schedule random, --explore, and random states that the "
            "program does not seed.",
            type=click.INT,
            default=0,
        ),
        _ours(
            "--explore N",
            "Run the program with N different schedules, or with all if there are fewer. Its "
            "output is not shown; a failure is shown with the command that replays it.",
            type=click.IntRange(1),
            default_shown="one run",
        ),
        _ours("--replay FILE", "Run with the schedule that --explore has written to FILE."),
        _ours(
            "--device",
            "Device of the ranks: cuda models a CUDA device for each rank on the CPU, for PyTorch "
            "scripts that need one.",
            type=click.Choice(["cpu", "cuda"]),
            default="cpu",
        ),
        _ours(
            "--import-per-rank PACKAGE",
            "An installed package that simulated ranks do not share, since it keeps the rank's "
            "state in globals. May be given several times.",
            multiple=True,
            default=(),
            default_shown="accelerate, megatron",
        ),
        _ours(
            "--faults FAULT|PLAN.yaml",
            "Faults of ranks, nodes and the machine's chips, such as kill:rank=3@collective=9, "
            "slow:rank=2,by=10ms, kill:node=1,at=10s,back_after=30s or "
            "slow:link=sip0-sip1,times=4; docs/howto/faults.md has them all. May be given several "
            "times.",
            multiple=True,
            default=(),
            default_shown="none",
        ),
    ),
    *_group(
        COMPATIBILITY,
        _torchruns(
            "--monitor-interval SECONDS",
            "Accepted and without effect: rankwise does not poll workers.",
            type=click.FLOAT,
            default=0.1,
        ),
        _torchruns(
            "--event-log-handler NAME",
            "Handler of rankwise.compat.torch.elastic.events that gets the run's events: null, "
            "console, or the name of a plug-in.",
            default="null",
        ),
    ),
)
