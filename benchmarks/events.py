"""What becomes of a job of three nodes when something happens to it, beside torchrun.

    python benchmarks/events.py [--quick] [--only PARTS] [--json FILE]

PARTS are some of kill,leader,cut,stop,term,store,etcd,strangers,slurm.
Each node is a network namespace, so that its cable can be pulled out: that needs root. rankwise
meets in a real etcd (its `embedded` store where the loss of the store's machine is played),
torchrun in its own c10d store, on the first node. Nobody's defaults are changed, but for
`--nnodes 2:3 --max-restarts 3`. The ranks import nothing, so what torch would take is on no side.

A time is that from the event (or from its end, where it is said so) until the last rank of the next
round is up, or until the last agent has ended. Without root, etcd, torch or SLURM their parts are
left out.
"""

import http.client
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from threading import Event
from typing import NamedTuple

from measuring import (
    HAS_TORCH,
    RANKWISE,
    TORCHRUN,
    Table,
    arguments,
    describe_machine,
    scratch_directory,
)

_TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "system" / "cluster")]

import running  # noqa: E402
from etcd_servers import EtcdCluster, EtcdMember, etcd_cluster, find_etcd  # noqa: E402
from nodes_in_namespaces import may_make_namespaces, network  # noqa: E402
from running import Running, wait_for_any, write_program  # noqa: E402
from slurm_cluster import SlurmCluster, missing_for_slurm, slurm_cluster  # noqa: E402

NEVER_SECONDS = 90.0
"""How long something is waited for before it is counted as never happening."""
TCP_GIVES_UP_SECONDS = 1200.0
"""Linux gives a connection up whose other end is silent after some 16 minutes of trying again."""
PROGRAM = """
import os, threading
print(f"up {os.environ['WORLD_SIZE']} pid {os.getpid()} ", flush=True)
threading.Event().wait()
"""
OTHER_PROGRAM = "another = True\n" + PROGRAM
SAVING_PROGRAM = """
import os, rankwise, threading
assert not rankwise.should_stop()  # from now on a rank is asked to stop, and not signalled
print(f"up {os.environ['WORLD_SIZE']} pid {os.getpid()} ", flush=True)
while not rankwise.should_stop():
    threading.Event().wait(0.01)
print("saved", flush=True)
"""
PARTS = ("kill", "leader", "cut", "stop", "term", "store", "etcd", "strangers", "slurm")
QUICK_PARTS = ("kill", "term", "etcd", "strangers")
"""Of each, `--quick` plays the first event, with rankwise alone."""


class Job:
    """Agents of one launcher, on nodes of their own, that run one job."""

    def __init__(self, stack: ExitStack, folder: Path, is_ours: bool) -> None:
        lan = stack.enter_context(network())
        self.nodes = [lan.add_node() for _ in range(4)]
        self.agents: dict[int, Running] = {}
        self._started: list[Running] = []
        self.is_ours = is_ours
        self.address = lan.address
        self._stack = stack
        self._folder = folder
        self._meeting = ("c10d", f"{self.nodes[0].address}:29400")

    def meet_in(self, backend: str, endpoint: str) -> None:
        """Say where agents that start from now on meet."""
        self._meeting = (backend, endpoint)

    def start(self, *numbers: int, program: str = PROGRAM, nnodes: str = "2:3") -> None:
        """Start agents on these nodes."""
        script = write_program(self._folder, program, f"program{len(program)}.py")
        backend, endpoint = self._meeting
        for number in numbers:
            # torch looks for the endpoint among the addresses of the host's name, not of the node.
            serves = () if self.is_ours else ("--rdzv-conf", f"is_host={number == 0}")
            self.agents[number] = self._stack.enter_context(
                Running(
                    *("ip", "netns", "exec", self.nodes[number].name),
                    *((*RANKWISE, "run") if self.is_ours else TORCHRUN),
                    *("--nnodes", nnodes, "--max-restarts", "3", "--rdzv-id", "events"),
                    *("--rdzv-backend", backend, "--rdzv-endpoint", endpoint, *serves, str(script)),
                )
            )
            self._started.append(self.agents[number])

    def wait_up(self, size: int, *, rounds: int = 1) -> None:
        """Wait until that many rounds of this size were up on the agents that are here."""
        wait_for_any(list(self.agents.values()), f"up {size} ", count=size * rounds)

    def lose(self, number: int) -> Running:
        """An agent is of no interest any more; what it started is."""
        return self.agents.pop(number)

    def pids(self) -> list[int]:
        """All ranks that there ever were."""
        said = "".join(each.stdout for each in self._started)
        return [int(pid) for pid in re.findall(r"pid (\d+)", said)]

    def kill_what_is_left(self) -> None:
        """End what a launcher has left behind, with the job's namespaces."""
        for node in self.nodes:
            node.lose()

    def end(self) -> tuple[str, str]:
        """Send SIGTERM to all who live; return exit codes and how many ranks were left."""
        pids = self.pids()
        for agent in self.agents.values():
            if agent.process.poll() is None:
                agent.signal(signal.SIGTERM)
        return self.codes(), left_of(pids)

    def codes(self, patience_s: float = NEVER_SECONDS) -> str:
        """Wait for all agents to end."""
        return " ".join(str(agent.finish(patience_s).code) for agent in self.agents.values())

    def says(self, pattern: str) -> str:
        """The first line of any screen that has this."""
        said = "".join(agent.stderr for agent in self.agents.values())
        found = re.search(f".*(?:{pattern}).*", said)
        return "" if found is None else re.sub(r"\b[0-9a-f]{8}\b", "…", found[0])[:160]


