"""An initialised worker of level 3 or more: its children, what they share, and how they are asked.

Numbers of children: chips or next-level workers first, sub workers behind them.
"""

import ctypes
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import msgspec

from rankwise.base.errors import RankwiseError, TreeValueError, WorkerDied
from rankwise.base.units import Instant
from rankwise.core.tasks.calls import ControlCode, encode_command
from rankwise.core.tree.vocabulary import ChildPool
from rankwise.drivers.real.tree.arena import SIZE as ARENA_BYTES
from rankwise.drivers.real.tree.children import ChildSpec
from rankwise.drivers.real.tree.engine import EngineSpec, TreeEngine
from rankwise.drivers.real.tree.mappings import SharedRanges
from rankwise.drivers.real.tree.reports import rebuilt
from rankwise.workers.bootstrap import (
    ChipBootstrapChannel,
    ChipCommBootstrapConfig,
    ChipContext,
    channel_bytes,
    context_of,
)
from rankwise.workers.callable_table import CallableTable
from rankwise.workers.child_context import ChildContext, path_here
from rankwise.workers.chip_timeline import Timeline
from rankwise.workers.errors import BadPointer, IndexOutOfRange
from rankwise.workers.roles import (
    JOIN,
    LEAVE,
    ChipRole,
    FunctionRole,
    WorkerRole,
    decode_exit_report,
    decode_left,
)
from rankwise.workers.staging import posix_shared_memory
from rankwise.workers.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from mmap import mmap

    from rankwise.base.failure import Failure
    from rankwise.drivers.real.tree.child import ChildEnds
    from rankwise.drivers.real.windows import WindowRegion
    from rankwise.workers.domains import DomainSpec
    from rankwise.workers.platforms.port import Leak
    from rankwise.workers.worker import Worker

_SUB_STAGE, _CHIP_STAGE, _NEXT_LEVEL_STAGE = range(3)


