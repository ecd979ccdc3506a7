"""A process group of torch whose operations meet in a simulated world.

Each operation brings its tensors to the group's meeting; the last rank to come computes everybody's
results. An operation returns a `RehearsedWork`, and `Work.wait` lets other ranks run. What the
ranks must agree on is part of the call's words: operation, root, reduction, shape, dtype.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.distributed import Work as TorchWork
from torch.futures import Future

from rankwise.base.errors import CollectiveError, CollectiveTimeout
from rankwise.base.units import SECOND, Duration
from rankwise.base.wording import ranks_in_words
from rankwise.sim.rehearsal.meetings import ANY_SOURCE, Group, Meeting, Post
from rankwise.sim.torch.arithmetic import (
    data_of,
    flat_of,
    op_kind,
    op_name,
    plainly,
    ring_reduced,
)

if TYPE_CHECKING:
    from rankwise.sim.prediction import Passage, RankClock

Loads = Sequence[Any]
_Timed = tuple["RankClock", "Passage"]
"""A clock, and what it waits for."""
_KINDS = {
    "all_reduce_coalesced": "all_reduce", "all_gather_single": "all_gather",
    "all_gather_coalesced": "all_gather", "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all", "monitored_barrier": "barrier",
    "symm_mem.rendezvous": "barrier", "symm_mem.multimem_all_gather_out": "all_gather",
    "symm_mem.reduce_scatter_out": "reduce_scatter",
    **dict.fromkeys(
        (
            "symm_mem.one_shot_all_reduce", "symm_mem.one_shot_all_reduce_out",
            "symm_mem.one_shot_all_reduce_copy", "symm_mem.two_shot_all_reduce_",
            "symm_mem.two_shot_all_reduce_out", "symm_mem.multimem_all_reduce_",
            "symm_mem.multimem_one_shot_all_reduce", "symm_mem.multimem_one_shot_all_reduce_out",
        ),
        "all_reduce",
    ),
}  # fmt: skip
"""What a network calls operations that have several names here."""
_NO_TIMEOUT = timedelta(0)
_SAYS_NOTHING = ("", "undefined", "default_pg")
"""Descriptions of groups to which nobody has given one."""
_INTERFACE = ("/distributed_c10d.py", "/c10d_logger.py", "/contextlib.py")
"""Files through which a program calls operations."""
_OF_BARRIER = torch.zeros(1)
"""What the future of a barrier gives."""


class RehearsedWork(TorchWork):  # type: ignore[misc]  # torch is untyped here
    """An operation under way.

    Args:
        group, gates: what is to be waited for.
        outputs: the tensors that are filled.
        source: tells who has sent, if it is a message.
        handle: of `Group.open_handle`; None where this operation needs no wait of its own.
        tensors: those that must be left alone until somebody has waited.
        passages: what clocks wait for, on a modelled machine.
    """

    def __init__(
        self,
        group: Group,
        gates: Sequence[Meeting | Post],
        outputs: Any,
        source: Callable[[], int] | None = None,
        *,
        handle: int | None = None,
        tensors: Sequence[Tensor] = (),
        passages: Sequence[_Timed] = (),
    ) -> None:
        super().__init__()
        self._handle = handle
        self._versions = [(each, _version(each)) for each in tensors]
        self._group = group
        self._gates = gates
        self._outputs = outputs
        self._source = source
        self._passages = passages
        self._future: Any = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Let others run until it is done."""
        self._close()
        self._meet(timeout)
        self._let_time_pass()
        return True

    def _meet(self, timeout: timedelta = _NO_TIMEOUT) -> None:
        seconds = timeout.total_seconds()
        patience = Duration(round(seconds * SECOND)) if seconds > 0 else None
        for gate in self._gates:
            if not self._group.wait(gate, patience):
                raise CollectiveTimeout(f"waited {seconds:g} s of virtual time for {gate.told()}")

    def _let_time_pass(self) -> None:
        """Go on when it is over, on a machine that is modelled."""
        for clock, passage in self._passages:
            clock.wait(passage)

    def synchronize(self) -> None:
        """There is no stream to synchronise with."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether everybody has come; if not, others run before the next look."""
        is_completed = all(gate.is_open for gate in self._gates)
        if is_completed:
            self._close()
        else:
            self._group.poll()
        return is_completed

    def is_success(self) -> bool:
        """Whether it is done, and well."""
        return all(gate.is_open and gate.error is None for gate in self._gates)

    def exception(self) -> Exception | None:
        """Why it has failed, if it has."""
        return next((gate.error for gate in self._gates if gate.error is not None), None)

    def result(self) -> Any:
        """The tensors that were filled."""
        return self._outputs

    def get_future(self) -> Any:
        """A future that is done: C++ code blocks on it where no other rank could run.

        DDP asks for it in the middle of backward and waits at its end, so the time passes there.
        """
        if self._future is None:
            self._close()
            self._meet()
            self._future = Future()
            self._future.set_result(self._outputs)
            if self._passages:
                try:
                    Variable._execution_engine.queue_callback(self._let_time_pass)  # noqa: SLF001  # as DDP does in C++
                except RuntimeError:  # nothing goes backward
                    self._let_time_pass()
        return self._future

    def _close(self) -> None:
        """Somebody waits for it: were its tensors left alone until now?"""
        if self._handle is not None:
            written = [each for each, version in self._versions if _version(each) != version]
            self._group.close_handle(self._handle, told_shapes(written[:1]))
            self._handle, self._versions = None, []

    def source_rank(self) -> int:
        """Which rank of the group a message came from."""
        return -1 if self._source is None else self._source()

    _source_rank = source_rank


