"""What a run is, as values: the program, its logs, how it is started, how it is supervised.

The command line, `rankwise.run`, `rankwise.spawn` and torch's names all build a `Job`; only
`rankwise.launch.run.supervision` reads one.
"""

from collections.abc import Mapping
from enum import IntFlag, StrEnum
from typing import Literal

import msgspec

from rankwise.base.units import Duration
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.core.rendezvous.configuration import RestartPolicy
from rankwise.launch.cluster.plan import RendezvousPlan, plan_alone

StartMethodName = Literal["forkserver", "spawn", "fork"]
"""How the workers of a Python function may be made."""


class Script(msgspec.Struct, frozen=True, tag=True):
    """A Python file, run as `__main__` by a Python interpreter.

    Attributes:
        source: the program itself where it came through standard input; `path` is then `-`.
    """

    path: str
    args: tuple[str, ...] = ()
    source: bytes | None = None


class Module(msgspec.Struct, frozen=True, tag=True):
    """A Python module, run as `python -m` does."""

    name: str
    args: tuple[str, ...] = ()


class Executable(msgspec.Struct, frozen=True, tag=True):
    """Any program: a shell script, a binary. Looked up in PATH when it has no slash.

    Attributes:
        path: the program.
        args: its arguments, with torchrun's macro `${local_rank}`.
        args_by_rank: the arguments of single local ranks instead, taken as they are.
    """

    path: str
    args: tuple[str, ...] = ()
    args_by_rank: Mapping[int, tuple[str, ...]] = {}


class Function(msgspec.Struct, frozen=True, tag=True):
    """A Python function with its arguments, pickled; its return value is the worker's result.

    Attributes:
        name: how reports call it.
        payload: as `pack_function` makes it.
    """

    name: str
    payload: bytes


Program = Script | Module | Executable | Function


class StartMethod(StrEnum):
    """How a worker's process comes into being."""

    SUBPROCESS = "subprocess"
    """A fresh process per worker for scripts, modules and executables."""
    SPAWN = "spawn"
    """A fresh interpreter per worker, for functions too."""
    FORKSERVER = "forkserver"
    """One process imports what the workers need, then forks them."""
    AUTO = "auto"
    """As `FORKSERVER` with the modules of `preload` if ranks cannot tell, else as `SUBPROCESS`."""