class WorkerTree:
    """The parts of an initialised worker; made by `init`, gone with `close`.

    Attributes:
        engine: the processes and the task graph.
        table: the numbers of callables.
        chip_contexts: what is known of each chip that was brought up.
        timeline: what chips have done in simulated time in the present or last run.
        leaks: after `close`, memory that was not freed, by the name of its chip.
    """

    def __init__(self, spec: WorkerSpec, table: CallableTable) -> None:
        self.spec = spec
        self.table = table
        self.next_level_count = len(spec.device_ids) or len(spec.next_level)
        self.next_level_kind = "chip" if spec.device_ids else "next-level worker"
        self.first_sub = self.next_level_count
        self.sub_count = spec.sub_count
        self.timeline = Timeline()
        self.leaks: dict[str, tuple[Leak, ...]] = {}
        self.ends: dict[int, Failure] = {}
        """The last ends of children, by number."""
        self.last_ending = ""
        self.chip_contexts: list[ChipContext] = []
        self._lost_before_close: frozenset[int] = frozenset()
        self._domains: dict[str, tuple[DomainSpec, WindowRegion, int, list[int]]] = {}
        self._communicators: dict[str, WindowRegion] = {}
        self._channels: list[int] = []
        self.engine = TreeEngine(
            EngineSpec(
                children=tuple(self._child_specs()),
                ring_depth=spec.ring_depth,
                heap_bytes=spec.heap_bytes,
                start_patience=spec.start_patience,
                close_patience=spec.close_patience,
                favourite=self.first_sub if spec.home is not None else None,
                journal=spec.journal,
            )
        )
        self._arena_span = self.engine.arena.address, self.engine.arena.address + ARENA_BYTES
        """Looked at for every tensor of every task."""
        self.engine.on_lost = self._on_lost
        if self.next_level_count:
            self.engine.on_left = self._on_left

    # Up and down

    def open(self, communicators: dict[str, "WindowRegion"]) -> None:
        """Start all children and wait for them; see `TreeEngine.start` for what is raised.

        Args:
            communicators: windows that an ancestor has made before this process was forked.
        """
        arena = self.engine.arena
        self._communicators = communicators
        self._channels = [
            arena.allocate(channel_bytes(len(config.buffers))) for config in self.spec.bootstraps
        ]
        self._shared = SharedRanges()
        self.table.share_through(arena)
        try:
            self.engine.start()
            self.chip_contexts = [
                context_of(device_id, config, self._channel(place).result())
                for place, (device_id, config) in enumerate(
                    zip(self.spec.device_ids, self.spec.bootstraps, strict=False)
                )
            ]
        except BaseException:
            self.close()
            raise

    def close(self) -> tuple[str, ...]:
        """End all children; the names of those that had to be killed, also further below."""
        self.table.share_through(None)
        self._lost_before_close = frozenset(self.engine.children.lost)
        try:
            killed = self.engine.close()
            return killed + self._read_exit_reports()
        finally:
            for _, region, _, _ in self._domains.values():
                region.close()
            self._domains.clear()

    def _read_exit_reports(self) -> tuple[str, ...]:
        killed: tuple[str, ...] = ()
        for _, report in sorted(self.engine.children.exit_reports.items()):
            if report.left:
                exit_report = decode_exit_report(report.left)
                self.leaks.update(exit_report.leaks)
                killed += exit_report.killed
        return killed

    def check_exit_reports(self) -> None:
        """Raise why the first child did not come to a good end, after `close`.

        Raises:
            WorkerDied: it ended in the middle of it; its outputs may not be where they should.
            Exception: what it raised.
        """
        children = self.engine.children
        for child, report in sorted(children.exit_reports.items()):
            if not report.left and child < self.first_sub:
                raise rebuilt(report, f"{children.name_of(child)}, when it was closed")
        for child, how in sorted(children.lost.items()):
            # A sub worker has nothing to store.
            if child not in self._lost_before_close and child < self.first_sub:
                raise WorkerDied(
                    f"{children.name_of(child)} {how} when it was closed",
                    hint="staged outputs may be missing; init() may be called again",
                )

    def give_up(self) -> None:
        """Kill all children: what they do is unknown. The worker can only be closed."""
        self._domains.clear()
        self.engine.children.give_up()

    def _channel(self, place: int) -> ChipBootstrapChannel:
        address = self.engine.arena.address + self._channels[place]
        return ChipBootstrapChannel(address, len(self.spec.bootstraps[place].buffers))

    def _child_specs(self) -> list[ChildSpec]:
        spec = self.spec
        above = path_here()
        where = f" of {above}" if above else ""
        near: tuple[int, ...] = ()
        home: tuple[int, ...] = ()
        if spec.home is not None:
            near, home = spec.home.neighbours, (spec.home.processor,)
        specs = [
            ChildSpec(
                f"chip {index}{where}", ChildPool.NEXT_LEVEL, _CHIP_STAGE, replaceable=False,
                role=self._chip_role(index, f"chip {index}{where}"), processors=near,
            )
            for index in range(len(spec.device_ids))
        ]  # fmt: skip
        specs += [
            ChildSpec(
                f"worker {index}{where}", ChildPool.NEXT_LEVEL, _NEXT_LEVEL_STAGE,
                replaceable=False, processors=near,
                role=self._worker_role(index, f"worker {index}{where}", worker),
            )
            for index, worker in enumerate(spec.next_level)
        ]  # fmt: skip
        specs += [
            ChildSpec(
                f"sub {index}{where}", ChildPool.SUB, _SUB_STAGE, replaceable=True,
                role=self._sub_role(index, f"sub {index}{where}"),
                processors=near if index else home,
            )
            for index in range(spec.sub_count)
        ]  # fmt: skip
        return specs

    def _chip_role(self, index: int, path: str) -> Any:
        def make(ends: "ChildEnds") -> ChipRole:
            spec = self.spec
            config = spec.bootstraps[index] if spec.bootstraps else None
            channel = self.engine.arena.address + self._channels[index] if config else 0
            child = ChildContext(spec.level, "chip", index, path)
            role = ChipRole(
                ends, self.table, child,
                platform=spec.platform, device_id=spec.device_ids[index], bootstrap=config,
                channel_address=channel, communicators=self._communicator, staging=self._staged,
            )  # fmt: skip
            role.checks_inputs = spec.checks_inputs
            return role

        return make

    def _worker_role(self, index: int, path: str, worker: "Worker") -> Any:
        def make(ends: "ChildEnds") -> WorkerRole:
            child = ChildContext(self.spec.level, "next_level", index, path)
            role = WorkerRole(ends, self.table, child, worker)
            role.checks_inputs = self.spec.checks_inputs
            return role

        return make

    def _sub_role(self, index: int, path: str) -> Any:
        def make(ends: "ChildEnds") -> FunctionRole:
            role = FunctionRole(ends, self.table, ChildContext(self.spec.level, "sub", index, path))
            role.checks_inputs = self.spec.checks_inputs
            return role

        return make

    def _communicator(self, config: ChipCommBootstrapConfig) -> "WindowRegion":
        return self._communicators[config.rootinfo_path]

    def _staged(self, name: str) -> "mmap | memoryview":
        staged = self.spec.staged.get(name)
        # A view: the memory stays the worker's, and is not closed after one use.
        return posix_shared_memory(name) if staged is None else memoryview(staged)

    # What happens

    def _on_lost(self, child: int, how: str) -> None:
        name = self.engine.children.name_of(child)
        self.ends[child] = self.engine.children.failure_of_ended(child, how)
        self.last_ending = f"{name} {how}"
        for _, region, _, members in self._domains.values():
            if child in members:
                region.mark_dead(members.index(child), f"{name} {how}")
        for rank, path in self.communicator_ranks(child):
            self._communicators[path].mark_dead(rank, f"{name} {how}")

    def communicator_ranks(self, child: int) -> list[tuple[int, str]]:
        """Which ranks of which communicators end with a child."""
        if child < len(self.spec.bootstraps):
            comm = self.spec.bootstraps[child].comm
            return [] if comm is None else [(comm.rank, comm.rootinfo_path)]
        if self.spec.next_level and child < len(self.spec.next_level):
            worker: Worker = self.spec.next_level[child]
            return [(comm.rank, comm.rootinfo_path) for comm in worker.spec.communicators()]
        return []

    def _on_left(self, number: int, child: int, left: bytes) -> int:
        del child
        timeline = decode_left(left)
        for entry in timeline.entries:
            self.timeline.entries.append(
                msgspec.structs.replace(entry, task=number) if entry.task >= 0 else entry
            )
        return timeline.end_ps

    # What children are asked for

    def check_shared(self, start: int, size_bytes: int, place: int) -> None:
        """Refuse a tensor in memory that children do not see.

        Raises:
            ConfigError: it is private memory of this process, or not mapped.
        """
        low, high = self._arena_span
        if (low <= start and start + size_bytes <= high) or self.is_shared(start, size_bytes):
            return
        if self.spec.takes_tokens and _is_nobodys(start, size_bytes):
            return
        raise TreeValueError(
            f"tensor {place} lies at {start:#x}, which children do not share with this process",
            hint="take its memory from orch.alloc() or worker.share(), or use shared memory that "
            "was mapped before init()",
        )

    def chip_of_device(self, device_id: int) -> int:
        """Which child has a device."""
        if device_id not in self.spec.device_ids:
            raise TreeValueError(f"a tensor is in the memory of device {device_id}, which is not "
                              "one of this worker's")  # fmt: skip
        return self.spec.device_ids.index(device_id)

    def _checked_chip(self, worker_id: int) -> int:
        if not 0 <= worker_id < self.next_level_count:
            kind = self.next_level_kind if self.next_level_count else "chip"
            raise IndexOutOfRange(
                f"there is no {kind} {worker_id}: there are {self.next_level_count}",
                hint=None if self.next_level_count else "a level-3 worker has device_ids=[…]",
            )
        if not self.spec.device_ids:
            raise TreeValueError(
                f"next-level worker {worker_id} has no device memory of its own",
                hint="ask for it in the orchestration function of that worker",
            )
        return worker_id

    def malloc(self, size: int, worker_id: int) -> int:
        """Memory of a chip; returns its address."""
        child = self._checked_chip(worker_id)
        answer = self.engine.command(child, encode_command(ControlCode.MALLOC, size))
        return int.from_bytes(answer, "little")

    def free(self, pointer: int, worker_id: int) -> None:
        """Give back what `malloc` gave."""
        child = self._checked_chip(worker_id)
        self.engine.command(child, encode_command(ControlCode.FREE, pointer))

    def copy_to(self, destination: int, source: int, size: int, worker_id: int) -> None:
        """Copy from memory of this process to a chip's."""
        child = self._checked_chip(worker_id)
        with self.engine.gate().closed(), _AddressPassage(self, source, size) as passage:
            if passage.address != source:
                ctypes.memmove(passage.address, source, size)
            command = encode_command(ControlCode.COPY_TO, destination, passage.address, size)
            self.engine.command(child, command)

    def copy_from(self, destination: int, source: int, size: int, worker_id: int) -> None:
        """Copy from a chip's memory to memory of this process."""
        child = self._checked_chip(worker_id)
        with self.engine.gate().closed(), _AddressPassage(self, destination, size) as passage:
            command = encode_command(ControlCode.COPY_FROM, passage.address, source, size)
            self.engine.command(child, command)
            if passage.address != destination:
                ctypes.memmove(destination, passage.address, size)

    def is_shared(self, start: int, size_bytes: int) -> bool:
        """Whether children see these bytes of this process."""
        arena = self.engine.arena
        return arena.contains(start, size_bytes) or self._shared.cover(start, size_bytes)

    # Domains

    def open_domain(
        self,
        name: str,
        ranks: Sequence[int] | None,
        buffers: Mapping[str, tuple[Any, Any]],
        *,
        signals: Sequence[str],
        timeout: float,
        subs: bool,
    ) -> None:
        """Give children windows, and let them join."""
        from rankwise.workers.domains import place_domain, plan_domain  # noqa: PLC0415  # numpy

        with self.engine.gate().closed():
            if name in self._domains:
                raise TreeValueError(f"there is a domain {name!r} already")
            base, count, kind = 0, self.next_level_count, self.next_level_kind
            if subs:
                base, count, kind = self.first_sub, self.sub_count, "sub worker"
            ranks = range(count) if ranks is None else ranks
            for rank in ranks:
                if not 0 <= rank < count:
                    raise IndexOutOfRange(f"there is no {kind} {rank}: there are {count}")
            spec = plan_domain(name, ranks, buffers, signals=signals, timeout=timeout)
            arena = self.engine.arena
            offset = arena.allocate(spec.region_bytes)
            spec = spec.at(offset)
            region = place_domain(arena.memory, spec)
            members = [base + rank for rank in spec.ranks]
            self._domains[name] = (spec, region, offset, members)
            for rank, child in enumerate(members):
                self.engine.command(child, JOIN + pickle.dumps((spec, rank)))

    @property
    def has_domains(self) -> bool:
        """Whether there are any."""
        return bool(self._domains)

    def close_domains(self, deadline: Instant | None) -> None:
        """Let all ranks leave, and take the windows back; who has not left by then is killed."""
        for name, (_, region, offset, members) in list(self._domains.items()):
            for child in members:
                try:
                    self.engine.command(child, LEAVE + pickle.dumps(name), deadline)
                except TimeoutError:
                    self.engine.children.kill(child)
                except RankwiseError:
                    pass  # one that has ended is not there to leave, and one may have left before
            region.close()
            self.engine.arena.release(offset)
            del self._domains[name]


def _is_nobodys(start: int, size_bytes: int) -> bool:
    from rankwise.workers.arrays import host_bytes  # noqa: PLC0415  # numpy takes its time

    try:
        host_bytes(start, size_bytes)
    except BadPointer:
        return True
    return False


class _AddressPassage:
    """An address that a chip sees: the given one, or of memory on the way to and from it."""

    def __init__(self, tree: WorkerTree, address: int, size: int) -> None:
        self._engine = tree.engine
        self._arena = tree.engine.arena
        self._forgotten_before = tree.engine.forgotten_commands
        self._offset: int | None = None
        self.address = address
        if size and not tree.is_shared(address, size):
            self._offset = self._arena.allocate(size)
            self.address = self._arena.address + self._offset

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # When the end was not waited for, the chip may still work on it.
        is_over = self._engine.forgotten_commands == self._forgotten_before
        if self._offset is not None and is_over:
            self._arena.release(self._offset)