def left_of(pids: Sequence[int]) -> str:
    """How many of these processes live; they are killed."""
    living = [pid for pid in pids if _is_a_rank(pid)]
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    return f"{len(living)} ranks" if living else "nothing"


def _is_a_rank(pid: int) -> bool:
    try:
        return b"program" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def took(wait: Callable[[], object]) -> str:
    """How long something took, or that it never came."""
    since = time.monotonic()
    try:
        wait()
    except AssertionError:
        return "never"
    return f"{time.monotonic() - since:.1f} s"


@contextmanager
def job(
    folder: Path, *, is_ours: bool, members: int = 1
) -> Iterator[tuple[Job, EtcdCluster | None]]:
    """A job that has not begun, and the etcd in which rankwise meets."""
    with ExitStack() as stack:
        found = Job(stack, folder, is_ours)
        stack.callback(found.kill_what_is_left)
        etcd = None
        if is_ours:
            place = folder / f"etcd{time.monotonic_ns()}"
            place.mkdir()
            etcd = stack.enter_context(etcd_cluster(place, members, host=found.address))
            found.meet_in("etcd", ",".join(f"{host}:{port}" for host, port in etcd.endpoints))
        yield found, etcd


class Played(NamedTuple):
    """What an event has led to."""

    again: str
    said: str
    codes: str
    left: str


Scene = Callable[[Job], Played]
OVER = "round [0-9]+ is over|the run ends|cut off"


def killed(run: Job) -> Played:
    run.start(0, 1, 2)
    run.wait_up(3)
    gone = run.lose(2)
    orphans = [int(pid) for pid in re.findall(r"pid (\d+)", gone.stdout)]
    gone.signal(signal.SIGKILL)
    again = took(lambda: run.wait_up(2))
    left = left_of(orphans)
    codes, _ = run.end()
    return Played(again, run.says(OVER), codes, f"{left} of the dead agent")


def leader_killed(run: Job) -> Played:
    """The one that came first leads; torchrun's serves the store, which is lost as well."""
    run.start(0)
    if run.is_ours:
        run.agents[0].wait_for("waiting ", stream="stderr")
    run.start(1, 2)
    run.wait_up(3)
    pids = run.pids()
    run.lose(0).signal(signal.SIGKILL)
    again = took(lambda: run.wait_up(2))
    if again == "never":
        return Played(again, run.says(OVER), run.end()[0], left_of(pids))
    return Played(again, run.says(OVER), *run.end())