class NamedProcessGroup(ProcessGroup):  # type: ignore[misc]  # the same
    """What torch asks any process group in Python for: names.

    Args:
        rank, size: this rank in the group, and how many there are.
        backend: the backend that the program has asked for; it is told this name.
    """

    def __init__(self, rank: int, size: int, backend: str) -> None:
        super().__init__(rank, size)
        self._backend_name = backend
        self._own_name = ""
        self._own_description = ""
        self.bound_device_id = None

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """What C++ is told: it takes a group of the name gloo for its own class."""
        return "rankwise"

    def name(self) -> str:
        """The backend that the program has asked for."""
        return self._backend_name

    def _set_group_name(self, name: str) -> None:
        self._own_name = name

    def _set_group_desc(self, description: str) -> None:
        self._own_description = description

    @property
    def group_name(self) -> str:
        """The name in torch's registry, unique to this rank."""
        return self._own_name

    @property
    def group_desc(self) -> str:
        """What torch calls it."""
        return self._own_description

    def getGroupName(self) -> str:  # noqa: N802  # the same
        """The same, for C++."""
        return self._own_name

    def getGroupDesc(self) -> str:  # noqa: N802  # the same
        """The same, for C++."""
        return self._own_description

    def _get_backend_name(self) -> str:
        return self._backend_name


