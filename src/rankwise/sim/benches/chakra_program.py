"""Chakra execution traces as a program: `rankwise sim run NAME.et`.

Every trace is a rank, on a SIP of its own. The predecessors of its nodes are known, so all of them
are given to the machine at once, and ranks that would call different collectives are refused before
anything runs. Those that wait for each other in a circle are a deadlock, which names the nodes.

- **Computing** takes one thing at a time, in the order in which they can begin: as long as it took
  when it was recorded, or by the roofline of the machine (`computing`). Operations of the host have
  a row of their own. Moves to and from remote memory take as long as they were recorded.
- **Collectives** of a group run in the order of their calls (the lowest number first of those that
  may come next), by the algorithms of `ccl.yaml`. The driver's `host.command_ns` comes before each.
- **Messages** are matched by sender and receiver, in the same order.

Nothing is calculated: traces have no numbers.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Literal, NamedTuple

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.trace_events import PICOSECONDS_PER_MICROSECOND
from rankwise.base.wording import counted
from rankwise.core.collectives.reductions import ReduceOp
from rankwise.core.collectives.workspace import BLOCKS_IN
from rankwise.sim.benches.bounds import roofline_of
from rankwise.sim.benches.parameters import Float, Parameters
from rankwise.sim.hardware.commands import CommandHandle, Run
from rankwise.sim.hardware.environment import KernelEnvironment
from rankwise.sim.hardware.op_log import Operand
from rankwise.sim.hardware.quantities import picoseconds
from rankwise.sim.kernel import Future, Steps, all_of
from rankwise.sim.reporting.chakra_files import (
    COLLECTIVES,
    SUFFIX,
    ChakraNode,
    NodeKind,
    read_traces,
)
from rankwise.sim.reporting.results import BenchResult
from rankwise.sim.runtime.collective_calls import Collective, RankContribution, Request
from rankwise.sim.runtime.process_groups import ProcessGroup
from rankwise.sim.runtime.tensor import element_type

_POSSIBLE = frozenset({
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all",
    "reduce_scatter", "barrier",
})  # fmt: skip
_ROOT_PUTS_IN = frozenset({"broadcast", "scatter", "send_receive"})
_ROOT_HAS_RESULT = frozenset({"reduce", "gather"})
_WORLD = frozenset({"", "0", "default_pg"})
"""How traces call the group of all devices, where nothing else is called so."""
_PASSED_OVER = frozenset({NodeKind.INVALID, NodeKind.METADATA})
_TALKS = frozenset({NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECEIVE})

Computing = Literal["recorded", "roofline"]
At = tuple[int, int]
"""A node: of which device, and its number."""


class _Exchange(NamedTuple):
    """Nodes of several devices that take place together: a collective, or a message.

    Attributes:
        kind: which collective; `send_receive` for a message.
        size: bytes that each puts in.
        series: what it is one of, in order.
        number: counts them, from 1.
        ranks: the participants, in the order of their group.
        root: the place among them of the root.
        nodes: by rank.
        algorithm: what it was carried out with; empty if the trace does not say so.
    """

    kind: str
    size: int
    series: str
    number: int
    ranks: tuple[int, ...]
    root: int
    nodes: dict[int, ChakraNode]
    algorithm: str = ""


class ChakraProgram:
    """Traces in the place of a program.

    Attributes:
        name: the path that was given.
        parameters: how nodes are carried out.
        computes: whether there are numbers.
    """

    computes = False

    def __init__(self, path: str) -> None:
        self.name = path
        self.parameters = Parameters(path, _takes)
        self._traces, groups = read_traces(path)
        described = _groups_of_metadata(path, self._traces)
        self._groups = described | {name: tuple(ranks) for name, ranks in groups.items()}
        self._check_groups()
        self._nodes = {
            (rank, node.number): node for rank, each in enumerate(self._traces) for node in each
        }
        self._exchange_of = dict(self._exchanges())

    def run(self, torch: Any, options: Mapping[str, Any]) -> list[BenchResult]:
        """Run the traces on the first SIPs of the machine."""
        count, there_are = len(self._traces), torch.engine.topology.sip_count
        if count > there_are:
            raise ConfigError(
                f"{self.name} has traces of {count} devices, and the machine has {there_are}",
                hint=f"--set system.sips.count={count}, or another --topology",
            )
        replay = _Replay(torch, **options)

        def worker(rank: int) -> None:
            if not rank:  # it speaks for all: no rank has to wait before the next is given
                replay.give(self._nodes, self._exchange_of)

        torch.multiprocessing.spawn(worker, nprocs=count)
        nodes = self._nodes.values()
        return [
            BenchResult(
                bench=self.name.rpartition("/")[2],
                case=f"{counted(count, 'device')}, {counted(len(nodes), 'node')}",
                time_ps=replay.wait(),
                flops=sum(int(node.attributes.get("num_ops", 0)) for node in nodes),
                bytes=sum(_bytes_of(node) for node in nodes if node.kind in _TALKS),
                bound="",
                bound_ps=0,
                is_checked=False,
                fidelity=", ".join(dict.fromkeys(torch.engine.machine.fidelities.values())),
            )
        ]

    def _check_groups(self) -> None:
        count = len(self._traces)
        for name, ranks in self._groups.items():
            for rank in ranks:
                if not 0 <= rank < count:
                    raise ConfigError(
                        f"{self.name}: process group {name!r} has device {rank}, of which there is"
                        f" no trace: they are 0 to {count - 1}"
                    )

    def _where(self, at: At) -> str:
        node = self._nodes[at]
        return f"{self.name}, device {at[0]}: node {node.number} {node.name!r}"

    def _exchanges(self) -> Iterator[tuple[At, _Exchange]]:
        """The ranks of each exchange; refuses ranks that do not fit each other."""
        series: dict[str, dict[int, list[ChakraNode]]] = defaultdict(lambda: defaultdict(list))
        members: dict[str, tuple[int, ...]] = {}
        for rank, nodes in enumerate(self._traces):
            for node in _in_order(f"{self.name}, device {rank}", nodes):
                if node.kind in _TALKS:
                    name, ranks = self._series_of((rank, node.number))
                    members[name] = ranks
                    series[name][rank].append(node)
        for name, by_rank in series.items():
            yield from self._matched(name, members[name], by_rank)

    def _series_of(self, at: At) -> tuple[str, tuple[int, ...]]:
        """What an exchange is one of, and between whom."""
        rank, node = at[0], self._nodes[at]
        count = len(self._traces)
        if node.kind is NodeKind.COLLECTIVE:
            name = str(node.attributes.get("pg_name", ""))
            ranks = self._groups.get(name, tuple(range(count)) if name in _WORLD else None)
            if ranks is None:
                raise ConfigError(
                    f"{self._where(at)} is for process group {name!r}, which nothing describes",
                    hint='describe it in NAME.groups.json: {"1": [0, 2], "2": [1, 3]}',
                )
            if rank not in ranks:
                raise ConfigError(f"{self._where(at)} is for process group {name!r}, without it")
            if not all(node.attributes.get("involved_dim", ())):
                raise ConfigError(
                    f"{self._where(at)} is for some dimensions of the network only",
                    hint="process groups say the same: NAME.groups.json describes them",
                )
            return f"process group {name}" if name else "all devices", ranks
        is_sender = node.kind is NodeKind.SEND
        peer = node.attributes.get("comm_dst" if is_sender else "comm_src")
        if peer is None or not 0 <= peer < count or peer == rank:
            raise ConfigError(
                f"{self._where(at)} goes {'to' if is_sender else 'from'} device {peer}, expected"
                " another device"
            )
        pair = (rank, peer) if is_sender else (peer, rank)
        return f"messages from device {pair[0]} to device {pair[1]}", pair

    def _matched(
        self, series: str, ranks: tuple[int, ...], by_rank: Mapping[int, Sequence[ChakraNode]]
    ) -> Iterator[tuple[At, _Exchange]]:
        first = by_rank.get(ranks[0], [])
        for rank in ranks[1:]:
            others = by_rank.get(rank, [])
            for one, other in zip(first, others, strict=False):
                wanted, found = (
                    self._wanted((who, node.number))
                    for who, node in ((ranks[0], one), (rank, other))
                )
                if wanted != found:
                    raise ConfigError(
                        f"{self._where((ranks[0], one.number))} is {_in_words(*wanted)}, and"
                        f" {self._where((rank, other.number))} is {_in_words(*found)}: both are"
                        f" the next of {series}"
                    )
            if len(first) != len(others):
                raise ConfigError(
                    f"{self.name}: of {series}, device {ranks[0]} has {len(first)}, device {rank}"
                    f" has {len(others)}"
                )
        for place, node in enumerate(first):
            kind, size, _tag, root = self._wanted((ranks[0], node.number))
            nodes = {rank: by_rank[rank][place] for rank in ranks}
            if root not in ranks:
                raise ConfigError(f"{self._where((ranks[0], node.number))}: its root is {root}")
            algorithm = str(node.attributes.get("algorithm", ""))
            exchange = _Exchange(
                kind, size, series, place + 1, ranks, ranks.index(root), nodes, algorithm
            )
            for rank, own in nodes.items():
                yield (rank, own.number), exchange

    def _wanted(self, at: At) -> tuple[str, int, int, int]:
        """What a node asks for, which must be the same for all: kind, bytes, tag and root."""
        node = self._nodes[at]
        kind, root = "send_receive", at[0]
        if node.kind is NodeKind.COLLECTIVE:
            number = int(node.attributes.get("comm_type", -1))
            is_known = 0 <= number < len(COLLECTIVES)
            kind = COLLECTIVES[number].removesuffix("_block") if is_known else f"number {number}"
            if kind not in _POSSIBLE:
                raise ConfigError(
                    f"{self._where(at)} is a {kind}, which cannot be run",
                    hint=f"those that can: {', '.join(sorted(_POSSIBLE))}",
                )
            root = int(node.attributes.get("root", self._series_of(at)[1][0]))
        else:
            root = self._series_of(at)[1][0]
        size = _bytes_of(node)
        if size < 1 and kind != "barrier":
            raise ConfigError(f"{self._where(at)} has no comm_size, or one of {size}")
        return kind, size, int(node.attributes.get("comm_tag", 0)), root


def _takes(_torch: Any, *, computing: Computing = "recorded", dtype: Float = "f16") -> None:
    """What can be set: how computing is timed, and what collectives are of."""


def _in_words(kind: str, size: int, tag: int, root: int) -> str:
    if kind == "send_receive":
        return f"a message of {size} bytes with tag {tag}"
    puts_in = f" from rank {root}" if kind in _ROOT_PUTS_IN else ""
    has_result = f" to rank {root}" if kind in _ROOT_HAS_RESULT else ""
    return f"{kind}{puts_in}{has_result} of {size} bytes"


def _bytes_of(node: ChakraNode) -> int:
    return int(node.attributes.get("comm_size", 0))


def _in_order(where: str, nodes: Sequence[ChakraNode]) -> Iterator[ChakraNode]:
    """The nodes of a trace in the order in which its host issues them."""
    by_number = {(0, node.number): node for node in nodes}
    ordered = _topological({
        (0, node.number): {(0, each) for each in node.after} for node in nodes
    })  # fmt: skip
    if len(ordered) < len(nodes):
        stuck = by_number[min(set(by_number) - set(ordered))]
        raise ConfigError(
            f"{where}: node {stuck.number} {stuck.name!r} comes after itself, by way of others"
        )
    return (by_number[at] for at in ordered)


def _topological(waits: Mapping[At, Iterable[At]]) -> list[At]:
    """Nodes after what they wait for, the lowest number first; those in circles are left out."""
    left = {at: set(before) for at, before in waits.items()}
    followers: dict[At, list[At]] = defaultdict(list)
    for at, before in left.items():
        for each in before:
            followers[each].append(at)
    ready = [(number, rank) for (rank, number), before in left.items() if not before]
    heapify(ready)
    ordered = []
    while ready:
        number, rank = heappop(ready)
        ordered.append((rank, number))
        for follower in followers[rank, number]:
            left[follower].discard((rank, number))
            if not left[follower]:
                heappush(ready, (follower[1], follower[0]))
    return ordered


class _DescribedGroup(msgspec.Struct):
    """A process group, as PyTorch describes it in its traces."""

    pg_name: str
    ranks: list[int]


def _groups_of_metadata(
    path: str, traces: Iterable[Iterable[ChakraNode]]
) -> dict[str, tuple[int, ...]]:
    """The process groups that PyTorch has written into its traces."""
    found: dict[str, tuple[int, ...]] = {}
    for node in (node for nodes in traces for node in nodes):
        if node.kind is not NodeKind.METADATA or "pg_name" not in node.inputs:
            continue
        text = node.inputs.strip().removeprefix("['").removesuffix("']")
        try:
            described = msgspec.json.decode(text, type=list[_DescribedGroup])
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{path}: node {node.number} {node.name!r} describes process groups, and cannot"
                f" be read: {error}"
            ) from error
        # One without ranks is of all.
        found |= {each.pg_name: tuple(each.ranks) for each in described if each.ranks}
    return found


class _TensorSize(NamedTuple):
    """Stands for a tensor of a rank, of which a call without numbers only tells the size."""

    sip: int
    size: int

    def operand(self) -> Operand:
        """For the op log."""
        return Operand("hbm", f"sip{self.sip}", 0, self.size)


class _Done:
    """Stands for the command of a node, where others come after it."""

    def __init__(self, future: Future) -> None:
        self.future = future

    @property
    def is_done(self) -> bool:
        """Whether the node is over."""
        return self.future.is_done

    def tell(self, cause: Future) -> None:
        """It is over."""
        if cause.failure is None:
            self.future.succeed()
        else:
            self.future.fail(cause.failure)


class _TurnQueue:
    """Takes one thing at a time, in the order of asking."""

    def __init__(self) -> None:
        self._free_at = 0

    def take(self, start: int, duration: int) -> int:
        """When something ends that may begin at `start`."""
        self._free_at = max(start, self._free_at) + duration
        return self._free_at


class _Replay:
    """Gives nodes to the machine."""

    def __init__(self, torch: Any, computing: Computing = "recorded", dtype: Float = "f16") -> None:
        self._torch = torch
        self._engine = torch.engine
        self._computing = computing
        self._roofline = roofline_of(torch.engine.topology, "f16")
        self._command = picoseconds(torch.engine.topology.machine.system.host.command_ns)
        self._kind = element_type(dtype)
        self._rows: dict[tuple[int, bool], _TurnQueue] = defaultdict(_TurnQueue)
        self._groups: dict[str, ProcessGroup] = {}
        self._done: dict[At, _Done] = {}
        self._given: list[CommandHandle] = []
        self._began = 0

    def give(self, nodes: Mapping[At, ChakraNode], exchanges: Mapping[At, _Exchange]) -> None:
        """Give all nodes to the machine."""
        self._began = self._engine.now
        simulator = self._engine.simulator
        # Promised before they are given, since messages go in circles: each sends, then receives.
        self._done = {at: _Done(simulator.future(node.name)) for at, node in nodes.items()}
        for at, node in nodes.items():
            if at in exchanges:
                exchange = exchanges[at]
                if at[0] == exchange.ranks[0]:
                    self._exchange(exchange)
            elif node.kind in _PASSED_OVER:
                self._pass_over(at, node)
            else:
                self._compute(at, node)

    def wait(self) -> int:
        """Wait until all are over; how many picoseconds they took."""
        for handle in self._given:
            self._engine.wait(handle)
        ends = [each.completed_at for each in self._given if each.completed_at is not None]
        return int(max(ends, default=self._began) - self._began)

    def _pass_over(self, at: At, node: ChakraNode) -> None:
        before = [each.future for each in self._after(at[0], node)]
        if before:
            all_of(before).add_callback(self._done[at].tell)
        else:
            self._done[at].future.succeed()

    def _after(self, rank: int, node: ChakraNode) -> tuple[Any, ...]:
        return tuple(self._done[rank, before] for before in node.after)

    def _give(self, at: At, handle: CommandHandle) -> None:
        self._given.append(handle)
        handle.future.add_callback(self._done[at].tell)

    def _compute(self, at: At, node: ChakraNode) -> None:
        rank, _ = at
        row = self._rows[rank, bool(node.attributes.get("is_cpu_op", False))]
        command = Run(
            sip=self._torch.device_of(rank).sip,
            stream=-2 - len(self._given),  # of its own: what it comes after is its order
            after=self._after(rank, node),
            name=node.name,
            start=self._taking(row, self._duration(node)),
        )
        self._give(at, self._engine.submit(command))

    def _taking(self, row: _TurnQueue, duration: int) -> Callable[[KernelEnvironment], Steps]:
        def start(env: KernelEnvironment) -> Steps:
            now = env.simulator.now
            # The time of the driver is a part of what was recorded.
            yield max(0, row.take(now - self._command, duration) - now)

        return start

    def _duration(self, node: ChakraNode) -> int:
        flops, size = (int(node.attributes.get(name, 0)) for name in ("num_ops", "tensor_size"))
        is_computing = node.kind is NodeKind.COMPUTE and not node.attributes.get("is_cpu_op")
        recorded = int(
            node.attributes.get("duration_ps", node.duration_us * PICOSECONDS_PER_MICROSECOND)
        )
        if is_computing and (flops or size) and (self._computing == "roofline" or not recorded):
            return int(self._roofline.bound(flops, size).picoseconds)
        return recorded

    def _exchange(self, exchange: _Exchange) -> None:
        elements = -(-exchange.size // self._kind.itemsize)
        if exchange.kind in BLOCKS_IN:
            elements = -(-elements // len(exchange.ranks))
        operation = exchange.kind
        if operation == "send_receive":
            operation = "message from rank {} to rank {}".format(*exchange.ranks)
        request = Request(
            operation, exchange.kind, (elements,), self._kind, elements, ReduceOp.SUM,
            exchange.root, self._algorithm_of(exchange),
        )  # fmt: skip
        calls = [self._call(request, exchange, rank) for rank in exchange.ranks]
        Collective(self._torch, calls).submit(exchange.series)
        for call in calls:
            assert call.handle is not None, "all have come"
            self._give((call.rank, exchange.nodes[call.rank].number), call.handle)

    def _algorithm_of(self, exchange: _Exchange) -> str | None:
        """That of the trace, if it is one of ours; other tools name theirs otherwise."""
        known = self._torch.ccl.algorithms.get(exchange.algorithm)
        return known.name if known is not None and known.collective == exchange.kind else None

    def _call(self, request: Request, exchange: _Exchange, rank: int) -> RankContribution:
        group = self._groups.get(exchange.series)
        if group is None:
            distributed = weakref.ref(self._torch.distributed)
            is_world = len(exchange.ranks) == self._torch.world_size
            name = "world" if is_world else exchange.series
            group = ProcessGroup(distributed, exchange.ranks, name)
            self._groups[exchange.series] = group
        place = exchange.ranks.index(rank)
        memory: Any = _TensorSize(self._torch.device_of(rank).sip, exchange.size)
        kind = exchange.kind
        puts_in = kind not in _ROOT_PUTS_IN or place == exchange.root
        has_result = not (kind in _ROOT_HAS_RESULT and place != exchange.root) and not (
            kind == "send_receive" and place == exchange.root
        )
        has_memory = kind != "barrier"
        return RankContribution(
            request, exchange.number, rank, group=group,
            operands=[memory] if puts_in and has_memory else [],
            results=[memory] if has_result and has_memory else [],
            after=self._after(rank, exchange.nodes[rank]),
        )  # fmt: skip


def is_trace(path: str) -> bool:
    """Whether a program is one of these, by its name."""
    return path.endswith(SUFFIX)