def returned(run: Job) -> Played:
    run.start(0, 1, 2)
    run.wait_up(3)
    run.lose(2).signal(signal.SIGKILL)
    running.PATIENCE_S = 20.0
    took(lambda: run.wait_up(2))  # torchrun's agents do not go on before it is back
    running.PATIENCE_S = NEVER_SECONDS
    before = "".join(each.stdout for each in run.agents.values()).count("up 3 ")
    run.start(2)
    again = took(lambda: wait_for_any(list(run.agents.values()), "up 3 ", count=before + 3))
    return Played(again, run.says("came: "), *run.end())


def late(run: Job) -> Played:
    run.start(0, 1)
    run.wait_up(2)
    run.start(2)
    again = took(lambda: run.wait_up(3))
    return Played(again, run.says("came: "), *run.end())


def cut(seconds: float) -> Scene:
    """A node's cable is pulled out for so long; the others' ranks, and then all."""

    def play(run: Job) -> Played:
        run.start(0, 1, 2)
        run.wait_up(3)
        node, others = run.nodes[2], [run.agents[0], run.agents[1]]
        node.pull_out()
        plugged_in_at = time.monotonic() + seconds
        running.PATIENCE_S = seconds
        two = took(lambda: wait_for_any(others, "up 2 ", count=2))
        running.PATIENCE_S = NEVER_SECONDS
        Event().wait(max(0.0, plugged_in_at - time.monotonic()))
        node.plug_in()
        if two == "never":
            running.PATIENCE_S = 12.0
        three = took(lambda: run.wait_up(3, rounds=2))
        running.PATIENCE_S = NEVER_SECONDS
        again = f"2 nodes: {two}; all, from its end: {three}"
        if (two, three) == ("never", "never"):
            again = "no restart"
        return Played(again, run.says(OVER), *run.end())

    return play


def stopped(run: Job) -> Played:
    run.start(0, 1, 2)
    run.wait_up(3)
    run.agents[2].signal(signal.SIGSTOP)
    two = took(lambda: wait_for_any([run.agents[0], run.agents[1]], "up 2 ", count=2))
    run.agents[2].signal(signal.SIGCONT)
    three = took(lambda: run.wait_up(3, rounds=2))
    return Played(f"2 nodes: {two}; all, from SIGCONT: {three}", run.says(OVER), *run.end())


def told_while_running(run: Job) -> Played:
    run.start(0, 1, 2)
    run.wait_up(3)
    pids = run.pids()
    run.agents[2].signal(signal.SIGTERM)
    codes: list[str] = []
    ended = took(lambda: codes.append(run.codes()))
    said, left = run.says("SIGTERM: "), left_of(pids)
    return Played(f"all ended: {ended}", said, codes[0] if codes else run.end()[0], left)


def told_while_waiting(run: Job) -> Played:
    run.start(1, nnodes="3")
    if run.is_ours:
        run.agents[1].wait_for("waiting ", stream="stderr")
    else:
        Event().wait(15.0)  # torchrun says nothing
    run.agents[1].signal(signal.SIGTERM)
    codes: list[str] = []
    ended = took(lambda: codes.append(run.codes()))
    if not codes:
        run.agents[1].signal(signal.SIGKILL)
        codes.append("killed by us")
    return Played(f"ended: {ended}", run.says("SIGTERM: "), codes[0], "nothing")


def store_lost(run: Job) -> Played:
    """The machine that serves the store is gone, and nobody's connection to it is closed."""
    if run.is_ours:
        run.meet_in("embedded", f"{run.nodes[0].address}:29400")
    run.start(0, 1, 2)
    run.wait_up(3)
    pids = run.pids()
    host = run.lose(0)
    run.nodes[0].lose()
    host.wait_over()
    codes: list[str] = []
    ended = took(lambda: codes.append(run.codes(TCP_GIVES_UP_SECONDS)))
    left = left_of(pids)
    return Played(f"all ended: {ended}", run.says("the run ends"), codes[0] if codes else "", left)


