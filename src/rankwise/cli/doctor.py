"""`rankwise doctor`: does this machine have what rankwise needs?

Each check examines one thing, and reports the finding and, if something is wrong, what to do. A
*problem* means that runs will fail, a *warning* that a feature will be missing or slow.
"""

import ctypes
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable
from enum import StrEnum
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from shutil import which
from typing import NamedTuple

import click

from rankwise.cli.main import CONTEXT_SETTINGS

_PR_GET_CHILD_SUBREAPER = 37
_OPEN_FILES_WANTED = 4096
_PROCESSES_WANTED = 4096
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # it is looked at, not written to
_SHARED_MEMORY_WANTED = 256 * 2**20
_LINUX_WANTED = (5, 4)


class Severity(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class CheckResult(NamedTuple):
    """What a check found."""

    subject: str
    verdict: Severity
    text: str


@click.command("doctor", context_settings=CONTEXT_SETTINGS)
def doctor() -> int:
    """Check this machine for what rankwise needs; exit 1 if there are problems."""
    findings = [check() for check in CHECKS]
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        click.echo(f"{finding.verdict:<7}  {finding.subject:<{width}}  {finding.text}")
    return int(any(finding.verdict is Severity.PROBLEM for finding in findings))


def check_python(
    version: tuple[int, int] = (sys.version_info.major, sys.version_info.minor),
) -> CheckResult:
    """Python is recent enough, and has what the guardian is made of."""
    shown = f"{version[0]}.{version[1]} at {sys.executable}"
    if version < (3, 11):
        return CheckResult("Python", Severity.PROBLEM, f"{shown}; install Python 3.11 or newer")
    return CheckResult("Python", Severity.OK, shown)


def check_kernel(release: str | None = None) -> CheckResult:
    """Linux is recent enough for everything below."""
    release = os.uname().release if release is None else release
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    if sys.platform != "linux":
        return CheckResult(
            "kernel", Severity.PROBLEM, f"{sys.platform}; rankwise runs on Linux only"
        )
    if version < _LINUX_WANTED:
        return CheckResult("kernel", Severity.PROBLEM, f"Linux {release}; 5.4 or newer is needed")
    return CheckResult("kernel", Severity.OK, f"Linux {release}")


def check_pidfd() -> CheckResult:
    """Processes can be waited for and signalled without mistaking one for another."""
    return _check_call("pidfd", lambda: os.close(os.pidfd_open(os.getpid())), "waits for processes")


def check_memfd() -> CheckResult:
    """Memory can be shared without a name."""
    return _check_call(
        "memfd", lambda: os.close(os.memfd_create("rankwise-doctor")), "shares memory"
    )


def check_subreaper() -> CheckResult:
    """Orphans can be adopted, so that none escapes."""

    def ask_kernel() -> None:
        answer = ctypes.c_int()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    return _check_call("subreaper", ask_kernel, "finds orphans")


def check_abstract_sockets() -> CheckResult:
    """`rankwise ps` and `rankwise stacks` can reach a run."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(b"\0rankwise-doctor/%d" % os.getpid())
    except OSError as error:
        text = f"abstract unix sockets do not work ({error}); ps and stacks will find no runs"
        return CheckResult("control", Severity.WARNING, text)
    return CheckResult("control", Severity.OK, "runs can be asked for their status and stacks")


def check_proc(root: str = "") -> CheckResult:
    """/proc is mounted and shows our own processes."""
    from rankwise.drivers.real.proc import MOUNT_COMMAND, proc_lack  # noqa: PLC0415  # only here

    if (lack := proc_lack(root)) is not None:
        return CheckResult("/proc", Severity.PROBLEM, f"{lack}; mount it: {MOUNT_COMMAND}")
    if not Path(f"{root}/proc/self/task/{os.getpid()}/children").exists():
        text = "does not list children (CONFIG_PROC_CHILDREN); finding strays takes longer"
        return CheckResult("/proc", Severity.WARNING, text)
    return CheckResult("/proc", Severity.OK, "mounted")


def check_open_files(limit: int | None = None) -> CheckResult:
    """Enough descriptors: each worker costs the agent a handful."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    return _check_limit("open files", soft, _OPEN_FILES_WANTED, "ulimit -n")


def check_processes(limit: int | None = None) -> CheckResult:
    """Enough processes and threads."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0] if limit is None else limit
    return _check_limit("processes", soft, _PROCESSES_WANTED, "ulimit -u")


def check_cpus(root: str = "") -> CheckResult:
    """How many CPUs ranks may use, and what limits them."""
    from rankwise.drivers.real.cpus import tightest_quota, usable_cpu_count  # noqa: PLC0415  # only here

    usable, present = usable_cpu_count(root), os.cpu_count() or 1
    if usable == present:
        return CheckResult("CPUs", Severity.OK, f"{usable}")
    text = f"{usable} of {present} may be used"
    quota = tightest_quota(root)
    if quota is not None and quota.cpus < len(os.sched_getaffinity(0)):
        return CheckResult("CPUs", Severity.OK, f"{text}: a quota of {quota.cpus:g} ({quota.file})")
    return CheckResult("CPUs", Severity.OK, f"{text}: the affinity allows no others")


def check_shared_memory(folder: Path = _SHARED_MEMORY) -> CheckResult:
    """Room for torch's data loaders, which is what usually runs out in containers."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        text = f"missing ({error.strerror}); data loaders with workers will fail: mount a tmpfs"
        return CheckResult(str(_SHARED_MEMORY), Severity.WARNING, text)
    free = room.f_bavail * room.f_frsize
    shown = f"{free / 2**20:.0f} MiB free"
    if not os.access(folder, os.W_OK):
        return CheckResult(
            str(_SHARED_MEMORY), Severity.WARNING, "not writable; see its permissions"
        )
    if free < _SHARED_MEMORY_WANTED:
        text = f"{shown}; data loaders may need more: start the container with --shm-size=8g"
        return CheckResult(str(_SHARED_MEMORY), Severity.WARNING, text)
    return CheckResult(str(_SHARED_MEMORY), Severity.OK, shown)


def check_memory_accounting(root: str = "") -> CheckResult:
    """Whether a SIGKILL by the kernel's out-of-memory killer can be told from other ones."""
    from rankwise.drivers.real.oom import find_memory_group  # noqa: PLC0415  # only here

    group = find_memory_group(root)
    if group is None:
        text = (
            "no cgroup with memory accounting is visible; reports cannot name the sender of SIGKILL"
        )
        return CheckResult("OOM", Severity.WARNING, text)
    place = group.directories[0]
    return CheckResult("OOM", Severity.OK, f"out-of-memory kills are visible ({place})")


def check_stacks_signal() -> CheckResult:
    """The signal on which workers print their stacks is free for it."""
    number = signal.SIGRTMIN + 6
    if signal.getsignal(number) not in (signal.SIG_DFL, None):
        return CheckResult(
            "stacks", Severity.WARNING, f"signal {number} (SIGRTMIN+6) is taken here"
        )
    return CheckResult(
        "stacks", Severity.OK, f"signal {number} (SIGRTMIN+6) asks workers for stacks"
    )


def check_torch() -> CheckResult:
    """Torch is optional; its version, and what the ledger needs of it, are known without import."""
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415  # slow

    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return CheckResult("torch", Severity.OK, "not installed; only torch programs need it")
    source = Path(str(torch.locate_file("torch/distributed/distributed_c10d.py")))
    missing = _missing_for_ledger(source)
    if missing:
        text = f"{torch.version}; the ledger of collectives will be off: {source} has no {missing}"
        return CheckResult("torch", Severity.WARNING, text)
    return CheckResult("torch", Severity.OK, torch.version)


def _missing_for_ledger(source: Path) -> str:
    """What the module of torch that the ledger enters its calls in does not define, with commas."""
    from rankwise.drivers.real.worker import torch_calls  # noqa: PLC0415  # rare

    try:
        text = source.read_text("utf-8", "replace")
    except OSError:  # imported from elsewhere: the run will tell
        return ""
    names = (*torch_calls.NAMES_NEEDED, *torch_calls.WORLD_NAMES_NEEDED)
    defined = re.compile(r"^ *(?:def )?(\w+)(?:\(|:| *=)", re.MULTILINE)
    return ", ".join(sorted(set(names) - set(defined.findall(text))))


def check_own_etcd(path: str | None = None) -> CheckResult:
    """Whether this machine can run a member of a run's own etcd, which is optional."""
    from rankwise.drivers.real.hosting.signal_shield import can_ignore_for_good  # noqa: PLC0415  # slow
    from rankwise.launch.cluster.etcd_program import own_etcd_lack  # noqa: PLC0415  # the same

    path = os.environ.get("PATH", "") if path is None else path
    if which("etcd", path=path) is None:
        return CheckResult("etcd", Severity.OK, "not in PATH; only --rdzv-own-etcd needs it")
    if (lack := own_etcd_lack(path)) is not None:
        return CheckResult(
            "etcd", Severity.WARNING, f"--rdzv-own-etcd is not for this machine: {lack}"
        )
    if not can_ignore_for_good():
        text = (
            "seccomp is refused: a SIGTERM to the whole job (scancel, systemd) also ends an etcd of"
            " --rdzv-own-etcd, and ranks may be unable to save; allow seccomp in the sandbox's"
            " filter"
        )
        return CheckResult("etcd", Severity.WARNING, text)
    return CheckResult("etcd", Severity.OK, "can be a member of a run's own (--rdzv-own-etcd)")


def check_gpus() -> CheckResult:
    """Whether reports, `top` and metrics can tell of GPUs."""
    from rankwise.base.errors import ConfigError  # noqa: PLC0415  # as above
    from rankwise.drivers.real.gpus import require_gpus  # noqa: PLC0415  # the same
    from rankwise.drivers.real.proc import may_have_gpus  # noqa: PLC0415  # the same

    if not may_have_gpus():
        return CheckResult("GPUs", Severity.OK, "none of NVIDIA's")
    try:
        names = [each.name for each in require_gpus().read()]
    except ConfigError as error:
        return CheckResult("GPUs", Severity.WARNING, f"{error.message}: {error.hint}")
    return CheckResult("GPUs", Severity.OK, f"{len(names)}: {', '.join(dict.fromkeys(names))}")


def check_terminal() -> CheckResult:
    """What the console output will look like."""
    if not sys.stderr.isatty():
        return CheckResult("terminal", Severity.OK, "stderr is not a terminal: no colours")
    if (sys.stderr.encoding or "").lower().replace("-", "") != "utf8":
        text = f"encoding is {sys.stderr.encoding}; boxes need UTF-8: set LANG=C.UTF-8"
        return CheckResult("terminal", Severity.WARNING, text)
    if os.environ.get("TERM", "dumb") == "dumb":
        return CheckResult("terminal", Severity.WARNING, "TERM is not set or dumb: no colours")
    return CheckResult("terminal", Severity.OK, os.environ["TERM"])


def check_simulator(package: Path = Path(__file__).parent.parent) -> CheckResult:
    """Whether the simulator's kernel was compiled when rankwise was installed."""
    kernel = package / "sim" / "kernel"
    if any((kernel / f"simulator{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return CheckResult("simulator", Severity.OK, "its kernel is compiled")
    text = "its kernel is plain Python (RANKWISE_COMPILED=1 pip install compiles it)"
    return CheckResult("simulator", Severity.OK, text)


CHECKS: tuple[Callable[[], CheckResult], ...] = (
    check_python,
    check_kernel,
    check_pidfd,
    check_memfd,
    check_subreaper,
    check_abstract_sockets,
    check_proc,
    check_open_files,
    check_processes,
    check_cpus,
    check_shared_memory,
    check_memory_accounting,
    check_stacks_signal,
    check_torch,
    check_gpus,
    check_own_etcd,
    check_simulator,
    check_terminal,
)


def _check_call(subject: str, call: Callable[[], None], what_for: str) -> CheckResult:
    try:
        call()
    except (OSError, AttributeError) as error:
        text = f"refused ({error}); rankwise {what_for} with it: allow it in the sandbox's filter"
        return CheckResult(subject, Severity.PROBLEM, text)
    return CheckResult(subject, Severity.OK, "works")


def _check_limit(subject: str, limit: int, wanted: int, command: str) -> CheckResult:
    if limit == resource.RLIM_INFINITY:
        return CheckResult(subject, Severity.OK, "no limit")
    if limit < wanted:
        text = f"at most {limit}; many ranks may need more: {command} {wanted}"
        return CheckResult(subject, Severity.WARNING, text)
    return CheckResult(subject, Severity.OK, f"at most {limit}")
