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
PLACE = "Other places"
FAILURES = "Failures and restarts"
LIMITS = "Hangs and time limits"
SIGNALS = "Signals and the end of a run"
LOGS = "Logs"
REPORTS = "Reports and metrics"
RENDEZVOUS = "Several nodes"
REHEARSAL = "Simulated ranks (--on sim)"
COMPATIBILITY = "Compatibility"

GROUPS = (
    PROGRAM,
    RANKS,
    PLACE,
    FAILURES,
    LIMITS,
    SIGNALS,
    LOGS,
    REPORTS,
    RENDEZVOUS,
    REHEARSAL,
    COMPATIBILITY,
)

START_METHODS = ["auto", "subprocess", "spawn", "forkserver", "fork"]
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
            "-m, --module",
            "SCRIPT is the name of a Python module, as with `python -m`.",
            brief="SCRIPT is the name of a Python module.",
        ),
        _torchruns("--no-python", "SCRIPT is an executable of any kind, and runs without Python."),
        _torchruns(
            "--run-path",
            "Workers are Python functions that run SCRIPT by runpy.run_path; wins over "
            "--no-python and --module.",
        ),
        _torchruns(
            "--start-method",
            "How workers start. subprocess: an interpreter each. forkserver: one process imports "
            "and forks the workers; fastest. auto: forkserver if SCRIPT begins with imports of "
            "torch or numpy and works the same, else subprocess. fork means forkserver, because "
            "forking a process with threads is unsafe. spawn means subprocess for scripts.",
            type=click.Choice(START_METHODS),
            default="auto",
        ),
        _ours(
            "--preload MODULE,...",
            "Modules that the fork server imports before it forks. Searched first beside the "
            "script, or with -m in the working directory.",
            type=COMMA_LIST,
            default_shown="the script's own top-level imports from outside its folder",
        ),
    ),
    *_group(
        RANKS,
        _torchruns(
            "--nproc-per-node N|auto|cpu|gpu|xpu|NAME",
            "Workers on this node: a number, or one per CPU or device. auto counts GPUs, or "
            "CPUs if there are none. A CPU quota counts. At most 4096.",
            brief="Workers on this node; auto counts GPUs. [1]",
            default="1",
        ),
        _torchruns("--role NAME", "Role of the workers.", default="default"),
        _torchruns(
            "--numa-binding",
            "Bind each rank to CPUs: the NUMA node or socket of its GPU, an exclusive share "
            "of the cores, or one last-level cache. Ranks without GPU are spread over the "
            "NUMA nodes.",
            type=click.Choice(BINDINGS),
            default_shown="ranks are not bound",
        ),
        _torchruns(
            "--virtual-local-rank",
            "Every worker sees LOCAL_RANK=0, and one device in CUDA_VISIBLE_DEVICES.",
        ),
    ),
    *_group(
        PLACE,
        _ours(
            "--on",
            "Run elsewhere. sim: simulate --nnodes times --nproc-per-node ranks in one process, "
            "in virtual time. sim:MACHINE: also predict their time on a preset "
            f"({PRESETS_IN_WORDS}), a topology file or one of `rankwise machines`. "
            "ray: start an agent on each of --nnodes nodes of a Ray cluster "
            "(pip install 'rankwise[ray]').",
            brief="Simulate the ranks, or run on Ray.",
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
    ),
    *_group(
        FAILURES,
        _torchruns(
            "--max-restarts N",
            "How many times all workers start again after a failure.",
            brief="Restarts of all workers after failures. [0]",
            type=click.INT,
            default=0,
        ),
        _ours(
            "--restart-backoff SECONDS",
            "Pause before the second restart, doubling up to a minute. The first is immediate.",
            type=DURATION,
            default_shown="1s",
        ),
        _ours(
            "--no-retry NAME|CODE,...",
            "Exceptions (ValueError, mypackage.BadConfig) and exit codes that end the run "
            "without a restart.",
            type=COMMA_LIST,
            default=[],
            default_shown="none",
        ),
        _ours("--retry-startup-errors", "Restart also if a worker cannot be started."),
        _ours(
            "--max-no-progress N",
            "Give up after N failures in a row without progress. Progress is a later step than "
            "ever before, if ranks call rankwise.should_stop; otherwise a run of five minutes.",
            type=click.INT,
            default_shown="no limit",
        ),
        _ours(
            "--max-node-failures N",
            "Exclude a node on which N failures began, if enough others remain. One node "
            "alone gives up.",
            type=click.INT,
            default_shown="no limit",
        ),
        _ours(
            "--on-failure COMMAND",
            "Shell command after each failure, also before a restart, and after --timeout. It "
            "gets the failures and the report as JSON on stdin. On several nodes the node of "
            "the root cause runs it.",
        ),
    ),
    *_group(
        LIMITS,
        _ours(
            "--hang-timeout SECONDS",
            "If no rank makes progress for this time (30s, 5m), print every rank's stack and "
            "fail. Progress is a new collective call, section or step, or CPU time or I/O "
            "outside of a call, in threads and child processes too. Printing is not progress.",
            brief="Fail after this time without progress: 5m.",
            type=DURATION,
            default_shown="never",
        ),
        _ours(
            "--no-ledger",
            "Do not record the ranks' collective calls in memory. The failure report then "
            "cannot name the rank that others waited for.",
        ),
        _ours(
            "--start-timeout SECONDS",
            "Time limit for starting all ranks, with the imports of the fork server. With "
            "--hang-timeout, an import without CPU time or reading for that time ends it too.",
            type=DURATION,
            default_shown="10m",
        ),
        _ours(
            "--timeout SECONDS",
            "Time limit of the run (90m, 8h), restarts included. Ranks are stopped as by "
            "SIGTERM, with exit code 124. On several nodes the first node at its limit stops "
            "all.",
            brief="Stop the run after this time: 90m, 8h.",
            type=DURATION,
            default_shown="no limit",
        ),
        _torchruns(
            "--shutdown-timeout SECONDS",
            "Time that workers have to end after a stop request, before they are killed.",
            type=DURATION,
            default_shown="30s",
            variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
        ),
    ),
    *_group(
        SIGNALS,
        _torchruns(
            "--signals-to-handle NAME,...",
            "Signals that end the run gracefully. A second one kills the workers.",
            default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        ),
        _ours(
            "--forward-signals NAME,...|none",
            "Signals passed on to ranks that catch them. With none, SIGUSR1 and SIGUSR2 have "
            "no effect.",
            default="SIGUSR1,SIGUSR2",
        ),
        _ours(
            "--on-preemption",
            "Effect of a signal to one of several nodes: stop the whole job at one step, or "
            "let only this node leave.",
            type=click.Choice(["stop", "leave"]),
            default="stop",
        ),
        _ours(
            "--keep-children",
            "Let processes that ranks leave behind, such as an upload, live on if all ranks "
            "end well. By default they are killed.",
        ),
    ),
    *_group(
        LOGS,
        _torchruns(
            "--log-dir DIR",
            "Directory of log files and the journal; each run makes a directory of its own in it.",
            brief="Directory of log files and the journal.",
            default_shown="a temporary directory, kept if log files were requested",
            shell_complete=complete_directory,
        ),
        _torchruns(
            "-r, --redirects STREAMS",
            "Write streams to files instead of the console: 0 none, 1 stdout, 2 stderr, 3 "
            "both; or per local rank, as in 0:3,1:2.",
            default="0",
        ),
        _torchruns(
            "-t, --tee STREAMS",
            "Write streams to files and to the console; values as for --redirects.",
            brief="Write to files too: 1 stdout, 3 both streams.",
            default="0",
        ),
        _ours(
            "--log-size SIZE",
            "Size limit of a rank's log file (64K, 100M, 2G). A full stdout.log replaces "
            "stdout.log.1, and a new one begins.",
            type=SIZE,
            default_shown="no limit",
        ),
        _torchruns(
            "--local-ranks-filter RANK,...",
            "Local ranks whose output reaches the console. Files are not affected.",
            default="",
            default_shown="all",
        ),
        _torchruns(
            "--duplicate-stdout-filters TEXT,...",
            "Copy stdout lines with one of these texts to filtered_stdout.log; ,, stands for "
            "a comma.",
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
            "Prefix of each line on the console, with ${role_name}, ${local_rank}, ${rank}, "
            "${date} and ${time}. With ${time}, rankwise's own lines have it too.",
            default_shown="[${role_name}${local_rank}]:",
            variables=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",),
        ),
        _ours(
            "--log-format",
            "Format of rankwise's own messages on stderr: text, or one JSON object per "
            "notice, round, failure and restart.",
            type=click.Choice(["text", "json"]),
            default="text",
        ),
        _ours("--no-prefix", "Lines on the console have no prefix."),
        _torchruns(
            "--logs-specs NAME",
            "Plug-in of the entry-point group torchrun.logs_specs that decides where logs go.",
            default_shown="rankwise's own layout",
        ),
        _ours("--quiet", "rankwise prints nothing: no notices, no failure report."),
        _ours("--verbose", "rankwise also prints how the ranks start, and why."),
    ),
    *_group(
        REPORTS,
        _ours(
            "--report FILE",
            "Write an HTML page at the end: timeline, lateness, failures, CPU and memory; "
            "with --on sim:MACHINE, the prediction. On several nodes the node of rank 0 "
            "writes it; `rankwise report` joins their journals.",
            brief="Write an HTML page about the run.",
            shell_complete=complete_file,
        ),
        _ours(
            "--trace FILE",
            "Write a timeline of all ranks for Perfetto; compressed if FILE ends in .gz. "
            "On several nodes, see --report.",
            shell_complete=complete_file,
        ),
        _ours(
            "--health-port PORT",
            "Answer GET /health and GET /metrics (Prometheus) on this port.",
            type=click.INT,
            variables=("TORCHELASTIC_HEALTH_CHECK_PORT",),
        ),
        _ours(
            "--health-host ADDRESS",
            "Address of --health-port; 0.0.0.0 for all. With RANKWISE_HEALTH_TOKEN in the "
            "environment, requests need that bearer token.",
            default_shown="this node's, as the others reach it",
        ),
    ),
    *_group(
        RENDEZVOUS,
        _torchruns(
            "--nnodes N|MIN:MAX",
            "Number of nodes, or a range: the job runs on at least MIN, and on up to MAX if "
            "available.",
            brief="Number of nodes, or a range. [1]",
            default="1:1",
        ),
        _torchruns(
            "--node-rank N",
            "Number of this node, for --rdzv-backend static.",
            type=click.INT,
            default=0,
        ),
        _torchruns("--standalone", "Run on this node alone, without the --rdzv options."),
        _torchruns(
            "--master-addr HOST",
            "Address on which rank 0 listens; with --rdzv-backend static also the meeting "
            "point of the nodes.",
            default="127.0.0.1",
        ),
        _torchruns(
            "--master-port PORT",
            "Port on which rank 0 listens; on several nodes with --rdzv-backend static and no "
            "--rdzv-endpoint, the port of the meeting point.",
            type=click.INT,
            default_shown="a free port, reserved for the run; 29500 where nodes meet there",
        ),
        _torchruns(
            "--rdzv-id NAME",
            "Name of the run, the same on all nodes, for `rankwise ps` and log directories.",
            default="none",
            default_shown="a short random name; none on several nodes, and with etcd it must be "
            "given",
        ),
        _ours(
            "--rdzv-own-etcd",
            "Start an etcd of three members for this run, on the nodes of --rdzv-endpoint "
            "(under SLURM: the first three), with the etcd in PATH. The run survives the loss "
            "of any of them.",
        ),
        _ours(
            "--rdzv-once",
            "Use the name of the run once: a node that starts after the end reports how the "
            "run ended, and starts nothing.",
        ),
        _torchruns(
            "--rdzv-backend NAME",
            "Store where nodes meet: static (with --node-rank), etcd, c10d (torch's "
            "TCPStore), embedded (in the first agent), or a plug-in.",
            brief="Meeting point: static, embedded, etcd, c10d.",
            default="static",
        ),
        _torchruns(
            "--rdzv-endpoint HOST[:PORT]",
            "Address of the meeting point. With the static backend it means --master-addr and "
            "--master-port.",
            brief="Address of the meeting point.",
            default="",
            default_shown="none",
        ),
        _torchruns(
            "--rdzv-conf KEY=VALUE,...",
            "Settings of the rendezvous and its store, such as join_timeout=600, lease_ttl=5, "
            "cacert=FILE. No effect on one node.",
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
            "Number of spare nodes, which replace lost nodes.",
            type=click.INT,
            default=0,
        ),
        _ours(
            "--node-topology TEXT",
            "Place of this node, such as rack7.switch2.node12. Ranks follow this order, so "
            "neighbours are near each other.",
            default="",
            default_shown="none",
            variables=("SLURM_TOPOLOGY_ADDR",),
        ),
        _ours(
            "--node-check COMMAND",
            "Command that must succeed before this node takes part in a round. gpu: memory, clocks "
            "and a matrix product of each GPU. Repeatable.",
            multiple=True,
            default=(),
            default_shown="disk, memory and clock, on several nodes",
        ),
    ),
    *_group(
        REHEARSAL,
        _ours(
            "--virtual-clock",
            "Python's time functions and CUDA events show virtual time only.",
        ),
        _ours(
            "--timing-only",
            "Compute nothing: tensors have no data, each rank has a modelled CUDA device, and the "
            "time and the memory are those of the machine. See docs/howto/predict.md.",
        ),
        _ours(
            "--every-rank",
            "Run each rank of --timing-only. Otherwise rank 0 and another one stand for all, as "
            "long as they do the same.",
        ),
        _ours(
            "--values POLICY",
            "What a program gets with --timing-only that asks for a number: constant=NUMBER, "
            "seeded, or a file of --record-values. Without it: 1.0 and false, and an error where "
            "the number may decide a shape.",
            default="",
            default_shown="1.0 and false",
        ),
        _ours(
            "--synthetic-data",
            "Data loaders of PyTorch do not run with --timing-only: each repeats its first batch.",
        ),
        _ours(
            "--tokens-per-step N",
            "Tokens of a step on all ranks together, for the tokens/s of a prediction. Otherwise "
            "the indices that embeddings look up are counted.",
            type=click.IntRange(1),
            default_shown="counted",
        ),
        _ours(
            "--record-values FILE",
            "File for the numbers that rank 0 asks for, such as loss.item(), on a small run with "
            "real tensors; --values reads it. Needs --on sim:MACHINE.",
        ),
        _ours(
            "--prediction FILE",
            "File for the predicted figures, as JSON; needs --on sim:MACHINE.",
        ),
        _ours(
            "--schedule",
            "Order of ranks and messages: as they become ready, or random from --seed.",
            type=click.Choice(["queue", "random"]),
            default="queue",
        ),
        _ours(
            "--seed N",
            "Seed of --schedule random, --explore, and random states that the program does "
            "not seed.",
            type=click.INT,
            default=0,
        ),
        _ours(
            "--explore N",
            "Run the program with N different schedules, or with all if fewer. Output is "
            "hidden. A failure is shown with the command that replays it.",
            type=click.IntRange(1),
            default_shown="one run",
        ),
        _ours("--replay FILE", "Run with the schedule that --explore has written to FILE."),
        _ours(
            "--device",
            "cuda models a CUDA device for each rank on the CPU, for PyTorch scripts that "
            "need one.",
            type=click.Choice(["cpu", "cuda"]),
            default="cpu",
        ),
        _ours(
            "--import-per-rank PACKAGE",
            "Installed package that each simulated rank imports for itself, because it keeps "
            "the rank's state in globals. Repeatable.",
            multiple=True,
            default=(),
            default_shown="accelerate, deepspeed, megatron, torchtitan, transformers",
        ),
        _ours(
            "--faults FAULT|PLAN.yaml",
            "Faults of ranks, nodes and chips, such as kill:rank=3@collective=9, "
            "slow:rank=2,by=10ms, kill:node=1,at=10s,back_after=30s or "
            "slow:link=sip0-sip1,times=4. Repeatable. See docs/howto/faults.md.",
            multiple=True,
            default=(),
            default_shown="none",
        ),
    ),
    *_group(
        COMPATIBILITY,
        _torchruns(
            "--monitor-interval SECONDS",
            "Accepted, without effect: rankwise does not poll workers.",
            type=click.FLOAT,
            default=0.1,
        ),
        _torchruns(
            "--event-log-handler NAME",
            "Handler of rankwise.compat.torch.elastic.events for the run's events: null, "
            "console, or a plug-in.",
            default="null",
        ),
    ),
)
