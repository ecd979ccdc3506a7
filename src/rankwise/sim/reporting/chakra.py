"""A run as Chakra execution traces (`chakra_files`): a file per SIP.

A launch of a kernel computes: its node has the operations and the bytes of its programs, for
rooflines, and how long it took. Collectives have their kind, their bytes and their group, which are
the SIPs that logged the same call; a copy to another SIP is a message. All else that took time
(mappings, writes and reads of the host, copies inside of a SIP) is an operation of the host.

The op log does not tell what waited for what, but when what was done. So a node comes after the
latest node of each of the three sorts (computing, communicating, host) that had ended when it
began: what overlapped overlaps again, and what did not keeps its order.

Durations of the format are whole microseconds, which many kernels do not take. The attribute
`duration_ps` is ours; who does not know it leaves it out.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rankwise.base.errors import ConfigError
from rankwise.base.trace_events import PICOSECONDS_PER_MICROSECOND
from rankwise.core.matching import NO_RANK
from rankwise.sim.hardware.memory import sip_of
from rankwise.sim.hardware.op_log import LoggedCall, LoggedOperation, OpLog, name_of_command
from rankwise.sim.reporting.chakra_files import COLLECTIVES, ChakraNode, NodeKind, write_traces
from rankwise.sim.reporting.timeline import ReportedRun

_LONGEST_NAME = 200


class _Did(NamedTuple):
    """Something that took time on a SIP."""

    kind: NodeKind
    name: str
    start: int
    end: int
    attributes: dict[str, Any]

    @property
    def sort(self) -> str:
        if self.kind is not NodeKind.COMPUTE:
            return "communicating"
        return "host" if self.attributes.get("is_cpu_op") else "computing"


def write_chakra(path: str, run: ReportedRun) -> str:
    """Write the traces of a run; what was written, in words.

    Raises:
        ConfigError: two ranks share a SIP, so that its collectives cannot be told apart.
    """
    sips = [each.place.partition(".")[0] for each in run.op_log]
    count = 1 + max((int(sip[3:]) for sip in sips if sip.startswith("sip")), default=0)
    groups = _Groups(run.op_log, count)
    devices = [_nodes(did) for did in _by_sip(run.op_log, count, groups)]
    return write_traces(path, devices, groups.by_name)


class _Groups:
    """Which SIPs took part in which call."""

    def __init__(self, operations: Iterable[LoggedOperation], count: int) -> None:
        sips: dict[str, list[int]] = defaultdict(list)
        for each in operations:
            if each.kind in COLLECTIVES:
                sip = int(each.place.removeprefix("sip"))
                if sip in sips[each.name]:
                    raise ConfigError(
                        f"two ranks of {each.name} are on sip{sip}, and a trace is one rank's",
                        hint="run with a rank per SIP",
                    )
                sips[each.name].append(sip)
        self._sips = {name: tuple(sorted(each)) for name, each in sips.items()}
        others = dict.fromkeys(self._sips.values())
        others.pop(tuple(range(count)), None)  # the group of all needs no name
        self._names = {members: str(number) for number, members in enumerate(others, 1)}

    def sips(self, call: str) -> tuple[int, ...]:
        """Those that took part in a call, in order."""
        return self._sips[call]

    def of(self, call: str) -> str:
        """The name of the group of a call; empty for all."""
        return self._names.get(self._sips[call], "")

    @property
    def by_name(self) -> dict[str, tuple[int, ...]]:
        """The SIPs of every group that has a name."""
        return {name: members for members, name in self._names.items()}


def _by_sip(operations: OpLog, count: int, groups: _Groups) -> list[list[_Did]]:
    found: list[list[_Did]] = [[] for _ in range(count)]
    inside: dict[tuple[int, str], list[LoggedOperation]] = defaultdict(list)
    ended: set[tuple[str, int, str]] = set()
    messages = 0
    for each in operations:
        place, _, part = each.place.partition(".")
        if not place.startswith("sip"):
            continue
        sip = int(place.removeprefix("sip"))
        call = operations.calls.get(each.number)
        if part:
            inside[sip, each.name.rpartition(".")[0]].append(each)
        elif each.kind == "KernelLaunch":
            found[sip].append(_launch(each, inside.pop((sip, each.name), [])))
        elif call is not None:
            found[sip].append(
                _collective(each, call, groups) if call.way is None else _message(each, *call.way)
            )
            # The command that has carried the call out is logged after it, under this name.
            ended.add((each.place, each.end, name_of_command(each.name, call.rank)))
        elif each.kind == "Copy" and _target(each) != sip:
            attributes = {"comm_size": each.bytes, "comm_src": sip, "comm_dst": _target(each)}
            attributes["comm_tag"] = messages = messages + 1
            for kind, at in ((NodeKind.SEND, sip), (NodeKind.RECEIVE, _target(each))):
                found[at].append(_Did(kind, each.name, each.start, each.end, attributes))
        elif (each.place, each.end, each.name) not in ended:
            found[sip].append(_timed(each, is_cpu_op=each.kind != "Run"))
    return found


def _message(half: LoggedOperation, source: int, target: int) -> _Did:
    is_sender = bool(half.reads)
    attributes = {
        "is_cpu_op": False,
        "comm_size": sum(each.bytes for each in half.reads or half.writes),
        "comm_src": source,
        "comm_dst": target,
        "comm_tag": 0,
    }
    kind = NodeKind.SEND if is_sender else NodeKind.RECEIVE
    return _Did(kind, half.name, half.start, half.end, attributes)


def _target(copy: LoggedOperation) -> int:
    return sip_of(copy.writes[0].address) if copy.writes else int(copy.place.removeprefix("sip"))


def _timed(operation: LoggedOperation, **attributes: Any) -> _Did:
    attributes["duration_ps"] = operation.end - operation.start
    return _Did(NodeKind.COMPUTE, operation.name, operation.start, operation.end, attributes)


def _launch(launch: LoggedOperation, programs: Iterable[LoggedOperation]) -> _Did:
    flops = sum(each.flops for each in programs)
    moved = sum(each.bytes for each in programs)
    return _timed(launch, is_cpu_op=False, num_ops=flops, tensor_size=moved)


def _collective(call: LoggedOperation, called: LoggedCall, groups: _Groups) -> _Did:
    size = max(sum(each.bytes for each in operands) for operands in (call.reads, call.writes))
    sips = groups.sips(call.name)
    if call.kind in {"all_gather", "reduce_scatter", "gather"}:
        # What a rank puts in: of the gathering ones it is the smaller side, else the larger.
        size = sum(each.bytes for each in call.reads)
    elif call.kind == "scatter":  # what the root puts in: all blocks
        size = sum(each.bytes for each in call.writes) * len(sips)
    attributes: dict[str, Any] = {
        "is_cpu_op": False,
        "comm_type": COLLECTIVES.index(call.kind),
        "comm_size": size,
    }
    if group := groups.of(call.name):
        attributes["pg_name"] = group
    if called.signature.root != NO_RANK:
        attributes["root"] = sips[called.signature.root]
    if called.signature.algorithm:
        attributes["algorithm"] = called.signature.algorithm
    return _Did(NodeKind.COLLECTIVE, call.name, call.start, call.end, attributes)


def _nodes(did: Iterable[_Did]) -> Iterator[ChakraNode]:
    """What a SIP did, in the order of its beginnings, each after what had ended."""
    ordered = sorted(did, key=lambda each: (each.start, each.end))
    ends: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, each in enumerate(ordered):
        latest = [
            max((end, other) for end, other in known if end <= each.start)[1]
            for known in ends.values()
            if any(end <= each.start for end, _ in known)
        ]
        yield ChakraNode(
            number,
            each.name[:_LONGEST_NAME],
            each.kind,
            tuple(sorted(latest)),
            -(-(each.end - each.start) // PICOSECONDS_PER_MICROSECOND),
            each.attributes,
        )
        known = ends[each.sort]
        known.append((each.end, number))
        # A slice that ended before another one that has ended cannot be the latest of any.
        over = [item for item in known if item[0] <= each.start]
        for item in sorted(over)[:-1]:
            known.remove(item)
