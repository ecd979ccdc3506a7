"""A process group of torch whose operations meet in a simulated world.

Each operation brings its tensors to a collective of the group; the last rank to come computes all
results. An operation returns a `RehearsedWork`, and `Work.wait` lets other ranks run. What the
ranks must agree on is the call's signature: operation, root, reduction, shape, dtype.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from rankwise.base.errors import CollectiveError
from rankwise.base.units import SECOND, Duration
from rankwise.base.wording import ranks_in_words
from rankwise.core.matching import ANY_RANK, NO_RANK, CallSignature
from rankwise.simranks.torch.cuda_graphs import Capture, TimedCapture, present_capture
from rankwise.simranks.torch.gloo_arithmetic import (
    OF_COMPLEX,
    PREMUL_SUM,
    add_sparse,
    data_of,
    flat_of,
    op_name,
    op_number,
    ring_reduced,
)
from rankwise.simranks.torch.in_flight import TensorGuard, carry
from rankwise.simranks.torch.layout_rules import LayoutRules
from rankwise.simranks.torch.loads import (
    Loads,
    bytes_brought,
    bytes_in,
    check_expanded,
    copy_all,
    fill,
    has_no_data,
    in_memory_order,
    joined,
    spread,
    write_all,
    write_reduced,
)
from rankwise.simranks.torch.named_group import NamedProcessGroup
from rankwise.simranks.torch.sentences import (
    check_dtype,
    describe_dtype,
    of_dtype,
    operation,
    reducing,
    with_tensor,
    with_tensors,
)
from rankwise.simranks.torch.shape_rules import ShapeRules
from rankwise.simranks.torch.storages import mark_hollow
from rankwise.simranks.torch.work import NO_TIMEOUT, RehearsedWork, Timed, WorkDone, WorkOfGraph
from rankwise.simranks.world.collective_groups import (
    CollectiveGroup,
    PendingCollective,
    Post,
)
from rankwise.simranks.world.turn_takers import taking_turns

if TYPE_CHECKING:
    from rankwise.simranks.prediction import RankClock

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
_SAYS_NOTHING = ("", "undefined", "default_pg")
"""Descriptions of groups that the program has not given."""
_INTERFACE = ("/distributed_c10d.py", "/c10d_logger.py", "/contextlib.py")
"""Files through which a program calls operations."""
_OF_SPARSE = frozenset(("all_reduce", "all_reduce_coalesced"))
"""Operations that take sparse tensors."""
_STRIDED, _is_contiguous = torch.strided, Tensor.is_contiguous
_OF_BARRIER = torch.zeros(1)
"""What the future of a barrier gives."""


class RehearsedProcessGroup(NamedProcessGroup):
    """One rank's end of a group.

    Args:
        rank: this rank in the group.
        group: where its members meet.
        backend: the backend that the program has asked for.
        clock: the rank's clock on a modelled machine; None if none is.
        compares_shapes: whether the backend refuses tensors that have the right size alone.
    """

    def __init__(  # what there is to say of a rank's end
        self,
        rank: int,
        group: CollectiveGroup,
        backend: str,
        clock: "RankClock | None" = None,
        *,
        compares_shapes: bool,
    ) -> None:
        super().__init__(rank, len(group.ranks), backend)
        self._clock = clock
        self._number = group.ranks[rank]
        self._rules = ShapeRules(self._number, len(group.ranks), backend, compares_shapes)
        self._layouts = LayoutRules(self._number, backend, is_of_gloo=compares_shapes)
        self._group = group
        group.compares_sizes = True
        self._count = len(group.ranks)
        self._rank_in_group = rank
        self._coalescing: list[RehearsedWork] | None = None
        # An operation that torch itself waits for at once, and then forgets, has been waited for.
        self._done = WorkDone(group, [], None)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the group, as the world counts them."""
        return self._group.ranks

    @taking_turns
    def exchange(
        self,
        call: CallSignature,
        alike: Sequence[Tensor],
        load: Any,
        carry_out: Callable[[Loads], None],
    ) -> None:
        """Do an operation that is none of torch's process groups, and wait for it."""
        self._wait(*self._come(call, alike, load, carry_out))

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
        op = self._reduction(name, opts, tensors)
        carry_out = partial(_reduce_for_all, op, self._group)
        return self._meet(reducing(name, op_number(op)), tensors, tensors, carry_out, opts=opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> RehearsedWork:
        """Give the root's tensors to all."""
        root = opts.rootRank

        def carry_out(loads: Loads) -> None:
            check_expanded(loads)
            for index, load in enumerate(loads):
                if index != root:
                    copy_all(load, loads[root], write_reduced)

        call = operation("broadcast", self._root(root))
        return self._meet(call, tensors, tensors, carry_out, opts=opts, root=root)

    def reduce(self, tensors: list[Tensor], opts: Any) -> RehearsedWork:
        """Reduce over all ranks; the root gets the result."""
        op, root = self._reduction("reduce", opts, tensors), opts.rootRank

        def carry_out(loads: Loads) -> None:
            check_expanded(loads)
            spread(ring_reduced([joined(load) for load in loads], op), [loads[root]])

        call = reducing("reduce", op_number(op), self._root(root))
        return self._meet(call, tensors, tensors, carry_out, opts=opts, root=root)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> RehearsedWork:
        """Every rank gets the tensor of each rank."""
        (gathered,), (own,) = outputs, inputs
        self._rules.check_count("all_gather", "output", gathered)
        alike = [own] if self._rules.compares_shapes else _alike(own, gathered)
        if len(alike) == 1:
            self._rules.check_parts("all_gather", ("output", gathered), ("input", own))

        def carry_out(loads: Loads) -> None:
            for (gathered,), _ in loads:
                copy_all(gathered, [own for _, (own,) in loads])

        call = operation("all_gather")
        return self._meet(call, alike, (outputs, inputs), carry_out, outputs, opts=opts)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> RehearsedWork:
        """Every rank gets the tensor of each rank, one after the other."""
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
        """Every rank gets the tensors of each rank."""
        for row in outputs:
            for output, own in zip(row, inputs, strict=True):
                self._rules.check_parts(
                    "all_gather_coalesced", ("output", [output]), ("input", own)
                )

        def carry_out(loads: Loads) -> None:
            for gathered, _ in loads:
                for row, (_, own) in zip(gathered, loads, strict=True):
                    copy_all(row, own)

        call = operation("all_gather_coalesced")
        return self._meet(call, inputs, (outputs, inputs), carry_out, outputs, opts=opts)

    def _gather_single(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> RehearsedWork:
        for output, own in zip(outputs, inputs, strict=True):
            self._rules.check_joined(name, ("output", output), ("input", own))

        def carry_out(loads: Loads) -> None:
            for position in range(len(inputs)):
                whole = torch.cat([flat_of(own[position]) for _, own in loads])
                for gathered, _ in loads:
                    fill(gathered[position], whole)

        call = operation(name)
        return self._meet(call, inputs, (outputs, inputs), carry_out, outputs, opts=opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> RehearsedWork:
        """The root gets the tensor of each rank."""
        root = opts.rootRank
        if root == self.rank():
            self._rules.check_count("gather", "output", outputs[0])
            of_root = ("output", outputs[0])
            self._rules.check_parts("gather", of_root, ("input", inputs[0]), is_exact=True)

        def carry_out(loads: Loads) -> None:
            (gathered,), _ = loads[root]
            copy_all(gathered, [own for _, (own,) in loads])

        call = operation("gather", self._root(root))
        return self._meet(call, inputs, (outputs, inputs), carry_out, outputs, opts=opts, root=root)

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> RehearsedWork:
        """Every rank gets its tensor from the root."""
        root = opts.rootRank
        if root == self.rank():
            self._rules.check_count("scatter", "input", inputs[0])
            of_root = ("input", inputs[0])
            self._rules.check_parts("scatter", of_root, ("output", outputs[0]), is_exact=True)

        def carry_out(loads: Loads) -> None:
            _, (scattered,) = loads[root]
            sources = [data_of(each).clone() for each in scattered]
            copy_all([own for (own,), _ in loads], sources)

        call = operation("scatter", self._root(root))
        return self._meet(
            call, outputs, (outputs, inputs), carry_out, outputs, opts=opts, root=root
        )

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> RehearsedWork:
        """Every rank gets its part of the reduction; gloo reduces each part by itself."""
        (own,), (parts,) = outputs, inputs
        op = self._reduction("reduce_scatter", opts, parts)
        self._rules.check_count("reduce_scatter", "input", parts)
        part = parts[self.rank()]
        self._rules.check_parts("reduce_scatter", ("input", [part]), ("output", own))

        def carry_out(loads: Loads) -> None:
            results = [
                ring_reduced([flat_of(parts[index]) for _, (parts,) in loads], op)
                for index in range(len(loads))
            ]
            for ((own,), _), result in zip(loads, results, strict=True):
                fill(own, result)

        call, alike = reducing("reduce_scatter", op_number(op)), _alike(own, parts)
        return self._meet(call, alike, (outputs, inputs), carry_out, outputs, opts=opts)

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
        op = self._reduction("reduce_scatter_single", opts, inputs)
        for own, whole in zip(outputs, inputs, strict=True):
            self._rules.check_joined("reduce_scatter_single", ("input", whole), ("output", own))

        def carry_out(loads: Loads) -> None:
            for position in range(len(inputs)):
                whole = ring_reduced([flat_of(each[position]) for _, each in loads], op)
                for own, part in zip(loads, whole.chunk(len(loads)), strict=True):
                    fill(own[0][position], part)

        call = reducing("reduce_scatter_single", op_number(op))
        return self._meet(call, inputs, (outputs, inputs), carry_out, outputs, opts=opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> RehearsedWork:
        """Rank i's j-th tensor goes to rank j's i-th place."""
        rules, first = self._rules, inputs[0]
        rules.check_count("all_to_all", "output", outputs)
        rules.check_count("all_to_all", "input", inputs)
        if rules.compares_shapes:
            rules.check_parts("all_to_all", ("output", outputs), ("input tensor 0", first))
            rules.check_parts("all_to_all", ("input", inputs), ("input tensor 0", first))

        def carry_out(loads: Loads) -> None:
            sent = [[flat_of(each).clone() for each in own] for _, own in loads]
            self._deal("all_to_all", sent, [places for places, _ in loads])

        for tensor in inputs:
            check_dtype("all_to_all", tensor.dtype, self._backend_name)
        call = operation("all_to_all")
        return self._meet(call, [], (outputs, inputs), carry_out, outputs, opts=opts)

    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_splits: list[int] | None,
        input_splits: list[int] | None, opts: Any = None,
    ) -> RehearsedWork:  # fmt: skip
        """The same with the parts of one tensor."""
        count = self._count
        self._rules.check_splits("output", output, output_splits)
        self._rules.check_splits("input", own, input_splits)

        def cut(whole: Tensor, splits: list[int] | None) -> list[Tensor]:
            rows = data_of(whole)
            return list(rows.split(list(splits) if splits else [rows.shape[0] // count] * count))

        def carry_out(loads: Loads) -> None:
            sent = [[part.clone() for part in cut(each, splits)] for _, each, _, splits in loads]
            places = [cut(whole, splits) for whole, _, splits, _ in loads]
            self._deal("all_to_all_single", sent, places)

        check_dtype("all_to_all_single", own.dtype, self._backend_name)
        load = (output, own, output_splits, input_splits)
        call = of_dtype(operation("all_to_all_single"), own.dtype)
        return self._meet(call, [], load, carry_out, [output], opts=opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> RehearsedWork:
        """Wait for all ranks."""
        return self._meet(operation("barrier"), [], None, _nothing, [_OF_BARRIER], opts=opts)

    @taking_turns
    def monitored_barrier(
        self, timeout: timedelta = NO_TIMEOUT, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and name those that do not come in time."""
        del wait_all_ranks
        pending, passages = self._come(operation("monitored_barrier"), [], None, _nothing)
        patience = Duration(round(timeout.total_seconds() * SECOND)) or None
        if not self._group.wait(pending, patience):
            missing = ranks_in_words(pending.missing()).capitalize()  # as gloo says it
            time = f"{round(timeout.total_seconds() * 1000)} ms"
            error = f"{missing} failed to pass monitoredBarrier in {time}: timed out"
            pending.fail(RuntimeError(error))
        self._wait(pending, passages)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> RehearsedWork:
        """Send tensors to a rank of the group; it is over when they are received."""
        self._check_peer("send", peer)
        return self._post("send", self._group.ranks[peer], tag, tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> RehearsedWork:
        """Receive tensors from a rank of the group."""
        self._check_peer("recv", peer)
        return self._post("recv", self._group.ranks[peer], tag, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> RehearsedWork:
        """Receive tensors from the first rank that sends."""
        return self._post("recv", ANY_RANK, tag, tensors)

    def _set_group_desc(self, description: str) -> None:
        super()._set_group_desc(description)
        if self._group.label and description not in _SAYS_NOTHING:
            self._group.label = description.removeprefix("mesh_")

    @taking_turns
    def _start_coalescing(self, device: Any) -> None:
        del device
        self._coalescing = []

    @taking_turns
    def _end_coalescing(self, device: Any) -> RehearsedWork:
        del device
        works, self._coalescing = self._coalescing or [], None
        if works and all(isinstance(work, WorkOfGraph) for work in works):
            waits = [wait for work in works for wait in work.waits]
            return WorkOfGraph(self._group, [], waits)
        gates = [gate for work in works for gate in work._gates]  # noqa: SLF001  # ours
        handle = gates and self._group.open_handle(self._number, gates[0], _INTERFACE)
        passages = [each for work in works for each in work._passages]  # noqa: SLF001  # the same
        return RehearsedWork(self._group, gates, [], handle=handle or None, passages=passages)

    def _get_sequence_number_for_group(self) -> int:
        return self._group.begun_by(self._number)

    @taking_turns
    def _meet(  # a row of a table
        self,
        call: CallSignature,
        alike: Sequence[Tensor],
        load: Any,
        carry_out: Callable[[Loads], None],
        outputs: Any = None,
        *,
        opts: Any,
        root: int = 0,
    ) -> RehearsedWork:
        """Come to the next operation, and wait for it if torch would do nothing else with it."""
        is_usual = load is None
        if load is alike and len(alike) == 1:  # most operations: so it is written out
            (tensor,) = alike
            # Then each rule takes it. A sparse tensor has another layout.
            is_usual = (
                type(tensor) is Tensor
                and tensor.layout is _STRIDED
                and tensor.is_contiguous()
                and not (tensor.requires_grad or tensor.is_meta)
            )
        if not is_usual:
            self._layouts.check(call.operation, load, is_root=root == self._rank_in_group)
            if expanded := self._layouts.describe_expanded(load):
                self._group.note_layout(f"{call.operation}: {expanded}")
        if (capture := present_capture()) is not None:
            outputs = alike if outputs is None else outputs
            if isinstance(capture, TimedCapture):
                described, _ = self._described(call, alike, load, carry_out, has_data=is_usual)
                size = bytes_brought(call.operation, load)
                captured = _CapturedCall(
                    partial(self._arrive, described, (), size, _nothing, root), self._wait, capture
                )
                is_async = getattr(opts, "asyncOp", True)
                return self._work_of_graph(captured, outputs, is_async=is_async)
            # A replay calls the functional collective as a whole, and comes here again.
            if capture.is_in_functional:
                return WorkOfGraph(self._group, outputs, [])
            capture.keep(load)
            again = partial(self._come, call, alike, load, carry_out, root, has_data=is_usual)
            # Waited for at once: DDP reads what it gives before it waits.
            return self._work_of_graph(
                _CapturedCall(again, self._wait, capture), outputs, is_async=False
            )
        pending, passages = self._come(call, alike, load, carry_out, root, has_data=is_usual)
        if getattr(opts, "asyncOp", True) or self._coalescing is not None:
            outputs = alike if outputs is None else outputs
            filled = load[0] if isinstance(load, tuple) else load
            if call.operation == "broadcast" and root == self._rank_in_group:
                filled = None  # what the root gives is read alone: it may be read meanwhile
            return self._work(pending, load, outputs, filled, passages=passages)
        self._wait(pending, passages)
        return self._done

    def _work_of_graph(
        self, captured: "_CapturedCall", outputs: Any, *, is_async: bool
    ) -> RehearsedWork:
        """What the program gets while a graph is captured: nothing is done before its replay."""
        is_data = isinstance(captured.capture, Capture)
        is_later = is_async or (self._coalescing is not None and not is_data)
        if not is_later:
            captured.wait()
        work = WorkOfGraph(self._group, outputs, [captured.wait] if is_later else [])
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _come(
        self,
        call: CallSignature,
        alike: Sequence[Tensor],
        load: Any,
        carry_out: Callable[[Loads], None],
        root: int = 0,
        *,
        has_data: bool = False,
    ) -> tuple[PendingCollective, Sequence[Timed]]:
        """Come to the next operation; `alike` must have the same shapes and dtypes everywhere.

        `has_data` says that the load is known to have, if it has tensors.
        """
        call, carry_out = self._described(call, alike, load, carry_out, has_data=has_data)
        size = 0 if self._clock is None else bytes_brought(call.operation, load)
        return self._arrive(call, load, size, partial(_carried, carry_out), root)

    def _described(
        self,
        call: CallSignature,
        alike: Sequence[Tensor],
        load: Any,
        carry_out: Callable[[Loads], None],
        *,
        has_data: bool,
    ) -> tuple[CallSignature, Callable[[Loads], None]]:
        """A call with its shapes and dtypes, and what carries it out."""
        name = call.operation
        if len(alike) == 1:
            if alike[0].is_sparse and name not in _OF_SPARSE:
                raise NotImplementedError(f"{name} takes no sparse tensors")
            call = with_tensor(call, alike[0].shape, alike[0].dtype, self._backend_name)
        elif alike:
            for tensor in alike:
                check_dtype(name, tensor.dtype, self._backend_name)
            call = with_tensors(call, alike)
        if not has_data and has_no_data(load):  # as torch's own kernels for such tensors
            # Said of fake and meta tensors, so that ranks that bring others are found.
            return msgspec.structs.replace(call, has_data=False), _nothing
        return call, carry_out

    def _arrive(
        self,
        call: CallSignature,
        load: Any,
        size: int,
        computed: Callable[..., None],
        root: int,
    ) -> tuple[PendingCollective, Sequence[Timed]]:
        name, clock = call.operation, self._clock
        if clock is None:
            return self._group.meet(self._number, call, load, computed), ()
        at = NO_RANK if call.root == NO_RANK else root
        passage = clock.come(load, size, call, self._group.ranks, at)
        if clock.recording is not None:
            clock.recording.note_arrival(passage, self, call, size, root)
        kind = _KINDS.get(name, name)
        timed = partial(clock.carry_out, self._group, kind, root, computed)
        return self._group.meet(self._number, call, passage, timed), [(clock, passage)]

    def come_again(
        self, call: CallSignature, size: int, root: int
    ) -> tuple[PendingCollective, Sequence[Timed]]:
        """Come to a collective as in a recorded microbatch, without its tensors."""
        return self._arrive(call, (), size, _nothing, root)

    def finish(self, come: tuple[PendingCollective, Sequence[Timed]]) -> None:
        """Wait for it."""
        self._wait(*come)

    def _wait(self, gate: PendingCollective | Post, passages: Sequence[Timed]) -> None:
        self._group.wait(gate)
        for clock, passage in passages:
            clock.wait(passage)

    def _work(
        self,
        gate: PendingCollective | Post,
        load: Any,
        outputs: Any,
        filled: Any,
        *,
        source: Callable[[], int] | None = None,
        passages: Sequence[Timed] = (),
    ) -> RehearsedWork:
        """What the program gets; `filled` are the tensors that it must not read before the wait."""
        if self._coalescing is not None:
            work = RehearsedWork(self._group, [gate], outputs, source, passages=passages)
            self._coalescing.append(work)
            return work
        handle = self._group.open_handle(self._number, gate, _INTERFACE)
        watch = None if handle is None else TensorGuard(load, filled)
        return RehearsedWork(
            self._group, [gate], outputs, source, handle=handle, watch=watch, passages=passages
        )

    @taking_turns
    def _post(self, name: str, peer: int, tag: int, tensors: list[Tensor]) -> RehearsedWork:
        is_send = name == "send"
        self._layouts.check(name, tensors)
        self._layouts.warn_of_message(tensors)
        call = with_tensors(CallSignature(name, root=peer, tag=tag), tensors)
        if (capture := present_capture()) is not None:
            brought: Sequence[Tensor] = tensors
            if isinstance(capture, TimedCapture):
                brought = ()
            elif not is_send:
                capture.keep(tensors)
            come = partial(self._come_to_message, call, peer, brought, bytes_in(tensors))
            captured = _CapturedCall(come, self._wait, capture)
            return self._work_of_graph(captured, tensors, is_async=True)
        post, passages = self._come_to_message(call, peer, tensors, bytes_in(tensors))
        source = None if is_send else lambda: self._group.ranks.index(post.peer)
        filled = None if is_send else tensors
        return self._work(post, tensors, tensors, filled, source=source, passages=passages)

    def _come_to_message(
        self, call: CallSignature, peer: int, tensors: Sequence[Tensor], size: int
    ) -> tuple[Post, Sequence[Timed]]:
        """Come to one end of a message of so many bytes."""
        clock, passage = self._clock, None
        if clock is not None:
            ranks = self._group.ranks
            at = ranks.index(peer) if peer in ranks else NO_RANK
            passage = clock.come_to_message(tensors, size, call, ranks, at)
        post = self._group.post(
            self._number, peer, call.tag, call, (passage, tensors),
            is_send=call.operation == "send",
            deliver=_delivered if clock is None else partial(_delivered, timed=clock.deliver),
        )  # fmt: skip
        return post, [] if clock is None or passage is None else [(clock, passage)]

    def _deal(
        self, name: str, sent: Sequence[Sequence[Tensor]], places: Sequence[Sequence[Tensor]]
    ) -> None:
        """Write rank i's j-th tensor to rank j's i-th place."""
        for receiver, own in enumerate(places):
            for sender, place in enumerate(own):
                part = sent[sender][receiver]
                if part.numel() != place.numel():
                    raise CollectiveError(
                        f"{name}: {self._describe(sender)} sends {part.numel()} elements to"
                        f" {self._describe(receiver)}, which has room for {place.numel()}"
                    )
                fill(place, part)

    def _reduction(self, name: str, opts: Any, tensors: Sequence[Tensor]) -> Any:
        """Its number, if that says all: torch's own object costs more while each rank keeps one.

        Raises:
            RuntimeError: the backend does not reduce so.
        """
        op = torch.distributed.ReduceOp.SUM if opts is None else opts.reduceOp
        number = hash(op)  # as `op_number`
        if number == PREMUL_SUM and self._rules.compares_shapes:
            raise RuntimeError(f"Cannot use ReduceOp.PREMUL_SUM with Gloo, in {name}")
        if number not in OF_COMPLEX and any(map(torch.is_complex, tensors)):
            kind = op_name(op).upper()
            raise RuntimeError(f"{name} does not support ReduceOp.{kind} on complex tensors")
        return op if number == PREMUL_SUM else number

    def _check_peer(self, name: str, peer: int) -> None:
        if not 0 <= peer < self._count:
            raise ValueError(
                f"{name}: rank {peer} is not in the group, which has ranks 0 to {self._count - 1}"
            )

    def _root(self, root: int) -> int:
        """The number in the world of the rank of the group that is an operation's root."""
        if not 0 <= root < self._count:
            raise RuntimeError(
                f"invalid root rank: {root}; the group has ranks 0 to {self._count - 1}"
            )
        return self._group.ranks[root]

    def _describe(self, rank: int) -> str:
        return f"rank {self._group.ranks[rank]}"


def _delivered(
    send: Post, receive: Post, timed: Callable[[int, int, Any, Any], None] | None = None
) -> None:
    """Move a message, if its two ends agree on what it is."""
    (send_passage, sent), (receive_passage, received) = send.load, receive.load
    ends = zip(sent, received, strict=True) if sent and received else ()  # a graph may have none
    for source, target in ends:
        if source.numel() != target.numel() or source.dtype != target.dtype:
            raise CollectiveError(
                f"a message does not fit: rank {send.rank} sends {source.numel()} of"
                f" {describe_dtype(source)}, rank {receive.rank} takes {target.numel()} of"
                f" {describe_dtype(target)}:\n  {send.describe_with_place()}\n"
                f"  {receive.describe_with_place()}"
            )
    have_none = has_no_data(sent), has_no_data(received)
    if not any(have_none):
        carry(copy_all if sent and received else _nothing, received, sent)
    elif not all(have_none):
        raise CollectiveError(
            f"one end of a message is without data:\n  {send.describe_with_place()}\n"
            f"  {receive.describe_with_place()}"
        )
    if timed is not None:
        timed(send.rank, receive.rank, send_passage, receive_passage)


def _reduce_for_all(op: Any, group: CollectiveGroup, loads: Loads) -> None:
    """Put the reduction of what all have brought into each one's tensors."""
    tensors = loads[0]
    is_single = len(tensors) == 1 and not group.has_other_shapes
    if is_single:
        dense = [tensor for (tensor,) in loads]
        if all(map(_is_contiguous, dense)):  # as usual: no tensor is expanded
            result = ring_reduced(dense, op).view(dense[0].shape)
            write_all(dense, [result] * len(dense))
            return
    if not group.has_other_shapes:
        check_expanded(loads)
    if not is_single:
        spread(ring_reduced([joined(load) for load in loads], op), loads)
    elif tensors[0].is_sparse:
        add_sparse([tensor for (tensor,) in loads], op)
    else:
        own = list(in_memory_order([tensor for (tensor,) in loads]))
        result = ring_reduced(own, op).view(own[0].shape)
        write_reduced(own, [result] * len(own))


def _alike(own: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """What must be equal on all ranks: of parts of several sizes, the whole list."""
    size = own.numel()
    return parts if any(each.numel() != size for each in parts) else [own]


def _nothing(*_loads: Loads) -> None:
    """Move no data."""


def _carried(carry_out: Callable[[Loads], None], loads: Loads) -> None:
    """Carry an operation out, unless a graph without data takes part: it has no tensors."""
    if () not in loads:
        carry(carry_out, loads)
    else:
        mark_hollow([load for load in loads if load != ()])


class _CapturedCall:
    """A collective or message of a graph: each replay comes to it anew.

    Without data it keeps no tensors: that would keep their memory.

    Args:
        come: comes to it.
        finish: waits for it to be over.
        capture: that of the graph.
    """

    def __init__(
        self,
        come: Callable[[], tuple[PendingCollective | Post, Sequence[Timed]]],
        finish: Callable[[PendingCollective | Post, Sequence[Timed]], None],
        capture: Capture | TimedCapture,
    ) -> None:
        self._come = come
        self._finish = finish
        self.capture = capture
        self._under_way: tuple[PendingCollective | Post, Sequence[Timed]] | None = None
        capture.note(self._begin)

    def wait(self) -> None:
        """Let each replay wait for it here; after the capture, wait for the latest replay."""
        if present_capture() is self.capture:
            self.capture.note(self._end)
        elif self._under_way is not None:
            self._end()

    def _begin(self) -> None:
        self._under_way = self._come()

    def _end(self) -> None:
        assert self._under_way is not None, "a replay begins it first"
        self._finish(*self._under_way)