class Streams(IntFlag):
    """Which of a worker's two output streams; the numbers are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


StreamChoice = Streams | Mapping[int, Streams]
"""One choice for all workers, or one per local rank (missing ranks: NONE)."""


class LogPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where the workers' output goes.

    Every stream is pumped by the agent, so lines are whole on the console and a full disk never
    reaches a worker. A stream that is neither redirected nor tee'd goes to the console only.

    Attributes:
        directory: where log files go; None makes a directory in the system's place for temporary
            files, kept only when log files were asked for; `os.devnull` makes no files at all.
        redirects: streams that go to a file instead of the console.
        tee: streams that go to both; wins over `redirects`.
        console_ranks: local ranks whose output reaches the console; None means all.
        stdout_filters: console lines of stdout that contain one of these also go to
            `filtered_stdout.log`; likewise `stderr_filters`.
        prefix_template: `string.Template` with `${role_name}`, `${local_rank}`, `${rank}`,
            `${date}`, `${time}`; None means `[${role_name}${local_rank}]:`, and the empty string no
            prefix.
        tee_prefixes: what stands before the tee'd lines of single local ranks instead.
        file_bytes_max: how long a log file of a rank may get before it is put aside as `NAME.1` and
            another one is begun; None for as long as it gets.
        log_specs: name of a plug-in of the entry-point group `torchrun.logs_specs` that decides
            about files instead (loaded by the command line); None means rankwise's own layout.
    """

    directory: str | None = None
    redirects: StreamChoice = Streams.NONE
    tee: StreamChoice = Streams.NONE
    console_ranks: frozenset[int] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix_template: str | None = None
    tee_prefixes: Mapping[int, str] = {}
    file_bytes_max: int | None = None
    log_specs: str | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one run on one node needs to know.

    Attributes:
        program: what every worker runs.
        gang: how many workers, grace, hang timeout.
        policy: which failures the run survives, unless `cluster` has a policy of its own.
        cluster: how this node meets others, and which failures the job survives. None: the only
            node, with `policy`.
        run_id: the run's name, shown to users and exported as TORCHELASTIC_RUN_ID.
        role: the workers' role, for prefixes and ROLE_NAME.
        start_method: how processes are made.
        preload: modules that the fork server imports; None lets rankwise choose the ones that the
            program certainly imports and that lie outside the user's own code. With `AUTO`, None
            means that there are none, and no fork server.
        python: interpreter for `Script` and `Module`.
        environment: variables added for every worker; `environment_by_rank` adds to single ones.
        rank_variables: whether workers find their place in RANK, WORLD_SIZE and torchrun's other
            variables; otherwise `environment_by_rank` says whatever they are to know.
        master_addr, master_port: where rank 0 listens; None reserves a free port.
        master_bind: the address of this machine where that port is reserved.
        logs: where output goes.
        journal_fd: an open file for the run's journal; None: it goes beside the logs, if the user
            has named a place for them.
        on_failure: a command for the shell that is told of failures, see `launch.failure_command`.
        timeout: how long the whole run may take, restarts included; None: as long as it takes.
        keep_children: whether processes that ranks have left running live on when all ranks have
            ended well.
        signals: signal numbers that end the run gracefully.
        heeds_all_signals: whether the run decides what all other signals do, too, that would end
            this process: for a process that is nothing but the run. See `launch.signal_effects`.
        passed_signals: those of them that ranks are sent which catch them.
        virtual_local_rank: every worker sees LOCAL_RANK=0 and one device.
        cpus_by_rank: CPUs that each local rank is bound to; None leaves them alone.
        handle_signals: install handlers while the run lasts (only ever from the main thread).
        console: whether rankwise itself says anything on stderr (restarts, reports).
        verbose: whether it also says how the ranks are started.
        log_format: how it says that: `text`, or `json`, an object per line.
    """

    program: Program
    gang: GangSpec
    policy: RestartPolicy = RestartPolicy()
    cluster: RendezvousPlan | None = None
    run_id: str
    role: str = "default"
    start_method: StartMethod = StartMethod.SUBPROCESS
    preload: tuple[str, ...] | None = None
    python: str = ""
    environment: Mapping[str, str] = {}
    environment_by_rank: Mapping[int, Mapping[str, str]] = {}
    rank_variables: bool = True
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    master_bind: str = "127.0.0.1"
    logs: LogPlan = LogPlan()
    journal_fd: int | None = None
    on_failure: str | None = None
    timeout: Duration | None = None
    keep_children: bool = False
    signals: tuple[int, ...] = (15, 2, 1, 3)
    heeds_all_signals: bool = False
    passed_signals: tuple[int, ...] = ()
    virtual_local_rank: bool = False
    cpus_by_rank: Mapping[int, frozenset[int]] | None = None
    handle_signals: bool = True
    console: bool = True
    verbose: bool = False
    log_format: str = "text"

    @property
    def is_automatic(self) -> bool:
        """Whether its ranks come from a fork server that rankwise itself chose."""
        return self.start_method is StartMethod.AUTO and bool(self.preload)

    @property
    def plan(self) -> RendezvousPlan:
        """How its nodes meet; without one, a node is alone, with the job's policy."""
        return self.cluster or plan_alone(self.policy, self.master_addr)

    @property
    def restarts_allowed(self) -> int:
        """How often all workers may be started again after a failure."""
        policy = self.policy if self.cluster is None else self.cluster.rendezvous.policy
        return policy.restarts_max

    @property
    def program_name(self) -> str:
        """How the user calls what runs."""
        match self.program:
            case Script(source=bytes()):
                return "the program on standard input"
            case Script(path=path) | Executable(path=path):
                return path
            case Module(name=name):
                return f"-m {name}"
            case Function(name=name):
                return name