def another_program(run: Job) -> Played:
    run.start(0, 1, nnodes="2:3")
    run.wait_up(2)
    run.start(2, program=OTHER_PROGRAM)
    stranger = run.agents.pop(2)
    codes: list[str] = []
    running.PATIENCE_S = 20.0
    ended = took(lambda: codes.append(str(stranger.finish().code)))
    running.PATIENCE_S = NEVER_SECONDS
    said = [line for line in stranger.stderr.splitlines() if "was started by" in line]
    if not codes:
        codes.append("is taken in" if "up 3" in stranger.stdout else "waits")
        run.agents[2] = stranger
    _, left = run.end()
    return Played(f"the stranger ended: {ended}", (said or [""])[0][:160], codes[0], left)


def two_jobs(run: Job) -> Played:
    """Two jobs of two nodes start at once, with one id and one program."""
    run.start(0, 1, 2, 3, nnodes="2")
    up = took(lambda: run.wait_up(2))
    running.PATIENCE_S = 15.0
    second = took(lambda: run.wait_up(2, rounds=2))
    running.PATIENCE_S = NEVER_SECONDS
    again = f"2 ranks: {up}; the other 2: {second}"
    return Played(again, run.says("spare"), *run.end())


def etcd_away(seconds: float) -> Callable[[Job, EtcdCluster], Played]:
    def play(run: Job, etcd: EtcdCluster) -> Played:
        run.start(0, 1, 2)
        run.wait_up(3)
        etcd.members[0].stop()
        Event().wait(seconds)
        etcd.members[0].go_on()
        running.PATIENCE_S = NEVER_SECONDS if seconds > 10 else 12.0
        again = took(lambda: run.wait_up(3, rounds=2))
        running.PATIENCE_S = NEVER_SECONDS
        again = "no restart" if again == "never" else f"from its end: {again}"
        return Played(again, run.says(OVER), *run.end())

    return play


def leader_first(etcd: EtcdCluster) -> list[EtcdMember]:
    """The members, the one that leads them first."""

    def leads(member: EtcdMember) -> bool:
        connection = http.client.HTTPConnection(*member.endpoint)
        connection.request("POST", "/v3/maintenance/status", "{}")
        status = json.load(connection.getresponse())
        connection.close()
        return bool(status["leader"] == status["header"]["member_id"])

    return sorted(etcd.members, key=leads, reverse=True)


def members_killed(count: int) -> Callable[[Job, EtcdCluster], Played]:
    def play(run: Job, etcd: EtcdCluster) -> Played:
        run.start(0, 1, 2)
        run.wait_up(3)
        for member in leader_first(etcd)[:count]:
            member.kill()
        if count > 1:
            Event().wait(10.0)
            etcd.heal()
        else:
            running.PATIENCE_S = 15.0
        again = took(lambda: run.wait_up(3, rounds=2))
        running.PATIENCE_S = NEVER_SECONDS
        again = "no restart" if again == "never" else f"from its end: {again}"
        return Played(again, run.says(OVER), *run.end())

    return play


SCENES: dict[str, dict[str, Scene]] = {
    "kill": {
        "an agent is killed (SIGKILL)": killed,
        "it returns": returned,
        "a node comes later": late,
    },
    "leader": {"the agent that leads is killed": leader_killed},
    "cut": {f"a node is cut off for {length} s": cut(length) for length in (3, 10, 60)},
    "stop": {"an agent is stopped (SIGSTOP) until the others run": stopped},
    "term": {
        "SIGTERM to one agent of three, ranks running": told_while_running,
        "SIGTERM to an agent that waits for the store or for others": told_while_waiting,
    },
    "store": {"the machine that serves the store is lost": store_lost},
    "strangers": {
        "an agent with another program, the same id": another_program,
        "two jobs with one id and one program": two_jobs,
    },
}


def played(scene: Scene, run: Job) -> Played:
    """What a scene came to; where the job never began, or never ended, that is said."""
    try:
        return scene(run)
    except AssertionError as error:
        running.PATIENCE_S = NEVER_SECONDS
        left = left_of(run.pids())
        return Played("never", str(error).partition("\n")[0], "", left)


