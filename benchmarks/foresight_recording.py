"""One rank of a training script, alone on fake tensors: what it does, to be priced on any machine.

The script runs on torch's fake process group, so a rank costs seconds of CPU whatever the model.
All ranks of the recorded scripts do the same, so a collective begins when this one comes. DDP's
reducer is C++ that looks into tensors: a stand-in counts its buckets.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankwise.sim.prediction.clocks import Passage, Prediction, PricedWork
from rankwise.sim.prediction.costs import DeviceOperation
from rankwise.sim.prediction.machines import MachineTopology, RealMachine
from rankwise.sim.prediction.queued_clocks import Lane, QueuedClock
from rankwise.sim.torch import operations, storages

sys.path.insert(0, str(Path(__file__).parent / "programs"))

import transformer  # it lies beside the other programs

BUCKET_BYTES = 25 << 20
PER_NODE = 8
_KINDS = {
    "allgather_base": "all_gather", "all_gather_into_tensor": "all_gather",
    "reduce_scatter_base": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "allreduce": "all_reduce", "all_reduce": "all_reduce",
}  # fmt: skip


class Record(NamedTuple):
    """What a rank has done.

    Attributes:
        ranks: how many there are.
        entries: in order: `("op", work)`, `("collective", kind, size, is_async)`, and so on.
        peak_bytes: of its memory.
    """

    ranks: int
    entries: list[tuple[Any, ...]]
    peak_bytes: int


class _Recorder(QueuedClock):
    """A clock that writes down what it is told."""

    entries: list[tuple[Any, ...]]

    def compute(self, priced: PricedWork) -> None:
        self.entries.append(("op", priced.work))

    def note_free(self) -> None:
        self.entries.append(("free",))

    def note_subclass(self) -> None:
        self.entries.append(("subclass",))


class _Streams:
    """Streams and events of `torch.cpu`, which FSDP uses, as entries."""

    def __init__(self, entries: list[tuple[Any, ...]]) -> None:
        self.entries = entries
        self.count = 0
        self.present = self.default = self.stream()

    def stream(self, *_: Any, **__: Any) -> "_Stream":
        self.count += 1
        return _Stream(self, self.count - 1)

    def install(self) -> None:
        names = {
            "Stream": self.stream, "stream": _In, "current_stream": lambda *_: self.present,
            "Event": lambda *_, **__: _Event(self),
        }  # fmt: skip
        for name, value in names.items():
            setattr(torch.cpu, name, value)


class _Stream:
    def __init__(self, streams: _Streams, number: int) -> None:
        self.streams, self.number = streams, number

    def wait_stream(self, other: "_Stream") -> None:
        self.streams.entries.append(("wait_stream", self.number, other.number))

    def wait_event(self, event: "_Event | None") -> None:
        if event is not None:
            self.streams.entries.append(("wait_event", self.number, event.entry))

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event(self.streams)
        event.record(self)
        return event


class _Event:
    def __init__(self, streams: _Streams) -> None:
        self.streams, self.entry = streams, -1

    def record(self, stream: _Stream | None = None) -> None:
        self.entry = len(self.streams.entries)
        self.streams.entries.append(("record", (stream or self.streams.present).number))

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or self.streams.present).wait_event(self)


class _In:
    def __init__(self, stream: _Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = self.stream.streams.present
            self._use(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self._use(self.before)

    @staticmethod
    def _use(stream: _Stream) -> None:
        stream.streams.present = stream
        stream.streams.entries.append(("use", stream.number))


class _Ddp(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Reduces gradients in buckets, as `DistributedDataParallel` does."""

    def __init__(self, module: nn.Module, entries: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.module, self.entries, self.pending = module, entries, 0
        self.require_backward_grad_sync = True
        weights = list(module.parameters())
        self.left = self.count = len(weights)
        for each in weights:
            each.register_post_accumulate_grad_hook(self._reduce)

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def _reduce(self, weight: torch.Tensor) -> None:
        if not self.require_backward_grad_sync:
            return
        self.pending += weight.nbytes
        self.left -= 1
        if self.pending > BUCKET_BYTES or not self.left:
            self.entries.append(("collective", "all_reduce", self.pending, True))
            self.pending = 0
        self.left = self.left or self.count


def record(words: str, ranks: int, like: MachineTopology) -> Record:
    """What a rank of `transformer.py` does with these flags; once per process."""
    prediction = Prediction(like, ranks)
    clock = _Recorder(prediction, 0, 0)
    prediction.clocks[0] = clock
    entries: list[tuple[Any, ...]] = []
    clock.entries = entries
    _Streams(entries).install()
    torch.autograd.set_multithreading_enabled(False)
    mode = operations.charge_thread(operations.ChargingMode(clock))
    _hook_fakes(entries)
    nn.parallel.DistributedDataParallel = lambda module, **_: _Ddp(module, entries)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    register_optimizer_step_post_hook(lambda *_: entries.append(("step",)))
    options = transformer.options(words.split())
    mesh = init_device_mesh("cpu", (ranks,)) if options.parallel == "fsdp" else None
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.is_of_program = True
    torch._C._push_on_torch_dispatch_stack(mode)  # noqa: SLF001  # as on simulated ranks
    try:
        with fake:
            transformer.train(options, "cpu", mesh)
    finally:
        torch._C._pop_torch_dispatch_stack(None)  # noqa: SLF001  # the same
    return Record(ranks, entries, clock.memory.peak_of_run)


def _hook_fakes(entries: list[tuple[Any, ...]]) -> None:
    original = FakeTensorMode.__torch_dispatch__
    charged = operations.with_fakes(original)

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001  # torch's name
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func.namespace in {"c10d", "_c10d_functional"}:
            _note_collective(func, args, entries)
            return original(self, func, types, args, kwargs)
        return charged(self, func, types, args, kwargs)

    FakeTensorMode.__torch_dispatch__ = dispatch
    torch.UntypedStorage.resize_ = storages.with_counting(torch.UntypedStorage.resize_)


def _note_collective(func: Any, args: Any, entries: list[tuple[Any, ...]]) -> None:
    name = func._schema.name.partition("::")[2].strip("_")  # noqa: SLF001  # no public way
    kind = _KINDS.get(name)
    if kind is None:
        return
    is_functional = func.namespace == "_c10d_functional" or kind == "all_reduce"
    given = args[0] if is_functional else args[1]
    tensors = given if isinstance(given, list | tuple) else [given]
    entries.append(("collective", kind, sum(each.nbytes for each in tensors), False))


def priced(record: Record, topology: MachineTopology) -> Prediction:
    """The record's time on a machine."""
    prediction = Prediction(topology, record.ranks)
    clock = QueuedClock(prediction, 0, 0)
    prediction.clocks[0] = clock
    lanes: dict[int, Lane] = {0: clock.default_lane}
    events: dict[int, tuple[int, int]] = {}
    members, pending, free = tuple(range(record.ranks)), list[Passage](), 0

    def lane_of(number: int) -> Lane:
        if number not in lanes:
            lanes[number] = clock.new_lane()
        return lanes[number]

    for index, entry in enumerate(record.entries):
        match entry:
            case ("op", DeviceOperation() as work):
                clock.compute(clock.price(work))
            case ("free",):
                clock.note_free()
            case ("subclass",):
                clock.note_subclass()
            case ("use", number):
                clock.lane = lane_of(number)
            case ("wait_stream", number, other):
                clock.let_wait(lane_of(number), lane_of(other).ends_at, lane_of(other).waits_from)
            case ("record", number):
                lane = lane_of(number)
                events[index] = (max(lane.ends_at, clock.time), lane.waits_from)
            case ("wait_event", number, event):
                clock.let_wait(lane_of(number), *events[event])
            case ("collective", kind, size, is_async):
                passage = clock.come(None, size)
                passage.begins_at = max(free, passage.came_at)
                duration = prediction.network.time(kind, size, members, passage.begins_at)
                free = passage.ends_at = passage.begins_at + duration
                clock.communicate(duration)
                if is_async:
                    pending.append(passage)
                else:
                    clock.wait(passage)
            case ("step",):
                for passage in pending:
                    clock.wait(passage)
                pending = []
                clock.end_step()
            case _:
                raise AssertionError(f"{entry} is recorded by nothing")
    return prediction


def topology_of(real: RealMachine, ranks: int) -> MachineTopology:
    """So many devices of a machine, on full nodes."""
    per_node = min(ranks, PER_NODE)
    return MachineTopology(real, -(-ranks // per_node), per_node, real.name)
