"""The table of a run's options: the one place that knows a name, its meaning and its worlds.

From `OPTIONS` are made: the options of `rankwise run` (`cli.options`), the refusals of each world
(`cli.run_job`), docs/cli.md, torchrun's parser and, with `launch_fields`, its `LaunchConfig`
(`compat.torch`). Four texts are written from it by `python tools/run_arguments.py`, because type
checkers read them: the fields of `cli.run_job.RunOptions`, of `SimulationOptions` and of
`LaunchConfig`, and the arguments of `rankwise.run`.

A default stands here and nowhere else: code asks `default_of`.

A world is where ranks run: in `PROCESSES` of this machine or of several, simulated (`SIM`), or on a
`RAY` cluster. `TIMING_ONLY`, `SWEEP` and `PLUG_IN` narrow one of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

PROGRAM = "Program"
RANKS = "Ranks"
PLACE = "Other places"
FAILURES = "Failures and restarts"
LIMITS = "Hangs and time limits"
SIGNALS = "Signals and the end of a run"
LOGS = "Logs"
REPORTS = "Reports and metrics"
RENDEZVOUS = "Several nodes"
SIMULATED = "Simulated ranks (--on sim)"
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
    SIMULATED,
    COMPATIBILITY,
)
"""The headings of the help, in its order."""

PROCESSES = "processes"
SIM = "--on sim"
RAY = "--on ray"
TIMING_ONLY = "--timing-only"
SWEEP = "--sweep"
PLUG_IN = "a plug-in's rendezvous"
MACHINE = "--on sim:MACHINE"
ORDER = "the order of ranks"

WORLDS = (PROCESSES, SIM, RAY)

MASTER_PORT = 29500
"""torchrun's, where nodes meet and are told no other."""
PREFIX_OF_NODES = "[${role_name}${rank}]:"
"""Of lines where all nodes write to one console: local ranks would be the same on each."""
_FOR_ONE_RUN = "is for one run"
_UNKNOWN_TO_PLUG_INS = "is not known to agents that meet by a plug-in"


# Plain classes: a NamedTuple takes half a millisecond to define, at the start of each run.
class Kind:
    """The type of a value.

    Attributes:
        name: how `cli.options` and `compat.torch.run` find the parser of its text.
        type: the Python type of the parsed value, as source text.
    """

    def __init__(self, name: str, type: str) -> None:  # noqa: A002  # what it is
        self.name = name
        self.type = type


FLAG = Kind("flag", "bool")
TEXT = Kind("text", "str")
CHOICE = Kind("choice", "str")
FILE = Kind("file", "str")
DIRECTORY = Kind("directory", "str")
PLACE_OF_RANKS = Kind("place", "str")
INTEGER = Kind("integer", "int")
SIZE = Kind("size", "int")
NUMBER = Kind("number", "float")
SECONDS = Kind("seconds", "Duration")
WORDS = Kind("words", "list[str]")
"""Words between commas."""
TEXTS = Kind("texts", "tuple[str, ...]")
"""An option that may be given several times."""

SAME: Any = ...
"""In place of a value: the one of the option itself."""


class Argument:
    """An argument of `rankwise.run`.

    Attributes:
        type: its annotation, as source text.
        help: its line in the docstring.
        default: its value if it is not given.
        name: its name, if it is not that of the option.
    """

    def __init__(
        self,
        type: str,  # noqa: A002  # what it is
        help: str,  # noqa: A002  # the same
        *,
        default: Any,
        name: str = "",
    ) -> None:
        self.type = type
        self.help = help
        self.default = default
        self.name = name


class Torchrun:
    """How torchrun has an option, where that differs from ours.

    Attributes:
        default: in torchrun's parser.
        choices: the same.
        help: the same.
        has_variable: whether torchrun's parser reads the option's PET variable.
    """

    def __init__(
        self,
        *,
        default: Any = SAME,
        choices: tuple[str, ...] = (),
        help: str = "",  # noqa: A002  # what it is
        has_variable: bool = True,
    ) -> None:
        self.default = default
        self.choices = choices
        self.help = help
        self.has_variable = has_variable