def play_etcd(table: Table, folder: Path, most: int | None) -> None:
    """What happens to etcd, which torchrun does not meet in."""
    scenes = {f"etcd is away for {length} s": (1, etcd_away(length)) for length in (3, 4.5, 15)}
    scenes["the leader of three etcd members is killed"] = (3, members_killed(1))
    scenes["two of three etcd members are killed, back after 10 s"] = (3, members_killed(2))
    for name, (members, scene) in islice(scenes.items(), most):
        with job(folder, is_ours=True, members=members) as (run, etcd):
            assert etcd is not None, "ours meets in one"
            table.row(name, "rankwise", *scene(run, etcd))


def lose_one_of_four(slurm: SlurmCluster) -> None:
    slurm.spare.start()
    slurm.spare.wait_up()
    slurm.nodes[2].lose()


def play_slurm(table: Table) -> None:
    """What SLURM does to a job, on three nodes."""
    run = " ".join([*RANKWISE, "run"])
    scenes: dict[str, tuple[str, Callable[[SlurmCluster], object], str, int]] = {
        "scancel": (
            "srun {run} {program}",
            lambda one: one.do("scancel", "--name=job"),
            "saved",
            3,
        ),
        "scontrol requeue": (
            "srun {run} {program}",
            lambda one: one.do("scontrol", "requeue", "1"),
            "up 3 ",
            6,
        ),
        "a node fails": ("srun {run} {program}", lose_one_of_four, "up 3 ", 6),
        "a node fails, --no-kill, --nnodes 2:3": (
            "srun --no-kill {run} --nnodes 2:3 {program}",
            lambda one: one.nodes[2].lose(),
            "up 2 ",
            2,
        ),
        "no srun": ("{run} {program}", lambda _: None, "write srun", 1),
    }
    for name, (line, happen, awaited, count) in scenes.items():
        with scratch_directory() as folder, slurm_cluster(folder, 3) as slurm:
            program = write_program(folder, SAVING_PROGRAM)
            line = line.format(run=run, program=program)  # noqa: PLW2901
            script = write_program(folder, f"#!/bin/bash\n{line}\n", "job.sh")
            output = folder / "output"
            output.touch()
            words = ("--nodes=3", "--ntasks-per-node=1", "--job-name=job", "--open-mode=append")
            keeps = ["--no-kill"] if "--no-kill" in line else ["--requeue"]
            slurm.do("sbatch", *keeps, *words, f"--output={output}", str(script))
            with Running("tail", "--lines=+1", "--follow", str(output)) as tail:
                if name != "no srun":
                    tail.wait_for("up 3 ", count=3)
                happen(slurm)
                again = took(lambda: tail.wait_for(awaited, count=count))  # noqa: B023
                said = re.search(f".*(?:{OVER}|write srun).*", tail.stdout)
                codes = " ".join(re.findall("exit code (\\d+)", tail.stdout))
            shown = "" if said is None else re.sub(r"\b[0-9a-f]{8}\b", "…", said[0])[:160]
            table.row(f"SLURM: {name}", "rankwise", f"{awaited.strip()}: {again}", shown, codes, "")


def main() -> None:
    options = arguments(__doc__, repetitions=1, parts=PARTS, quick_parts=QUICK_PARTS)
    describe_machine()
    if not may_make_namespaces() or find_etcd() is None:
        print("All is left out: these events need root, network namespaces and an etcd")
        return
    running.PATIENCE_S = NEVER_SECONDS
    most = 1 if options.quick else None
    columns = ("event", "launcher", "ranks again", "what is said", "exit codes", "left")
    table = Table("Events of a job on three nodes", columns, options.json)
    with scratch_directory() as folder:
        for part in options.only:
            for name, scene in islice(SCENES.get(part, {}).items(), most):
                for is_ours in (True, False) if HAS_TORCH and not options.quick else (True,):
                    with job(folder, is_ours=is_ours) as (run, _):
                        row = played(scene, run)
                    table.row(name, "rankwise" if is_ours else "torchrun", *row)
        if "etcd" in options.only:
            play_etcd(table, folder, most)
    if "slurm" in options.only and missing_for_slurm() is None:
        play_slurm(table)


if __name__ == "__main__":
    main()
