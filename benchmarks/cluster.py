"""Several nodes: how fast they meet, how much they say, how soon they notice each other's fates.

    python benchmarks/cluster.py [--repetitions 5] [--quick] [--only joins,bytes,...]

All nodes are on this machine: what a network would add is missing on both sides. torch's peer is
its dynamic rendezvous on TCPStore. Parts whose servers (etcd, torch) are not installed are left
out.
"""

import argparse
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from measuring import (
    HAS_TORCH,
    PROGRAMS,
    RANKWISE,
    TORCHRUN,
    Table,
    arguments,
    describe_machine,
    end_processes,
    environment,
    ratio,
    scratch_directory,
    seconds,
    seconds_of,
    take_turns,
)
from meeting_places import ETCD, Meter, etcd, free_ports, meter, server

PATIENCE = 120.0
NODES = (2, 8, 32, 128)
PROCESSES = 4
STEADY_NODES, STEADY_NODES_IF_QUICK = (32, 128), (8,)
STEADY_SECONDS, STEADY_SECONDS_IF_QUICK = 20.0, 6.0
"""Each of torch's nodes speaks every 5 s."""
STEADY_TARGET = 1000
MEMBERS = 4
NEVER_SECONDS = 30.0
"""How long torchrun's nodes are watched before something is counted as never happening."""
MEMBER = str(PROGRAMS / "member.py")
LEASE_SECONDS = 5.0

PARTS = ("joins", "bytes", "fates", "simulated", "starts")


@contextmanager
def joining(kind: str, nodes: int, port: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes that hold all nodes of a run, ready to join."""
    run = f"r{uuid.uuid4().hex[:8]}"
    processes = min(PROCESSES, nodes)
    shares = [nodes // processes + (index < nodes % processes) for index in range(processes)]
    firsts = itertools.accumulate(shares, initial=0)
    with ExitStack() as stack:
        children = []
        for first, share in zip(firsts, shares, strict=False):
            words = (kind, str(nodes), str(first), str(share), str(port), run)
            child = subprocess.Popen(
                [sys.executable, str(PROGRAMS / "joining.py"), *words],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            assert line_of(child) == b"up\n", f"{kind}: a process did not come up"
        yield children


def line_of(process: "subprocess.Popen[bytes]") -> bytes:
    """The next line, or nothing if it does not come."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], PATIENCE)[0]:
        raise SystemExit(f"no answer within {PATIENCE} s from {process.args!r}")
    return process.stdout.readline()


def join_all(children: Sequence["subprocess.Popen[bytes]"], nodes: int) -> float:
    """Seconds until the last node knows its rank."""
    began = time.monotonic_ns()
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"go\n")
        child.stdin.flush()
    results: list[tuple[int, int]] = []
    for child in children:
        results += json.loads(line_of(child))
    assert sorted(rank for _, rank in results) == list(range(nodes)), "every rank once"
    return (max(instant for instant, _ in results) - began) / 1e9


def join(kind: str, nodes: int, port: int) -> float:
    """Seconds from the word to go until all nodes know their ranks."""
    with joining(kind, nodes, port) as children:
        return join_all(children, nodes)


def compare_joins(options: argparse.Namespace) -> None:
    columns = ("nodes", "rankwise, etcd", "rankwise, embedded", "torch, TCPStore", "bare etcd",
               "etcd / torch", "embedded / torch", "etcd / bare")  # fmt: skip
    table = Table("All nodes join one round, until the last has its ranks", columns, options.json)
    with ExitStack() as stack:
        places: dict[str, tuple[str, int]] = {
            "embedded": ("embedded", stack.enter_context(server("embedded")))
        }
        if ETCD:
            port = stack.enter_context(etcd())
            places |= {"etcd": ("etcd", port), "bare": ("bare", port)}
        if HAS_TORCH:
            places["torch"] = ("torch", stack.enter_context(server("tcpstore")))
        for nodes in NODES[:2] if options.quick else NODES:
            peers = {
                name: partial(join, kind, nodes, port) for name, (kind, port) in places.items()
            }
            median = take_turns(peers, options.repetitions)
            ours, small, torch = (median.get(each) for each in ("etcd", "embedded", "torch"))
            table.row(
                str(nodes),
                *(seconds(each) for each in (ours, small, torch, median.get("bare"))),
                ratio(ours or 0.0, torch),
                ratio(small or 0.0, torch),
                ratio(ours or 0.0, median.get("bare")),
            )


