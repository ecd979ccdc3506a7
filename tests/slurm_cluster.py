"""A real SLURM for tests: a controller and some nodes, all on this host.

Each node has an address, a host name, process ids and a slurmd of its own, by the kernel's
namespaces. So a node can be lost with everything on it: its cable is pulled out, and its slurmd,
which is process 1 there, is killed; the kernel then kills all others. The controller has the
test's own network. Everything that the daemons read and write lies in one folder.

Nothing is polled: a daemon is up when it says so, and srun itself waits for the nodes.

SLURM gives a job whichever nodes are free first: one that has not registered yet, or that still
cleans up after another job, is passed over. So that a test knows its nodes, there are as many as
its job needs, and the spare one is off until a test starts it.
"""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from etcd_servers import free_ports
from nodes_in_namespaces import Network, Node, may_make_namespaces, network
from running import PATIENCE_S, Finished, Running

CONTROLLER = "controller"
_PROGRAMS = (
    "munged",
    "mungekey",
    "slurmctld",
    "slurmd",
    "srun",
    "sbatch",
    "scancel",
    "scontrol",
    "squeue",
)
_FOLDERS = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing_for_slurm() -> str | None:
    """Why there can be no SLURM here."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_FOLDERS) is None]
    if absent:
        return f"there is no {absent[0]}: make slurm installs SLURM"
    if not may_make_namespaces():
        return "nodes of their own need root and network namespaces"
    return None


_MISSING = missing_for_slurm()
needs_slurm = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))


class _Daemon:
    """A process of SLURM's that stays in the foreground, and whose log is read for a word."""

    def __init__(self, words: Sequence[str | Path], up: str, log: Path) -> None:
        self._log = log
        self._up = up
        self._is_up = threading.Event()
        self._process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_up(self) -> None:
        assert self._is_up.wait(PATIENCE_S), f"{self._log} does not say {self._up!r}"
        assert self._process.poll() is None, f"it has ended:\n{self._log.read_text()[-2000:]}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, signum: int) -> None:
        self._process.send_signal(signum)
        self.wait_over()

    def wait_over(self) -> None:
        self._process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("a") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                if self._up in line:
                    self._is_up.set()
        self._is_up.set()


class SlurmNode:
    """A machine of the cluster."""

    def __init__(self, name: str, node: Node, folder: Path, hosts: Path) -> None:
        self.name = name
        self.address = node.address
        self._node = node
        self._folder = folder
        self._hosts = hosts
        self._daemon: _Daemon | None = None

    def start(self) -> None:
        (self._folder / f"spool.{self.name}").mkdir(exist_ok=True)
        # In namespaces of its own the first process is PID 1: its end is the end of all others.
        inside = (
            f"hostname {self.name} && mount --bind {self._hosts} /etc/hosts &&"
            f" exec {_program('slurmd')} -D -f {self._folder}/slurm.conf"
        )
        self._daemon = _Daemon(
            (
                *("ip", "netns", "exec", self._node.name),
                *("unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc"),
                *("--kill-child", "sh", "-c", inside),
            ),
            "slurmd started",
            self._folder / f"slurmd.{self.name}.log",
        )

    def wait_up(self) -> None:
        assert self._daemon is not None
        self._daemon.wait_up()

    def lose(self) -> None:
        """Let nothing leave this machine any more, and nothing on it live: a power cut."""
        self._node.pull_out()
        self.stop()

    def stop(self) -> None:
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            # unshare ends when it has, and that is when nothing lives in its namespace any more.
            for slurmd in (
                Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
            ):
                os.kill(int(slurmd), signal.SIGKILL)
            daemon.wait_over()

    def agents(self) -> list[int]:
        """What srun has started on this machine, by the ids that the test's own /proc shows."""
        here = Path(f"/run/netns/{self._node.name}").stat().st_ino
        return [pid for pid in _tasks_of_steps() if _network_of(pid) == here]