class Option:
    """An option of a run.

    Attributes:
        name: the Python name: `--log-dir` and PET_LOG_DIR are `log_dir`.
        group: the heading under which the help shows it.
        kind: what its value is. A value without default may be None.
        help: what it does.
        metavar: what the help shows for its value.
        short: its one-letter name.
        choices: the words that a `CHOICE` may be.
        least, most: the smallest and the largest number that are accepted.
        is_positive: of a time: whether 0 is refused.
        default: its value if it is not given, unless its kind says it: see `initial`.
        default_shown: what the help says about the default, where its value would not do.
        brief: one line for the short help, of the few options that most people need.
        variables: environment variables that give it a value besides its PET variable.
        torchrun: torchrun's spelling of it; None if torchrun does not have it. Options of
            torchrun have precedence where an abbreviation fits several.
        python: the argument of `rankwise.run`, if it has one.
        only: the one world in which it has a meaning.
        refused: why it is refused, by world.
        needs: what must be given as well: `MACHINE`, `TIMING_ONLY` or `SWEEP`.
        decides: what it decides; of several options that decide the same, one may be given.
    """

    def __init__(
        self,
        name: str,
        group: str,
        kind: Kind,
        help: str,  # noqa: A002  # what it is
        *,
        metavar: str | None = None,
        short: str | None = None,
        choices: tuple[str, ...] = (),
        least: int | None = None,
        most: int | None = None,
        is_positive: bool = False,
        default: Any = None,
        default_shown: str | None = None,
        brief: str | None = None,
        variables: tuple[str, ...] = (),
        torchrun: Torchrun | None = None,
        python: Argument | None = None,
        only: str = "",
        refused: Mapping[str, str] = {},  # never changed
        needs: str = "",
        decides: str = "",
    ) -> None:
        self.name = name
        self.group = group
        self.kind = kind
        self.help = help
        self.metavar = metavar
        self.short = short
        self.choices = choices
        self.least = least
        self.most = most
        self.is_positive = is_positive
        self.default = default
        self.default_shown = default_shown
        self.brief = brief
        self.variables = variables
        self.torchrun = torchrun
        self.python = python
        self.only = only
        self.refused = refused
        self.needs = needs
        self.decides = decides

    @property
    def flag(self) -> str:
        """Its long name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def worlds(self) -> tuple[str, ...]:
        """Where it has a meaning."""
        return tuple(
            world for world in WORLDS if world not in self.refused and self.only in {"", world}
        )

    @property
    def initial(self) -> Any:
        """Its value if it is not given."""
        return {FLAG: False, TEXTS: ()}.get(self.kind, self.default)

    @property
    def type(self) -> str:
        """The type of its value, as source text."""
        return f"{self.kind.type} | None" if self.initial is None else self.kind.type


PRESETS = ("default", "torus16", "pod64", "switch8")
"""The simulated machines that ship (`sim/hardware/presets`), for help and completion: to look them
up there takes the simulator, which takes numpy."""
MACHINES = (
    "a100-40gb", "a100-80gb", "h100-sxm", "h100-96gb-500w", "h200", "b200", "gb200", "mi300x",
)  # fmt: skip
"""The machines that exist (`simranks/prediction/machines/shipped`), for the same."""
PRESETS_IN_WORDS = ", ".join(PRESETS)

OPTIONS: tuple[Option, ...] = (
    Option(
        "module",
        PROGRAM,
        FLAG,
        "SCRIPT is the name of a Python module, as with `python -m`.",
        short="-m",
        brief="SCRIPT is the name of a Python module.",
        torchrun=Torchrun(),
    ),
    Option(
        "no_python",
        PROGRAM,
        FLAG,
        "SCRIPT is an executable of any kind, and runs without Python.",
        torchrun=Torchrun(),
        refused={SIM: "simulated ranks are threads of one Python program"},
    ),
    Option(
        "run_path",
        PROGRAM,
        FLAG,
        "Workers are Python functions that run SCRIPT by runpy.run_path; wins over "
        "--no-python and --module.",
        torchrun=Torchrun(),
    ),
    Option(
        "start_method",
        PROGRAM,
        CHOICE,
        "How workers start. subprocess: an interpreter each. forkserver: one process imports "
        "and forks the workers; fastest. auto: forkserver if SCRIPT begins with imports of "
        "torch or numpy and works the same, else subprocess. fork means forkserver, because "
        "forking a process with threads is unsafe. spawn means subprocess for scripts.",
        choices=("auto", "subprocess", "spawn", "forkserver", "fork"),
        default="auto",
        torchrun=Torchrun(
            default="spawn",
            choices=("spawn", "fork", "forkserver"),
            help="How functions get processes.",
        ),
        python=Argument(
            "StartMethodName",
            "`forkserver` imports once and forks; `spawn` starts a fresh interpreter for "
            "every rank.",
            default="forkserver",
        ),
        refused={SIM: "simulated ranks are threads, not processes"},
    ),
    Option(
        "preload",
        PROGRAM,
        WORDS,
        "Modules that the fork server imports before it forks. Searched first beside the "
        "script, or with -m in the working directory.",
        metavar="MODULE,...",
        default_shown="the script's own top-level imports from outside its folder",
        python=Argument(
            "Sequence[str] | None",
            "modules that the fork server imports; by default those that `fn` certainly needs.",
            default=None,
        ),
        refused={SIM: "simulated ranks share what one of them has imported"},
    ),
    Option(
        "nproc_per_node",
        RANKS,
        TEXT,
        "Workers on this node: a number, or one per CPU or device. auto counts GPUs, or CPUs "
        "if there are none. A CPU quota counts. At most 4096.",
        metavar="N|auto|cpu|gpu|xpu|NAME",
        default="1",
        brief="Workers on this node; auto counts GPUs. [1]",
        torchrun=Torchrun(),
    ),
    Option(
        "role",
        RANKS,
        TEXT,
        "Role of the workers.",
        metavar="NAME",
        default="default",
        torchrun=Torchrun(),
        python=Argument("str", "the ranks' role, for the prefix and ROLE_NAME.", default="rank"),
    ),
    Option(
        "numa_binding",
        RANKS,
        CHOICE,
        "Bind each rank to CPUs: the NUMA node or socket of its GPU, an exclusive share of "
        "the cores, or one last-level cache. Ranks without GPU are spread over the NUMA nodes.",
        choices=("node", "socket", "exclusive", "core-complex"),
        default_shown="ranks are not bound",
        torchrun=Torchrun(has_variable=False),
        refused={SIM: "simulated ranks take turns on one core"},
    ),
    Option(
        "virtual_local_rank",
        RANKS,
        FLAG,
        "Every worker sees LOCAL_RANK=0, and one device in CUDA_VISIBLE_DEVICES.",
        torchrun=Torchrun(),
    ),
    Option(
        "on",
        PLACE,
        PLACE_OF_RANKS,
        "Run elsewhere. sim: simulate --nnodes times --nproc-per-node ranks in one process, "
        "in virtual time. sim:MACHINE: also predict their time on a preset "
        f"({PRESETS_IN_WORDS}), a topology file or one of `rankwise machines`. "
        "ray: start an agent on each of --nnodes nodes of a Ray cluster "
        "(pip install 'rankwise[ray]').",
        default_shown="this machine is one of the nodes",
        brief="Simulate the ranks, or run on Ray.",
        python=Argument(
            "str | None",
            '`"sim"` runs simulated ranks instead, threads of this process in virtual time; '
            "then `start_method`, `preload`, `server`, `start_timeout` and `keep_children` mean "
            "nothing. `hang_timeout` is how long one rank may run in real time without letting "
            "others run; ranks that wait for each other for ever are found at once. "
            '`"sim:MACHINE"`, '
            "a preset or a topology file, also predicts how long they take there.",
            default=None,
        ),
    ),
    Option(
        "ray_resources",
        PLACE,
        TEXT,
        "Resources that each agent reserves with --on ray, such as CPU=16,GPU=8.",
        metavar="NAME=N,...",
        default="",
        default_shown="a CPU per worker; all GPUs of a node where --nproc-per-node is gpu or auto",
        refused={SIM: "it is for --on ray"},
    ),
    Option(
        "max_restarts",
        FAILURES,
        INTEGER,
        "How many times all workers start again after a failure.",
        metavar="N",
        default=0,
        brief="Restarts of all workers after failures. [0]",
        torchrun=Torchrun(),
        python=Argument(
            "int", "how often all ranks may be started again after a failure.", default=0
        ),
    ),
    Option(
        "restart_backoff",
        FAILURES,
        SECONDS,
        "Pause before the second restart, doubling up to a minute. The first is immediate.",
        metavar="SECONDS",
        default_shown="1s",
    ),
    Option(
        "no_retry",
        FAILURES,
        WORDS,
        "Exceptions (ValueError, mypackage.BadConfig) and exit codes that end the run without "
        "a restart.",
        metavar="NAME|CODE,...",
        default=(),
    ),
    Option(
        "retry_startup_errors",
        FAILURES,
        FLAG,
        "Restart also if a worker cannot be started.",
        refused={SIM: "simulated ranks always start"},
    ),
    Option(
        "max_no_progress",
        FAILURES,
        INTEGER,
        "Give up after N failures in a row without progress. Progress is a later step than "
        "ever before, if ranks call rankwise.should_stop; otherwise a run of five minutes.",
        metavar="N",
        least=1,
        default_shown="no limit",
    ),
    Option(
        "max_node_failures",
        FAILURES,
        INTEGER,
        "Exclude a node on which N failures began, if enough others remain. One node alone "
        "gives up.",
        metavar="N",
        least=1,
        default_shown="no limit",
    ),
    Option(
        "on_failure",
        FAILURES,
        TEXT,
        "Shell command after each failure, also before a restart, and after --timeout. It "
        "gets the failures and the report as JSON on stdin. On several nodes the node of the "
        "root cause runs it.",
        metavar="COMMAND",
        refused={PLUG_IN: _UNKNOWN_TO_PLUG_INS},
    ),
    Option(
        "hang_timeout",
        LIMITS,
        SECONDS,
        "If no rank makes progress for this time (30s, 5m), print every rank's stack and "
        "fail. Progress is a new collective call, section or step, or CPU time or I/O outside "
        "of a call, in threads and child processes too. Printing is not progress.",
        metavar="SECONDS",
        is_positive=True,
        default_shown="never",
        brief="Fail after this time without progress: 5m.",
        python=Argument(
            "float | None",
            "seconds without progress of any rank (see docs/howto/hang.md) after which the "
            "run counts as hung: stacks are collected and it fails.",
            default=None,
        ),
    ),
    Option(
        "no_ledger",
        LIMITS,
        FLAG,
        "Do not record the ranks' collective calls in memory. The failure report then cannot "
        "name the rank that others waited for.",
    ),
    Option(
        "start_timeout",
        LIMITS,
        SECONDS,
        "Time limit for starting all ranks, with the imports of the fork server. With "
        "--hang-timeout, an import without CPU time or reading for that time ends it too.",
        metavar="SECONDS",
        is_positive=True,
        default_shown="10m",
        python=Argument(
            "float",
            "seconds that starting all ranks may take, with what the fork server imports.",
            default=600.0,
        ),
        refused={SIM: "simulated ranks start at once"},
    ),
    Option(
        "timeout",
        LIMITS,
        SECONDS,
        "Time limit of the run (90m, 8h), restarts included. Ranks are stopped as by SIGTERM, "
        "with exit code 124. On several nodes the first node at its limit stops all.",
        metavar="SECONDS",
        is_positive=True,
        default_shown="no limit",
        brief="Stop the run after this time: 90m, 8h.",
        python=Argument(
            "float | None",
            "seconds that the whole run may take, restarts included, before ranks are told to "
            "stop; on simulated ranks in real time.",
            default=None,
        ),
        refused={PLUG_IN: _UNKNOWN_TO_PLUG_INS},
    ),
    Option(
        "shutdown_timeout",
        LIMITS,
        SECONDS,
        "Time that workers have to end after a stop request, before they are killed.",
        metavar="SECONDS",
        default_shown="30s",
        variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
        torchrun=Torchrun(),
        python=Argument(
            "float",
            "seconds that ranks have to end when they are told to, before they are killed.",
            default=30.0,
            name="grace",
        ),
    ),
    Option(
        "signals_to_handle",
        SIGNALS,
        TEXT,
        "Signals that end the run gracefully. A second one kills the workers.",
        metavar="NAME,...",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        torchrun=Torchrun(),
    ),
    Option(
        "forward_signals",
        SIGNALS,
        TEXT,
        "Signals passed on to ranks that catch them. With none, SIGUSR1 and SIGUSR2 have no "
        "effect.",
        metavar="NAME,...|none",
        default="SIGUSR1,SIGUSR2",
    ),
    Option(
        "on_preemption",
        SIGNALS,
        CHOICE,
        "Effect of a signal to one of several nodes: stop the whole job at one step, or let "
        "only this node leave.",
        choices=("stop", "leave"),
        default="stop",
    ),
    Option(
        "keep_children",
        SIGNALS,
        FLAG,
        "Let processes that ranks leave behind, such as an upload, live on if all ranks end "
        "well. By default they are killed.",
        python=Argument(
            "bool",
            "whether processes that ranks have left running live on when all ranks have "
            "returned; they are killed otherwise.",
            default=False,
        ),
        refused={SIM: "what simulated ranks leave running ends with the command"},
    ),
    Option(
        "log_dir",
        LOGS,
        DIRECTORY,
        "Directory of log files and the journal; each run makes a directory of its own in it.",
        metavar="DIR",
        default_shown="a temporary directory, kept if log files were requested",
        brief="Directory of log files and the journal.",
        torchrun=Torchrun(),
        python=Argument("str | os.PathLike[str] | None", "directory for log files.", default=None),
        refused={SWEEP: _FOR_ONE_RUN},
    ),
    Option(
        "redirects",
        LOGS,
        TEXT,
        "Write streams to files instead of the console: 0 none, 1 stdout, 2 stderr, 3 both; "
        "or per local rank, as in 0:3,1:2.",
        metavar="STREAMS",
        short="-r",
        default="0",
        torchrun=Torchrun(),
        python=Argument(
            "str",
            'streams that go to files instead of the console, as in `rankwise run`: `"3"` is '
            'both streams of every rank, `"0:1,3:2"` is stdout of rank 0 and stderr of rank 3.',
            default="0",
        ),
    ),
    Option(
        "tee",
        LOGS,
        TEXT,
        "Write streams to files and to the console; values as for --redirects.",
        metavar="STREAMS",
        short="-t",
        default="0",
        brief="Write to files too: 1 stdout, 3 both streams.",
        torchrun=Torchrun(),
        python=Argument("str", "streams that go to both, in the same notation.", default="0"),
    ),
    Option(
        "log_size",
        LOGS,
        SIZE,
        "Size limit of a rank's log file (64K, 100M, 2G), with --redirects or --tee. A full "
        "stdout.log replaces stdout.log.1, and a new one begins.",
        metavar="SIZE",
        default_shown="no limit",
        refused={PLUG_IN: _UNKNOWN_TO_PLUG_INS},
    ),
    Option(
        "local_ranks_filter",
        LOGS,
        TEXT,
        "Local ranks whose output reaches the console. Files are not affected.",
        metavar="RANK,...",
        default="",
        default_shown="all",
        torchrun=Torchrun(),
    ),
    Option(
        "duplicate_stdout_filters",
        LOGS,
        WORDS,
        "Copy stdout lines with one of these texts to filtered_stdout.log; ,, stands for a comma.",
        metavar="TEXT,...",
        default=(),
        torchrun=Torchrun(),
    ),
    Option(
        "duplicate_stderr_filters",
        LOGS,
        WORDS,
        "The same for stderr and filtered_stderr.log.",
        metavar="TEXT,...",
        default=(),
        torchrun=Torchrun(),
    ),
    Option(
        "log_prefix",
        LOGS,
        TEXT,
        "Prefix of each line on the console, with ${role_name}, ${local_rank}, ${rank}, "
        "${date} and ${time}. With ${time}, rankwise's own lines have it too.",
        metavar="TEMPLATE",
        default_shown=f"[${{role_name}}${{local_rank}}]:; {PREFIX_OF_NODES} where several nodes "
        "write to one console",
        variables=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",),
        python=Argument(
            "str | None",
            "what stands before each line on the console, a `string.Template` with "
            '`${role_name}`, `${local_rank}`, `${rank}`, `${date}`, `${time}`; `""` for '
            "nothing.",
            default=None,
            name="prefix",
        ),
    ),
    Option(
        "log_format",
        LOGS,
        CHOICE,
        "Format of rankwise's own messages on stderr: text, or one JSON object per notice, "
        "round, failure and restart.",
        choices=("text", "json"),
        default="text",
    ),
    Option("no_prefix", LOGS, FLAG, "Lines on the console have no prefix."),
    Option(
        "logs_specs",
        LOGS,
        TEXT,
        "Plug-in of the entry-point group torchrun.logs_specs that decides where logs go.",
        metavar="NAME",
        default_shown="rankwise's own layout",
        torchrun=Torchrun(has_variable=False),
    ),
    Option("quiet", LOGS, FLAG, "rankwise prints nothing: no notices, no failure report."),
    Option("verbose", LOGS, FLAG, "rankwise also prints how the ranks start, and why."),
    Option(
        "report",
        REPORTS,
        FILE,
        "Write an HTML page at the end: timeline, lateness, failures, CPU and memory; with "
        "--on sim:MACHINE, the prediction. On several nodes the node of rank 0 writes it; "
        "`rankwise report` joins their journals.",
        metavar="FILE",
        brief="Write an HTML page about the run.",
        refused={
            RAY: "give --log-dir, and join the journals of the nodes by rankwise report",
            PLUG_IN: _UNKNOWN_TO_PLUG_INS,
        },
    ),
    Option(
        "trace",
        REPORTS,
        FILE,
        "Write a timeline of all ranks for Perfetto; compressed if FILE ends in .gz. On "
        "several nodes, see --report.",
        metavar="FILE",
        refused={
            RAY: "give --log-dir, and join the journals of the nodes by rankwise report --trace",
            SWEEP: _FOR_ONE_RUN,
            PLUG_IN: _UNKNOWN_TO_PLUG_INS,
        },
    ),
    Option(
        "health_port",
        REPORTS,
        INTEGER,
        "Answer GET /health and GET /metrics (Prometheus) on this port.",
        metavar="PORT",
        least=0,
        most=65535,
        variables=("TORCHELASTIC_HEALTH_CHECK_PORT",),
        refused={SIM: "the run ends before a request could arrive"},
    ),
    Option(
        "health_host",
        REPORTS,
        TEXT,
        "Address of --health-port; 0.0.0.0 for all. With RANKWISE_HEALTH_TOKEN in the "
        "environment, requests need that bearer token.",
        metavar="ADDRESS",
        default_shown="this node's, as the others reach it",
    ),
    Option(
        "nnodes",
        RENDEZVOUS,
        TEXT,
        "Number of nodes, or a range: the job runs on at least MIN, and on up to MAX if available.",
        metavar="N|MIN:MAX",
        default="1:1",
        brief="Number of nodes, or a range. [1]",
        torchrun=Torchrun(),
    ),
    Option(
        "node_rank",
        RENDEZVOUS,
        INTEGER,
        "Number of this node, for --rdzv-backend static.",
        metavar="N",
        default=0,
        torchrun=Torchrun(),
        refused={
            SIM: "all nodes are simulated in one process",
            RAY: "ranks are agreed upon when the agents meet",
        },
    ),
    Option(
        "standalone",
        RENDEZVOUS,
        FLAG,
        "Run on this node alone, without the --rdzv options.",
        torchrun=Torchrun(),
        refused={RAY: "it means one node, this one"},
    ),
    Option(
        "master_addr",
        RENDEZVOUS,
        TEXT,
        "Address on which rank 0 listens; with --rdzv-backend static also the meeting point "
        "of the nodes.",
        metavar="HOST",
        default="127.0.0.1",
        torchrun=Torchrun(),
        refused={RAY: "the agents agree upon it when they meet"},
    ),
    Option(
        "master_port",
        RENDEZVOUS,
        INTEGER,
        "Port on which rank 0 listens; on several nodes with --rdzv-backend static and no "
        "--rdzv-endpoint, the port of the meeting point.",
        metavar="PORT",
        least=0,
        most=65535,
        default_shown=f"a free port, reserved for the run; {MASTER_PORT} where nodes meet there",
        torchrun=Torchrun(),
    ),
    Option(
        "rdzv_id",
        RENDEZVOUS,
        TEXT,
        "Name of the run, the same on all nodes, for `rankwise ps` and log directories.",
        metavar="NAME",
        default="none",
        default_shown="a short random name; none on several nodes, and with etcd it must be given",
        torchrun=Torchrun(),
        python=Argument(
            "str | None",
            "the run's name in `rankwise ps`, without a slash; by default a random one.",
            default=None,
            name="run_id",
        ),
    ),
    Option(
        "rdzv_own_etcd",
        RENDEZVOUS,
        FLAG,
        "Start an etcd of three members for this run, on the nodes of --rdzv-endpoint (under "
        "SLURM: the first three), with the etcd in PATH. The run survives the loss of any of "
        "them.",
    ),
    Option(
        "rdzv_once",
        RENDEZVOUS,
        FLAG,
        "Use the name of the run once: a node that starts after the end reports how the run "
        "ended, and starts nothing.",
    ),
    Option(
        "rdzv_backend",
        RENDEZVOUS,
        TEXT,
        "Store where nodes meet: static (with --node-rank), etcd, c10d (torch's TCPStore), "
        "embedded (in the first agent), or a plug-in.",
        metavar="NAME",
        default="static",
        brief="Meeting point: static, embedded, etcd, c10d.",
        torchrun=Torchrun(),
        refused={SIM: "simulated nodes meet in a store of their own"},
    ),
    Option(
        "rdzv_endpoint",
        RENDEZVOUS,
        TEXT,
        "Address of the meeting point. With the static backend it means --master-addr and "
        "--master-port.",
        metavar="HOST[:PORT]",
        default="",
        default_shown="none",
        brief="Address of the meeting point.",
        torchrun=Torchrun(),
        refused={SIM: "simulated nodes meet in a store of their own"},
    ),
    Option(
        "rdzv_conf",
        RENDEZVOUS,
        TEXT,
        "Settings of the rendezvous and its store, such as join_timeout=600, lease_ttl=5, "
        "cacert=FILE. No effect on one node.",
        metavar="KEY=VALUE,...",
        default="",
        default_shown="none",
        torchrun=Torchrun(),
    ),
    Option(
        "local_addr",
        RENDEZVOUS,
        TEXT,
        "Address under which other nodes reach this node, or the name of its interface.",
        metavar="HOST",
        default_shown="the one that packets to the endpoint leave from",
        torchrun=Torchrun(),
        refused={RAY: "every agent finds its own"},
    ),
    Option(
        "spares",
        RENDEZVOUS,
        INTEGER,
        "Number of spare nodes, which replace lost nodes.",
        metavar="N",
        least=0,
        default=0,
    ),
    Option(
        "node_topology",
        RENDEZVOUS,
        TEXT,
        "Place of this node, such as rack7.switch2.node12. Ranks follow this order, so "
        "neighbours are near each other.",
        metavar="TEXT",
        default="",
        default_shown="none",
        variables=("SLURM_TOPOLOGY_ADDR",),
    ),
    Option(
        "node_check",
        RENDEZVOUS,
        TEXTS,
        "Command that must succeed before this node takes part in a round. gpu: memory, "
        "clocks and a matrix product of each GPU. Repeatable.",
        metavar="COMMAND",
        default_shown="disk, memory and clock, on several nodes",
        refused={SIM: "simulated nodes are always fit"},
    ),
    Option(
        "virtual_clock",
        SIMULATED,
        FLAG,
        "Python's time functions and CUDA events show virtual time only.",
        python=Argument(
            "bool",
            "let the functions of `time` tell simulated ranks virtual time alone.",
            default=False,
        ),
        only=SIM,
    ),
    Option(
        "timing_only",
        SIMULATED,
        FLAG,
        "Compute nothing: tensors have no data, each rank has a modelled CUDA device, and the "
        "time and the memory are those of the machine. See docs/howto/predict.md.",
        python=Argument(
            "bool",
            "compute nothing on `sim:MACHINE`: tensors have no data, each rank has a modelled "
            "CUDA device, and its time and memory are predicted (docs/howto/predict.md). "
            "Ranks that do the same are run once: the result of one that did not run is None.",
            default=False,
        ),
        only=SIM,
        needs=MACHINE,
    ),
    Option(
        "every_rank",
        SIMULATED,
        FLAG,
        "Run each rank of --timing-only. Otherwise rank 0 and another one stand for all, as "
        "long as they do the same.",
        python=Argument("bool", "run all of them then.", default=False),
        only=SIM,
        needs=TIMING_ONLY,
    ),
    Option(
        "values",
        SIMULATED,
        TEXT,
        "What a program gets with --timing-only that asks for a number: constant=NUMBER, "
        "seeded, or a file of --record-values. Without it: 1.0 and false, and an error where "
        "the number may decide a shape.",
        metavar="POLICY",
        default="",
        default_shown="1.0 and false",
        python=Argument(
            "str",
            'what a program gets then that asks for a number: `"constant=NUMBER"`, '
            '`"seeded"`, or a file.',
            default="",
        ),
        only=SIM,
        needs=TIMING_ONLY,
    ),
    Option(
        "synthetic_data",
        SIMULATED,
        FLAG,
        "Data loaders of PyTorch do not run with --timing-only: each repeats its first batch.",
        python=Argument(
            "bool", "let data loaders of PyTorch repeat their first batch then.", default=False
        ),
        only=SIM,
        needs=TIMING_ONLY,
    ),
    Option(
        "tokens_per_step",
        SIMULATED,
        INTEGER,
        "Tokens of a step on all ranks together, for the tokens/s of a prediction. Otherwise "
        "the indices that embeddings look up are counted.",
        metavar="N",
        least=1,
        default_shown="counted",
        python=Argument(
            "int | None",
            "of all ranks together, for the tokens/s of a prediction; None counts them.",
            default=None,
        ),
        only=SIM,
        needs=MACHINE,
    ),
    Option(
        "record_values",
        SIMULATED,
        TEXT,
        "File for the numbers that rank 0 asks for, such as loss.item(), on a small run with "
        "real tensors; --values reads it. Needs --on sim:MACHINE.",
        metavar="FILE",
        only=SIM,
        refused={TIMING_ONLY: "it computes no values", SWEEP: _FOR_ONE_RUN},
        needs=MACHINE,
    ),
    Option(
        "prediction",
        SIMULATED,
        TEXT,
        "File for the predicted figures, as JSON; needs --on sim:MACHINE.",
        metavar="FILE",
        python=Argument(
            "str | os.PathLike[str] | None",
            "file for the predicted figures, as JSON.",
            default=None,
        ),
        only=SIM,
        refused={SWEEP: _FOR_ONE_RUN},
        needs=MACHINE,
    ),
    Option(
        "sweep",
        SIMULATED,
        TEXTS,
        "Predict once per value, on all cores; several sweeps give every combination. A value "
        "replaces {KEY} in the script's arguments, or is added as --KEY VALUE. The keys "
        "machine, nproc-per-node and nnodes are rankwise's own. --report then has plots. "
        "Repeatable.",
        metavar="KEY=A,B,C",
        default_shown="one run",
        only=SIM,
    ),
    Option(
        "results",
        SIMULATED,
        FILE,
        "With --sweep: keep each result in FILE, and run only what it lacks.",
        metavar="FILE",
        only=SIM,
        needs=SWEEP,
    ),
    Option(
        "format",
        SIMULATED,
        CHOICE,
        "Format of the table of --sweep.",
        choices=("table", "csv", "json"),
        default="table",
        only=SIM,
        needs=SWEEP,
    ),
    Option(
        "schedule",
        SIMULATED,
        CHOICE,
        "Order of ranks and messages: as they become ready, or random from --seed.",
        choices=("queue", "random"),
        default="queue",
        python=Argument(
            "ScheduleName",
            "`random` draws from `seed` which simulated rank runs next, and which message is "
            "received first; `queue` takes them in the order in which they are ready.",
            default="queue",
        ),
        only=SIM,
        decides=ORDER,
    ),
    Option(
        "seed",
        SIMULATED,
        INTEGER,
        "Seed of --schedule random, --explore, and random states that the program does not seed.",
        metavar="N",
        least=0,
        default=0,
        python=Argument("int", "of everything random on simulated ranks, at least 0.", default=0),
        only=SIM,
    ),
    Option(
        "explore",
        SIMULATED,
        INTEGER,
        "Run the program with N different schedules, or with all if fewer. Output is hidden. "
        "A failure is shown with the command that replays it.",
        metavar="N",
        least=1,
        default_shown="one run",
        python=Argument(
            "int | None",
            "run `fn` with so many different schedules, or with all if there are fewer, until "
            "each has been tried. Results are those of the last run. A schedule that fails in "
            "a new way is written to a file in the working directory.",
            default=None,
        ),
        only=SIM,
        refused={TIMING_ONLY: "it has one order", SWEEP: _FOR_ONE_RUN},
        decides=ORDER,
    ),
    Option(
        "replay",
        SIMULATED,
        TEXT,
        "Run with the schedule that --explore has written to FILE.",
        metavar="FILE",
        python=Argument(
            "str | os.PathLike[str] | None",
            "such a file: run with the schedule in it.",
            default=None,
        ),
        only=SIM,
        refused={SWEEP: _FOR_ONE_RUN},
        decides=ORDER,
    ),
    Option(
        "device",
        SIMULATED,
        CHOICE,
        "cuda models a CUDA device for each rank on the CPU, for PyTorch scripts that need one.",
        choices=("cpu", "cuda"),
        default="cpu",
        python=Argument(
            "DeviceName",
            "`cuda` models a CUDA device for each simulated rank, for programs of PyTorch.",
            default="cpu",
        ),
        only=SIM,
    ),
    Option(
        "import_per_rank",
        SIMULATED,
        TEXTS,
        "Installed package that each simulated rank imports for itself, because it keeps the "
        "rank's state in globals. Repeatable.",
        metavar="PACKAGE",
        default_shown="accelerate, deepspeed, megatron, torchtitan, transformers",
        only=SIM,
    ),
    Option(
        "faults",
        SIMULATED,
        TEXTS,
        "Faults of ranks, nodes and chips, such as kill:rank=3@collective=9, "
        "slow:rank=2,by=10ms, kill:node=1,at=10s,back_after=30s or "
        "slow:link=sip0-sip1,times=4. Repeatable. See docs/howto/faults.md.",
        metavar="FAULT|PLAN.yaml",
        python=Argument(
            "str | Sequence[str]",
            'of simulated ranks, such as `"kill:rank=3@collective=9"`, or the name of a YAML '
            "file; one or several (docs/howto/faults.md).",
            default=(),
        ),
        only=SIM,
    ),
    Option(
        "monitor_interval",
        COMPATIBILITY,
        NUMBER,
        "Accepted, without effect: rankwise does not poll workers.",
        metavar="SECONDS",
        least=0,
        default=0.1,
        torchrun=Torchrun(help="Seconds between two questions to the rendezvous."),
    ),
    Option(
        "event_log_handler",
        COMPATIBILITY,
        TEXT,
        "Handler of rankwise.compat.torch.elastic.events for the run's events: null, console, "
        "or a plug-in.",
        metavar="NAME",
        default="null",
        torchrun=Torchrun(),
    ),
)
"""In the order of the help."""

ONLY_IN_PYTHON: tuple[Argument, ...] = (
    Argument(
        "ForkServer | None",
        "a warm fork server to use instead of a new one; it has made its own preloads.",
        default=None,
        name="server",
    ),
    Argument(
        "Mapping[str, str] | None",
        "variables to add; not those that tell a rank its place, such as RANK or MASTER_PORT, "
        "which rankwise sets itself.",
        default=None,
        name="env",
    ),
)


def options_needing(what: str) -> Iterator[Option]:
    """The options that mean nothing without `MACHINE`, `TIMING_ONLY` or `SWEEP`."""
    return (option for option in OPTIONS if option.needs == what)


def options_refused(world: str) -> Iterator[Option]:
    """The options that are refused there."""
    return (option for option in OPTIONS if world in option.refused)


def options_deciding(what: str) -> Iterator[Option]:
    """The options of which one may be given, at most."""
    return (option for option in OPTIONS if option.decides == what)


def options_that_are_positive() -> Iterator[Option]:
    """The times of which 0 is refused."""
    return (option for option in OPTIONS if option.is_positive)


def option_named(name: str) -> Option:
    """The row with that Python name."""
    return next(option for option in OPTIONS if option.name == name)


def default_of(name: str) -> Any:
    """The value of an option that is not given."""
    return option_named(name).initial