def bytes_of(kind: str, nodes: int, metered: Meter, watched: float) -> tuple[int, float]:
    """Bytes of one join, and bytes per minute of the steady state that follows."""
    with joining(kind, nodes, metered.port) as children:
        metered.take()
        join_all(children, nodes)
        joined = metered.take()
        if not watched:
            return joined, 0.0
        time.sleep(1.0)  # whatever the join still has to say
        metered.take()
        time.sleep(watched)
        return joined, metered.take() * 60.0 / watched


def compare_bytes(options: argparse.Namespace) -> None:
    columns = ("bytes through the store", "rankwise, etcd", "rankwise, embedded", "torch, TCPStore",
               "etcd / torch", "embedded / torch")  # fmt: skip
    table = Table("What nodes say, both directions, TCP payload", columns, options.json)
    sizes: Sequence[int] = STEADY_NODES
    watched = STEADY_SECONDS
    if options.quick:
        sizes, watched = STEADY_NODES_IF_QUICK, STEADY_SECONDS_IF_QUICK
    steady: dict[str, float] = {}
    joined: dict[tuple[str, int], int] = {}
    with ExitStack() as stack:
        places = {"embedded": stack.enter_context(server("embedded"))}
        if ETCD:
            places["etcd"] = stack.enter_context(etcd())
        if HAS_TORCH:
            places["torch"] = stack.enter_context(server("tcpstore"))
        meters = {kind: stack.enter_context(meter(port)) for kind, port in places.items()}
        kinds = ("etcd", "embedded", "torch")

        def row(name: str, figures: dict[str, float]) -> None:
            table.row(
                name,
                *(amount(figures.get(kind)) for kind in kinds),
                *(f"1/{figures['torch'] / figures[kind]:.0f}"
                  if "torch" in figures and kind in figures else "-"
                  for kind in kinds[:2]),
            )  # fmt: skip

        for nodes in sizes:
            for kind, metered in meters.items():
                said, per_minute = bytes_of(kind, nodes, metered, watched)
                joined[kind, nodes], steady[kind] = said, per_minute
            row(f"one join of {nodes} nodes", {kind: joined[kind, nodes] for kind in meters})
            row(f"a minute of steady state of {nodes} nodes", steady)
    # Each of our nodes renews its own lease; each of torch's rewrites a state that grows with all.
    times = STEADY_TARGET / sizes[-1]
    row(
        f"the same of {STEADY_TARGET} nodes, extrapolated (ours x n, torch's x n^2)",
        {kind: each * (times**2 if kind == "torch" else times) for kind, each in steady.items()},
    )


def amount(count: float | None) -> str:
    """Bytes as a table cell."""
    if count is None:
        return "-"
    return f"{count / 1e6:.2f} MB" if count < 1e8 else f"{count / 1e6:,.0f} MB"


class Members:
    """Agents on this machine whose ranks write down what happens to them."""

    def __init__(self, launcher: Sequence[str], count: int, directory: Path) -> None:
        self.directory = directory
        self.agents = [
            subprocess.Popen(
                [*launcher, MEMBER, str(directory)],
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(count)
        ]

    def wait(self, kind: str, count: int, *, since: int = 0, patience: float = PATIENCE) -> float:
        """The instant, in nanoseconds, of the last of `count` notes later than `since`; or inf."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            notes = [
                int(path.read_text().split()[0])
                for path in self.directory.glob(f"{kind}*")
                if path.suffix != ".tmp"
            ]
            late = sorted(instant for instant in notes if instant > since)
            if len(late) >= count:
                return late[count - 1]
            time.sleep(0.02)  # coarse: the notes tell when
        return float("inf")

    def rank_of(self, agent: int) -> int:
        """Which rank an agent's only worker has."""
        for path in self.directory.glob("started.*.*"):
            _, rank, pid = path.name.split(".")
            if self.agents[agent].pid in ancestors(int(pid)):
                return int(rank)
        raise SystemExit(f"agent {agent} has no worker")

    def close(self) -> None:
        """End the agents, and whatever they have left behind."""
        end_processes(self.agents)
        for path in self.directory.glob("started.*.*"):
            end(int(path.name.rsplit(".", 1)[1]))


def ancestors(pid: int) -> list[int]:
    """The processes above one, the nearest first."""
    found = []
    while pid > 1:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            break
        pid = int(fields[1])
        found.append(pid)
    return found


def end(pid: int) -> None:
    """Kill a worker that its launcher has left behind."""
    try:
        if MEMBER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)
    except OSError:
        pass  # it is gone