class SlurmCluster:
    """The controller, its nodes, a spare one that is off, and SLURM's commands."""

    def __init__(self, folder: Path, stack: ExitStack, node_count: int) -> None:
        self._folder = folder
        lan: Network = stack.enter_context(network())
        places = [lan.add_node() for _ in range(node_count + 1)]
        hosts = folder / "hosts"
        *self.nodes, self.spare = (
            SlurmNode(f"node{number}", place, folder, hosts)
            for number, place in enumerate(places, start=1)
        )
        lines = [f"{each.address} {each.name}" for each in (*self.nodes, self.spare)]
        hosts.write_text(
            "\n".join([f"127.0.0.1 localhost\n{lan.address} {CONTROLLER}", *lines, ""])
        )
        (folder / "slurm.conf").write_text(self._configuration(lan.address))
        # Or slurmd looks for the cgroups of its host.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "state").mkdir()

        munged = self._start_munge()
        stack.callback(munged.end, signal.SIGTERM)
        controller = _Daemon(
            (
                *("unshare", "--uts", "sh", "-c"),
                f"hostname {CONTROLLER} && exec {_program('slurmctld')} -D -f {folder}/slurm.conf",
            ),
            "Running as primary controller",
            folder / "slurmctld.log",
        )
        stack.callback(controller.end, signal.SIGKILL)
        controller.wait_up()
        stack.callback(self.spare.stop)
        for node in self.nodes:
            stack.callback(node.stop)
            node.start()
        for node in self.nodes:
            node.wait_up()

    def command(self, name: str, *words: str | Path, **environment: str) -> Running:
        """Start one of SLURM's commands, with these variables, which it hands on to a job."""
        environment["SLURM_CONF"] = str(self._folder / "slurm.conf")
        return Running(_program(name), *map(str, words), environment=environment, cwd=self._folder)

    def do(self, name: str, *words: str) -> str:
        """Run one of SLURM's commands, which must succeed; return what it says."""
        with self.command(name, *words) as running:
            done: Finished = running.finish()
        assert done.code == 0, done
        return done.stdout

    def _start_munge(self) -> _Daemon:
        key = self._folder / "munge.key"
        subprocess.run([_program("mungekey"), "--create", f"--keyfile={key}"], check=True)
        daemon = _Daemon(
            (
                *(_program("munged"), "--foreground", "--force", f"--key-file={key}"),
                *(f"--socket={self._folder}/munge", f"--pid-file={self._folder}/munge.pid"),
                *(f"--seed-file={self._folder}/munge.seed", "--num-threads=2"),
            ),
            "Created",
            self._folder / "munged.log",
        )
        daemon.wait_up()
        return daemon

    def _configuration(self, address: str) -> str:
        folder = self._folder
        names = "\n".join(
            f"NodeName={each.name} NodeAddr={each.address} CPUs=2 State=UNKNOWN"
            for each in (*self.nodes, self.spare)
        )
        return f"""
ClusterName=trial
SlurmctldHost={CONTROLLER}({address})
SlurmctldPort={free_ports(1)[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
CredType=cred/munge
# It sends a step's SIGTERM to every process of it, and not to rankwise alone.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/spool.%n/pid
# How soon it takes a node for lost, and how long scancel waits before it kills.
SlurmdTimeout=4
KillWait=20
MessageTimeout=4
TCPTimeout=2
ReturnToService=2
MpiDefault=none
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
{names}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm_cluster(folder: Path, node_count: int) -> Iterator[SlurmCluster]:
    """A cluster of so many nodes that is up, with no job in it."""
    with ExitStack() as stack:
        yield SlurmCluster(folder, stack, node_count)


def _tasks_of_steps() -> Iterator[int]:
    """Processes whose parent is a slurmstepd, without those that became no program yet."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = _stat(path)[1]
            if _name(Path(f"/proc/{parent}")) == "slurmstepd" != _name(path):
                yield int(path.name)
        except OSError:  # it ended meanwhile
            continue


def _stat(process: Path) -> list[str]:
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _name(process: Path) -> str:
    return (process / "comm").read_text(errors="replace").strip()


def _network_of(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return None


def _program(name: str) -> str:
    path = shutil.which(name, path=_FOLDERS)
    assert path is not None, name
    return path