class RehearsedProcessGroup(NamedProcessGroup):
    """One rank's end of a group.

    Args:
        rank: this rank in the group.
        group: where its members meet.
        backend: the backend that the program has asked for.
        clock: the rank's clock on a modelled machine; None if none is.
    """

    def __init__(
        self, rank: int, group: Group, backend: str, clock: "RankClock | None" = None
    ) -> None:
        super().__init__(rank, len(group.ranks), backend)
        self._clock = clock
        self._number = group.ranks[rank]
        self._meetings = group
        self._count = len(group.ranks)
        self._coalescing: list[RehearsedWork] | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the group, as the world counts them."""
        return self._meetings.ranks

    def exchange(
        self, call: str, alike: Sequence[Tensor], load: Any, carry_out: Callable[[Loads], None]
    ) -> None:
        """Do an operation that is none of torch's process groups, and wait for it."""
        self._meet(call, alike, load, carry_out, opts=None).wait()

    def shutdown(self) -> None:
        """Nothing is held."""

    def abort(self) -> None:
        """Nothing is held."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored: a deadlock is found at once, so no operation times out."""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> RehearsedWork:
        """Reduce over all ranks."""
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> RehearsedWork:
        """Reduce several tensors as one."""
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: list[Tensor], opts: Any) -> RehearsedWork:
        op = _reduction(opts)

        def carry_out(loads: Loads) -> None:
            if len(tensors) > 1:
                _spread(ring_reduced([_joined(load) for load in loads], op), loads)
                return
            own = [data_of(tensor) for (tensor,) in loads]
            result = ring_reduced(own, op).view(own[0].shape)
            torch._foreach_copy_(own, [result] * len(own))

        return self._meet(_reducing(name, op_kind(op)), tensors, tensors, carry_out, opts=opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> RehearsedWork:
        """Give the root's tensors to all."""
        root = opts.rootRank

        def carry_out(loads: Loads) -> None:
            for index, load in enumerate(loads):
                if index != root:
                    _copy_all(load, loads[root])

        call = f"broadcast #? from {self._told(root)}"
        return self._meet(call, tensors, tensors, carry_out, opts=opts, root=root)

    def reduce(self, tensors: list[Tensor], opts: Any) -> RehearsedWork:
        """Reduce over all ranks; the root gets the result."""
        op, root = opts.reduceOp, opts.rootRank

        def carry_out(loads: Loads) -> None:
            _spread(ring_reduced([_joined(load) for load in loads], op), [loads[root]])

        call = f"reduce #? ({op_name(op)}) to {self._told(root)}"
        return self._meet(call, tensors, tensors, carry_out, opts=opts, root=root)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> RehearsedWork:
        """Every rank gets everybody's tensor."""

        def carry_out(loads: Loads) -> None:
            for (gathered,), _ in loads:
                _copy_all(gathered, [own for _, (own,) in loads])

        return self._meet("all_gather #?", inputs, (outputs, inputs), carry_out, outputs, opts=opts)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> RehearsedWork:
        """Every rank gets everybody's tensor, one after the other."""
        return self._gather_single("all_gather_single", [output], [own], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> RehearsedWork:
        """The same for several tensors."""
        return self._gather_single("all_gather_single", outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> RehearsedWork:
        """Every rank gets everybody's tensors."""

        def carry_out(loads: Loads) -> None:
            for gathered, _ in loads:
                for row, (_, own) in zip(gathered, loads, strict=True):
                    _copy_all(row, own)

        return self._meet(
            "all_gather_coalesced #?", inputs, (outputs, inputs), carry_out, outputs, opts=opts
        )

    def _gather_single(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> RehearsedWork:
        def carry_out(loads: Loads) -> None:
            for position in range(len(inputs)):
                whole = torch.cat([flat_of(own[position]) for _, own in loads])
                for gathered, _ in loads:
                    _fill(gathered[position], whole)

        return self._meet(f"{name} #?", inputs, (outputs, inputs), carry_out, outputs, opts=opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> RehearsedWork:
        """The root gets everybody's tensor."""
        root = opts.rootRank

        def carry_out(loads: Loads) -> None:
            (gathered,), _ = loads[root]
            _copy_all(gathered, [own for _, (own,) in loads])

        call = f"gather #? to {self._told(root)}"
        return self._meet(call, inputs, (outputs, inputs), carry_out, outputs, opts=opts, root=root)

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> RehearsedWork:
        """Every rank gets its tensor from the root."""
        root = opts.rootRank

        def carry_out(loads: Loads) -> None:
            _, (scattered,) = loads[root]
            sources = [data_of(each).clone() for each in scattered]
            _copy_all([own for (own,), _ in loads], sources)

        call = f"scatter #? from {self._told(root)}"
        return self._meet(
            call, outputs, (outputs, inputs), carry_out, outputs, opts=opts, root=root
        )

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> RehearsedWork:
        """Every rank gets its part of the reduction; gloo reduces each part by itself."""
        op = _reduction(opts)

        def carry_out(loads: Loads) -> None:
            results = [
                ring_reduced([flat_of(parts[index]) for _, (parts,) in loads], op)
                for index in range(len(loads))
            ]
            for ((own,), _), result in zip(loads, results, strict=True):
                _fill(own, result)

        call = f"reduce_scatter #? ({op_name(op)})"
        return self._meet(call, outputs, (outputs, inputs), carry_out, outputs, opts=opts)

    def reduce_scatter_single(
        self, output: Tensor, whole: Tensor, opts: Any = None
    ) -> RehearsedWork:
        """Every rank gets its part of the reduction; gloo reduces the whole."""
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> RehearsedWork:
        """The same for several tensors."""
        op = _reduction(opts)

        def carry_out(loads: Loads) -> None:
            for position in range(len(inputs)):
                whole = ring_reduced([flat_of(each[position]) for _, each in loads], op)
                for own, part in zip(loads, whole.chunk(len(loads)), strict=True):
                    _fill(own[0][position], part)

        call = f"reduce_scatter_single #? ({op_name(op)})"
        return self._meet(call, inputs, (outputs, inputs), carry_out, outputs, opts=opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> RehearsedWork:
        """Rank i's j-th tensor goes to rank j's i-th place."""

        def carry_out(loads: Loads) -> None:
            sent = [[flat_of(each).clone() for each in own] for _, own in loads]
            for receiver, (places, _) in enumerate(loads):
                for sender, place in enumerate(places):
                    _fill(place, sent[sender][receiver])

        return self._meet("all_to_all #?", [], (outputs, inputs), carry_out, outputs, opts=opts)

    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_splits: list[int] | None,
        input_splits: list[int] | None, opts: Any = None,
    ) -> RehearsedWork:  # fmt: skip
        """The same with the parts of one tensor."""
        count = self._count

        def cut(whole: Tensor, splits: list[int] | None) -> list[Tensor]:
            rows = data_of(whole)
            return list(rows.split(list(splits) if splits else rows.shape[0] // count))

        def carry_out(loads: Loads) -> None:
            sent = [[part.clone() for part in cut(each, splits)] for _, each, _, splits in loads]
            for receiver, (whole, _, splits, _) in enumerate(loads):
                for sender, place in enumerate(cut(whole, splits)):
                    _fill(place, sent[sender][receiver].reshape(-1))

        load = (output, own, output_splits, input_splits)
        call = f"all_to_all_single #? of {_dtype(own)}"
        return self._meet(call, [], load, carry_out, [output], opts=opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> RehearsedWork:
        """Wait for all ranks."""
        return self._meet("barrier #?", [], None, _nothing, [_OF_BARRIER], opts=opts)

    def monitored_barrier(
        self, timeout: timedelta = _NO_TIMEOUT, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and name those that do not come in time."""
        del wait_all_ranks
        words = SimpleNamespace(asyncOp=False)
        work = self._meet("monitored_barrier #?", [], None, _nothing, opts=words)
        (meeting,) = work._gates  # noqa: SLF001  # ours
        assert isinstance(meeting, Meeting), "a barrier is not posted"
        patience = Duration(round(timeout.total_seconds() * SECOND)) or None
        if self._meetings.wait(meeting, patience):
            work.wait()
        else:
            missing = [rank for rank in self._meetings.ranks if rank not in meeting.arrivals]
            raise RuntimeError(
                f"{ranks_in_words(missing)} failed to pass monitoredBarrier in "
                f"{round(timeout.total_seconds() * 1000)} ms"
            )

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> RehearsedWork:
        """Send tensors to a rank of the group; it is over when they are received."""
        call = f"send of {told_shapes(tensors)} to {self._told(peer)}, tag {tag},"
        return self._post(self._meetings.ranks[peer], tag, call, tensors, is_send=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> RehearsedWork:
        """Receive tensors from a rank of the group."""
        call = f"recv of {told_shapes(tensors)} from {self._told(peer)}, tag {tag},"
        return self._post(self._meetings.ranks[peer], tag, call, tensors, is_send=False)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> RehearsedWork:
        """Receive tensors from the first rank that sends."""
        call = f"recv of {told_shapes(tensors)} from any rank, tag {tag},"
        return self._post(ANY_SOURCE, tag, call, tensors, is_send=False)

    def _set_group_desc(self, description: str) -> None:
        super()._set_group_desc(description)
        if self._meetings.label and description not in _SAYS_NOTHING:
            self._meetings.label = description.removeprefix("mesh_")

    def _start_coalescing(self, device: Any) -> None:
        del device
        self._coalescing = []

    def _end_coalescing(self, device: Any) -> RehearsedWork:
        del device
        works, self._coalescing = self._coalescing or [], None
        gates = [gate for work in works for gate in work._gates]  # noqa: SLF001  # ours
        handle = gates and self._meetings.open_handle(self._number, gates[0], _INTERFACE)
        passages = [each for work in works for each in work._passages]  # noqa: SLF001  # the same
        return RehearsedWork(self._meetings, gates, [], handle=handle or None, passages=passages)

    def _get_sequence_number_for_group(self) -> int:
        return self._meetings.begun_by(self._number)

    def _set_sequence_number_for_group(self) -> None:
        """It counts from 1 anyway."""

    def _has_hooks(self) -> bool:
        return False

    def _meet(  # a row of a table
        self,
        call: str,
        alike: Sequence[Tensor],
        load: Any,
        carry_out: Callable[[Loads], None],
        outputs: Any = None,
        *,
        opts: Any,
        root: int = 0,
    ) -> RehearsedWork:
        """Come to the next operation; `alike` must have the same shapes and dtypes everywhere."""
        if len(alike) == 1:
            words = _called(call, alike[0].shape, alike[0].dtype)
        else:
            words = f"{call} of {told_shapes(alike)}" if alike else call
        outputs = alike if outputs is None else outputs
        brought, computed, clock = load, partial(plainly, carry_out), self._clock
        passages: list[_Timed] = []
        if clock is not None:
            name = call.partition(" ")[0]
            brought = clock.come(load, _brought(name, load))
            kind = _KINDS.get(name, name)
            computed = partial(clock.carry_out, self._meetings, kind, root, computed)
            passages.append((clock, brought))
        meeting = self._meetings.meet(self._number, words, brought, computed)
        is_waited_for = not getattr(opts, "asyncOp", True)  # by torch itself, at once
        if is_waited_for and self._coalescing is None:
            return RehearsedWork(self._meetings, [meeting], outputs, passages=passages)
        return self._work(meeting, load, outputs, passages=passages)

    def _work(
        self,
        gate: Meeting | Post,
        load: Any,
        outputs: Any,
        source: Callable[[], int] | None = None,
        passages: Sequence[_Timed] = (),
    ) -> RehearsedWork:
        if self._coalescing is not None:
            work = RehearsedWork(self._meetings, [gate], outputs, source, passages=passages)
            self._coalescing.append(work)
            return work
        handle = self._meetings.open_handle(self._number, gate, _INTERFACE)
        tensors = [] if handle is None else _tensors_of(load)
        return RehearsedWork(
            self._meetings, [gate], outputs, source,
            handle=handle, tensors=tensors, passages=passages,
        )  # fmt: skip

    def _post(
        self, peer: int, tag: int, call: str, tensors: list[Tensor], *, is_send: bool
    ) -> RehearsedWork:
        clock = self._clock
        passage = None if clock is None else clock.come(tensors, _bytes_in(tensors))
        post = self._meetings.post(
            self._number, peer, tag, call, (passage, tensors), is_send=is_send,
            deliver=_delivered if clock is None else partial(_delivered, timed=clock.deliver),
        )  # fmt: skip
        passages = [] if clock is None or passage is None else [(clock, passage)]
        source = None if is_send else lambda: self._meetings.ranks.index(post.peer)
        return self._work(post, tensors, tensors, source, passages)

    def _told(self, rank: int) -> str:
        return f"rank {self._meetings.ranks[rank]}"


def _delivered(
    send: Post, receive: Post, timed: Callable[[int, int, Any, Any], None] | None = None
) -> None:
    """Move a message, if its two ends agree on what it is."""
    (send_passage, sent), (receive_passage, received) = send.load, receive.load
    for source, target in zip(sent, received, strict=True):
        if source.numel() != target.numel() or source.dtype != target.dtype:
            raise CollectiveError(
                f"a message does not fit:\n  {send.told_with_place()}\n"
                f"  {receive.told_with_place()}"
            )
    plainly(_copy_all, received, sent)
    if timed is not None:
        timed(send.rank, receive.rank, send_passage, receive_passage)


def _brought(name: str, load: Any) -> int:
    """How many bytes a rank puts into an operation; into a scatter, what it takes out."""
    if isinstance(load, tuple):
        load = load[0 if name == "scatter" else 1]
    return _bytes_in(load)


def _bytes_in(load: Any) -> int:
    if isinstance(load, Tensor):
        return int(load.nbytes)
    return sum(map(_bytes_in, load)) if load else 0


def _tensors_of(load: Any) -> list[Tensor]:
    """All tensors of a load, but for views: a write to another part of their base counts as one."""
    if isinstance(load, Tensor):
        return [] if load._is_view() or load.is_inference() else [load]  # noqa: SLF001  # no other name
    if isinstance(load, list | tuple):
        return [each for part in load for each in _tensors_of(part)]
    return []


def _version(tensor: Tensor) -> int:
    return int(tensor._version)  # noqa: SLF001  # the same


def _reduction(opts: Any) -> Any:
    return torch.distributed.ReduceOp.SUM if opts is None else opts.reduceOp


def told_shapes(tensors: Sequence[Tensor]) -> str:
    """Tell them as `(4, 3) float32`; several are joined, many are counted."""
    told = [_shape(tensor.shape, tensor.dtype) for tensor in tensors[:4]]
    more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
    return ", ".join(told) + more


@lru_cache(maxsize=1024)
def _called(call: str, shape: Any, dtype: Any) -> str:
    return f"{call} of {_shape(shape, dtype)}"


@lru_cache(maxsize=1024)
def _reducing(name: str, kind: Any) -> str:
    return f"{name} #? ({op_name(kind)})"


@lru_cache(maxsize=1024)
def _shape(shape: Any, dtype: Any) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    flats = [flat_of(tensor) for tensor in tensors]
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def _spread(flat: Tensor, loads: Sequence[Sequence[Tensor]]) -> None:
    """Write one flat result into the tensors of each load, one after the other."""
    for tensors in loads:
        begin = 0
        for tensor in tensors:
            _fill(tensor, flat[begin : begin + tensor.numel()])
            begin += tensor.numel()


def _fill(tensor: Tensor, flat: Tensor) -> None:
    data_of(tensor).copy_(flat.reshape(tensor.shape))


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    pairs = zip(targets, sources, strict=True)
    fitting = [
        source if source.shape == target.shape else source.reshape(target.shape)
        for target, source in pairs
    ]
    if targets:
        torch._foreach_copy_([data_of(target) for target in targets], fitting)


def _nothing(_loads: Loads) -> None:
    """Move no data."""