@contextmanager
def members(launcher: Sequence[str], count: int) -> Iterator[Members]:
    with scratch_directory() as directory:
        group = Members(launcher, count, directory)
        try:
            group.wait("started.", count)
            yield group
        finally:
            group.close()


def killed(launch: Callable[[], Sequence[str]], patience: float) -> float:
    """Seconds from the SIGKILL of an agent until the others' ranks run again."""
    with members(launch(), MEMBERS) as group:
        began = time.monotonic_ns()
        group.agents[-1].kill()
        return (group.wait("started.", MEMBERS - 1, since=began, patience=patience) - began) / 1e9


def left(launch: Callable[[], Sequence[str]], patience: float) -> float:
    """Seconds from the SIGTERM of an agent that leaves until all other ranks are told."""
    with members(launch(), MEMBERS) as group:
        began = time.monotonic_ns()
        group.agents[-1].terminate()
        # Its own rank is told as well.
        return (group.wait("told.", MEMBERS, since=began, patience=patience) - began) / 1e9


def failed(launch: Callable[[], Sequence[str]], patience: float) -> float:
    """Seconds from the end of a failing rank until all others are told."""
    with scratch_directory() as directory:
        os.mkfifo(directory / "go")
        group = Members(launch(), MEMBERS, directory)
        try:
            group.wait("started.", MEMBERS)
            (directory / "go").write_text("now\n")
            began = group.wait("failed", 1)
            return (group.wait("told.", MEMBERS - 1, patience=patience) - began) / 1e9
        finally:
            (directory / "go").unlink()
            group.close()


def compare_fates(options: argparse.Namespace) -> None:
    columns = (f"{MEMBERS} nodes of one rank", "rankwise, etcd", "torchrun, c10d", "wanted")
    table = Table("What happens to a node, and to the others", columns, options.json)
    repetitions = min(options.repetitions, 3)
    with ExitStack() as stack:
        port = stack.enter_context(etcd())
        ours = partial(_ours, port)
        rows: list[tuple[str, Callable[..., float], Sequence[str], str]] = [
            ("SIGKILL of an agent -> all others' ranks run again", killed, (),
             f"{LEASE_SECONDS + 2:.0f} s"),
            ("SIGTERM of an agent that leaves -> all others' ranks are told", left,
             ("--on-preemption", "leave"), "1 s"),
            ("a rank fails -> all others' ranks are told", failed, (), "1 s"),
        ]  # fmt: skip
        for name, measure, words, wanted in rows:
            peers = {"ours": partial(measure, partial(ours, *words), PATIENCE)}
            if HAS_TORCH and not options.quick:
                peers["torch"] = partial(measure, _torch, NEVER_SECONDS)
            median = take_turns(peers, repetitions, once=["torch"])
            theirs = median.get("torch")
            never = f"not within {NEVER_SECONDS:.0f} s"
            table.row(
                name,
                seconds(median["ours"]),
                never if theirs == float("inf") else seconds(theirs),
                f"under {wanted}",
            )


def _ours(port: int, *words: str) -> Sequence[str]:
    return [
        *(*RANKWISE, "run", "--nnodes", f"{MEMBERS - 1}:{MEMBERS}", "--rdzv-backend", "etcd"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", uuid.uuid4().hex[:8], *words),
    ]


def _torch() -> Sequence[str]:
    return [
        *(*TORCHRUN, "--nnodes", f"{MEMBERS - 1}:{MEMBERS}", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", "--rdzv-id", "run"),
    ]


PLAN = """
nodes: {nodes}
rendezvous: {{nodes_min: 900, nodes_max: {nodes}, policy: {{restarts_max: 100}}}}
workers: {{work: 60 s}}
faults:
"""


def compare_simulated(options: argparse.Namespace) -> None:
    nodes, deaths = (100, 5) if options.quick else (1000, 50)
    title = "A simulated cluster, in real time (wanted: under 10 s)"
    table = Table(title, ("what", "rankwise sim cluster"), options.json)
    for how, apart in (("within moments", 0.1), ("four seconds after one another", 4)):
        with scratch_directory() as directory:
            plan = directory / "plan.yaml"
            lines = [PLAN.format(nodes=nodes).replace("900", str(nodes * 9 // 10))]
            for index in range(deaths):
                death = {"what": "kill-agent", "at": f"{10 + apart * index:g} s",
                         "node": index * 7 % nodes, "back_after": "2 s"}  # fmt: skip
                lines.append(f"  - {json.dumps(death)}\n")
            plan.write_text("".join(lines))
            command = [*RANKWISE, "sim", "cluster", "--faults", str(plan), "--seed", "7"]
            median = take_turns({"ours": partial(seconds_of, command)}, min(options.repetitions, 3))
        name = f"{nodes} nodes join, {deaths} are killed {how} and come back"
        table.row(name, seconds(median["ours"]))


def start_pair(first: Sequence[str], second: Sequence[str]) -> float:
    """Seconds until the first line of user code has run on both nodes."""
    with scratch_directory() as directory:
        began = time.monotonic_ns()
        agents = [
            subprocess.Popen(
                [*words, MEMBER, str(directory), "end"],
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for words in (first, second)
        ]
        for agent in agents:
            _, said = agent.communicate(timeout=PATIENCE)
            if agent.returncode:
                raise SystemExit(f"{agent.args!r} ended with {agent.returncode}: {said[-2000:]!r}")
        notes = [int(path.read_text().split()[0]) for path in directory.glob("started.*")]
        assert len(notes) == 2, "one rank on each node"
        return (max(notes) - began) / 1e9


def start_static() -> float:
    words = [*RANKWISE, "run", "--nnodes", "2", "--master-port", str(free_ports(1)[0])]
    return start_pair([*words, "--node-rank", "0"], [*words, "--node-rank", "1"])


def start_at(backend: str, port: int) -> float:
    words = [
        *(*RANKWISE, "run", "--nnodes", "2", "--rdzv-backend", backend),
        *("--rdzv-endpoint", f"127.0.0.1:{port or free_ports(1)[0]}"),
        *("--rdzv-id", uuid.uuid4().hex[:8]),
    ]
    return start_pair(words, words)


def start_torch() -> float:
    words = [
        *(*TORCHRUN, "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "run"),
        *("--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}"),
    ]
    return start_pair(words, words)


def compare_starts(options: argparse.Namespace) -> None:
    title = "Two agents start together, until user code runs on both (wanted: 1/4)"
    table = Table(title, ("how they meet", "rankwise", "torchrun c10d", "ratio"), options.json)
    with ExitStack() as stack:
        peers: dict[str, Callable[[], float]] = {
            "static": start_static, "embedded": partial(start_at, "embedded", 0)
        }  # fmt: skip
        if ETCD:
            peers["etcd"] = partial(start_at, "etcd", stack.enter_context(etcd()))
        if HAS_TORCH:
            peers["torch"] = start_torch
        median = take_turns(peers, options.repetitions)
    theirs = median.pop("torch", None)
    for name, value in median.items():
        table.row(name, seconds(value), seconds(theirs), ratio(value, theirs))


def main() -> None:
    options = arguments(__doc__, repetitions=5, parts=PARTS)
    describe_machine()
    parts = options.only
    if "joins" in parts:
        compare_joins(options)
    if "bytes" in parts:
        compare_bytes(options)
    if "fates" in parts and ETCD:
        compare_fates(options)
    if "simulated" in parts:
        compare_simulated(options)
    if "starts" in parts:
        compare_starts(options)


if __name__ == "__main__":
    main()
