"""Equal microbatches of a pipeline: a few are carried out, and the others take their steps again.

A stage of `torch.distributed.pipelining` calls its module once for each microbatch, forward and
backward. The first microbatch of each step is carried out. Two more are recorded (`recordings`),
and must take the same steps. From then on a microbatch whose arguments are alike takes these steps
without the program. It gives a tensor with a node of autograd whose backward takes those of the
backward part, so a loss and the schedule's own code are carried out as they are.
"""

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.nn.parallel import DistributedDataParallel

from rankwise.simranks.prediction.device_memory import DeviceFull
from rankwise.simranks.prediction.holders import Holder
from rankwise.simranks.prediction.queued_clocks import QueuedClock
from rankwise.simranks.prediction.recordings import (
    Recording,
    Repetition,
    Replay,
    StorageInUse,
    are_alike,
)
from rankwise.simranks.torch.cuda_graphs import WITHOUT_DATA
from rankwise.simranks.torch.storages import Storage, hold, storage_of
from rankwise.simranks.world.world import running_rank

_KEY = "equal microbatches"
_RECORDED_MAX = 4


def repeat_equal_microbatches(repetition: Repetition) -> Callable[[], None]:
    """Have the stages of pipelines carry equal microbatches out once; returns what undoes it."""
    base: Any = import_module("torch.distributed.pipelining.stage")._PipelineStageBase  # noqa: SLF001  # no public name
    stack = ExitStack()

    def replace(name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(base, name)
        setattr(base, name, make(original))
        stack.callback(setattr, base, name, original)

    def numbered_forward(original: Any) -> Any:
        def forward_one_chunk(stage: Any, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            microbatches = _microbatches_of(stage, repetition)
            if microbatches is not None:
                microbatches.number = fwd_chunk_id
            return original(stage, fwd_chunk_id, *args, **kwargs)

        return forward_one_chunk

    def numbered_backward(original: Any) -> Any:
        def backward_one_chunk(stage: Any, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            microbatches = _microbatches_of(stage, repetition)
            if microbatches is not None:
                microbatches.number = bwd_chunk_id
            return original(stage, bwd_chunk_id, *args, **kwargs)

        return backward_one_chunk

    def repeated_forward(original: Any) -> Any:
        def forward_maybe_with_nosync(stage: Any, *args: Any, **kwargs: Any) -> Any:
            microbatches = _microbatches_of(stage, repetition)
            if microbatches is None:
                return original(stage, *args, **kwargs)
            return microbatches.forward(original, args, kwargs)

        return forward_maybe_with_nosync

    def repeated_backward(original: Any) -> Any:
        def backward_maybe_with_nosync(
            stage: Any, backward_type: str, *args: Any, **kwargs: Any
        ) -> Any:
            microbatches = _microbatches_of(stage, repetition)
            if microbatches is None:
                return original(stage, backward_type, *args, **kwargs)
            return microbatches.backward(original, backward_type, args, kwargs)

        return backward_maybe_with_nosync

    replace("forward_one_chunk", numbered_forward)
    replace("backward_one_chunk", numbered_backward)
    replace("forward_maybe_with_nosync", repeated_forward)
    replace("backward_maybe_with_nosync", repeated_backward)
    return stack.close


class _StageOutput:
    """The tensor that a stage gives, as it is made again.

    Raises:
        ValueError: it cannot be made again.
    """

    def __init__(self, recording: Recording, tensor: Any) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        held = storage_of(local) if isinstance(local, Tensor) else None
        number = None if held is None else recording.number_of(held)
        if held is None or number is None:
            raise ValueError("it gives something else than one new tensor")
        if not local.is_contiguous() or local.nbytes != held.size:
            raise ValueError("it gives a view")
        self.number = number
        self.shape, self.dtype = local.shape, local.dtype
        self.spec = getattr(tensor, "_spec", None)
        self.kind = type(tensor)

    def made_again(self) -> Tensor:
        """A tensor like it, without numbers."""
        with torch._C._DisableTorchDispatch(), DisableTorchFunction():  # noqa: SLF001  # no operation of the program
            return torch.empty(self.shape, dtype=self.dtype)

    def wrapped(self, local: Tensor) -> Any:
        """The same as a DTensor, if it was one."""
        return local if self.spec is None else self.kind(local, self.spec, requires_grad=False)

    def described(self) -> Any:
        """What must be equal."""
        return self.number, self.shape, self.dtype, self.spec


class _Recorded:
    """A microbatch that is recorded.

    Attributes:
        steps: that it takes.
        output: that it gives, once its forward part is over.
        grads: what it gives for each argument, once its backward part is over.
        begun: whether its backward part has begun.
    """

    def __init__(self, clock: QueuedClock) -> None:
        self.steps = Recording(clock)
        self.output: _StageOutput | None = None
        self.grads: list[_StageOutput | None] | None = None
        self.begun = False

    def begin_backward(self) -> None:
        """What comes now belongs to its backward part."""
        if not self.begun:
            self.begun = True
            self.steps.begin(self.steps.backward)

    def is_like(self, other: "_Recorded") -> bool:
        """Whether the forward parts are equal."""
        if self.output is None or other.output is None:
            return False
        is_equal = are_alike(self.steps.forward, other.steps.forward)
        return is_equal and self.output.described() == other.output.described()

    def is_equal_to(self, other: "_Recorded") -> bool:
        """The same of both parts."""
        if self.grads is None or other.grads is None:
            return False
        ones, others = (
            [None if each is None else each.described() for each in grads]
            for grads in (self.grads, other.grads)
        )
        is_equal = self.is_like(other) and ones == others
        return is_equal and are_alike(self.steps.backward, other.steps.backward)


class _Microbatches:
    """Those of one stage on one rank.

    Attributes:
        number: of the microbatch whose part is under way.
    """

    def __init__(self, stage: Any, clock: QueuedClock, repetition: Repetition) -> None:
        self.number = -1
        self._stage = stage
        self._clock = clock
        self._repetition = repetition
        self._alike: Any = None
        self._recorded: list[_Recorded] = []
        self._open: dict[int, _Recorded] = {}
        self._repeated: dict[int, _Repeated] = {}
        self._model: _Recorded | None = None
        self._before: _Recorded | None = None
        self._is_whole = self._is_off = self._has_gradients = False
        self._is_confirmed = False
        self._anchor: Any = None

    def forward(self, original: Any, args: Any, kwargs: Any) -> Any:
        """Call the module, or take the steps again."""
        if self.number == 0:
            self._begin_step()
        alike = _likeness(self._stage, args, kwargs)
        # The first one of a step differs from the others: it gathers parameters, makes gradients.
        if self.number == 0 or alike is None or self._is_off or not self._repetition.is_wanted:
            return original(self._stage, *args, **kwargs)
        if alike != self._alike:
            self._alike, self._is_confirmed = alike, False
            self._forget()
        if self._model is not None:
            repeated = self._repeated[self.number] = _Repeated(self._model, self._clock)
            return _Again.apply(repeated, self._anchor_of_graph(), *args)
        return self._record(original, args, kwargs)

    def backward(self, original: Any, kind: str, args: Any, kwargs: Any) -> Any:
        """Go backward through the module, or take the steps again."""
        repeated = self._repeated.pop(self.number, None)
        if repeated is not None:
            if kind != "full" or not self._is_whole or not self._has_gradients:
                self._repetition.stop("microbatches of a pipeline are not equal")
            result = original(self._stage, kind, *args, **kwargs)
            self._clock.time = repeated.ended_at  # the steps have what the engine does with grads
            repeated.close()
            return result
        recorded = self._open.pop(self.number, None)
        self._has_gradients = True
        if recorded is None:
            return original(self._stage, kind, *args, **kwargs)
        if not self._stage.is_last:
            recorded.begin_backward()
        try:
            result = original(self._stage, kind, *args, **kwargs)
        finally:
            recorded.steps.end()
        if kind != "full" or not recorded.begun:
            recorded.steps.refuse("it has no whole backward part")
        self._note_backward(recorded, result[0])
        return result

    def _begin_step(self) -> None:
        self._has_gradients = False
        self._is_confirmed = self._is_whole
        self._before = self._model
        self._forget()
        for repeated in self._repeated.values():
            repeated.close()
        self._repeated.clear()

    def _forget(self) -> None:
        self._model, self._is_whole = None, False
        self._recorded, self._open = [], {}

    def _record(self, original: Any, args: Any, kwargs: Any) -> Any:
        recorded = _Recorded(self._clock)
        recorded.steps.begin(recorded.steps.forward)
        try:
            output = original(self._stage, *args, **kwargs)
        finally:
            recorded.steps.end()
        recorded.output = _output_of(recorded.steps, output)
        if recorded.output is not None and not output.requires_grad:
            recorded.steps.refuse("it has no backward part")
        if recorded.steps.refused:
            self._is_off = True
            return output
        self._open[self.number] = recorded
        if self._stage.is_last:  # what comes before it in backward is the loss
            # Before the hooks of the module, such as those of FSDP, which belong to its steps.
            hooks = dict(output._backward_hooks or {})  # noqa: SLF001  # no public way
            handle = output.register_hook(lambda _: recorded.begin_backward())
            present = output._backward_hooks  # noqa: SLF001  # the same
            own = present[handle.id]
            present.clear()
            present.update({handle.id: own, **hooks})
        self._recorded.append(recorded)
        # After a step whose microbatches were equal, one like those is enough.
        if self._is_confirmed and self._before is not None and recorded.is_like(self._before):
            self._model = recorded
        elif len(self._recorded) > 1 and recorded.is_like(self._recorded[-2]):
            self._model, self._is_confirmed = recorded, False
        elif len(self._recorded) == _RECORDED_MAX:
            self._is_off = True
        return output

    def _note_backward(self, recorded: _Recorded, grads: Any) -> None:
        recorded.grads = [
            None if each is None else _output_of(recorded.steps, each) for each in grads
        ]
        assert recorded.output is not None, "its forward part is over"
        kept = [recorded.output, *recorded.grads]
        recorded.steps.check_whole([each.number for each in kept if each is not None])
        is_model = recorded is self._model
        is_equal = self._is_confirmed or (is_model and recorded.is_equal_to(self._recorded[-2]))
        if is_model and is_equal and not recorded.steps.refused:
            self._is_whole = True
        elif is_model:
            self._model, self._is_off = None, True
            if self._repeated:
                # Forward parts have come again before this backward part was known: too late to
                # carry them out, so the run begins anew without repetition.
                why = recorded.steps.refused or "their backward parts differ"
                self._repetition.stop(f"microbatches of a pipeline are not equal: {why}")

    def _anchor_of_graph(self) -> Any:
        """A tensor that requires a gradient, for stages without such an argument."""
        if self._anchor is None:
            with torch._C._DisableTorchDispatch(), DisableTorchFunction():  # noqa: SLF001  # as above
                self._anchor = torch.empty(0, requires_grad=True)
        return self._anchor


class _Repeated:
    """A microbatch that takes the steps of a recorded one.

    Attributes:
        ended_at: the time of the host at the end of the latest part.
    """

    def __init__(self, model: _Recorded, clock: QueuedClock) -> None:
        self._model = model
        self._clock = clock
        self._replay = Replay(clock, self._make)
        self._wanted: dict[int, _StageOutput] = {}
        self._made: dict[int, Tensor] = {}
        self.ended_at = 0

    def forward(self) -> Any:
        """Take the steps of the forward part; returns its tensor."""
        output = self._model.output
        assert output is not None, "the forward part is over"
        self._take(self._model.steps.forward, [output])
        return output.wrapped(self._made.pop(output.number))

    def backward(self) -> list[Any]:
        """The same of the backward part; returns the gradients of the arguments."""
        grads = self._model.grads
        assert grads is not None, "the backward part is over"
        self._take(self._model.steps.backward, [each for each in grads if each is not None])
        return [
            None if each is None else each.wrapped(self._made.pop(each.number)) for each in grads
        ]

    def close(self) -> None:
        """Give back what is left."""
        self._replay.close()

    def _take(self, steps: Any, wanted: list[_StageOutput]) -> None:
        self._wanted = {each.number: each for each in wanted}
        try:
            self._replay.take(self._model.steps, steps)
            self.ended_at = self._clock.time
        except DeviceFull as full:
            rank = running_rank()
            assert rank is not None, "a rank takes them"
            raise rank.own_state[WITHOUT_DATA].out_of_memory(full) from None

    def _make(self, number: int, size: int, holder: Holder | None) -> StorageInUse | None:
        wanted = self._wanted.get(number)
        if wanted is None:
            storage = Storage(size, self._clock, holder, is_on_device=True)
            storage.occupy()
            return storage
        tensor = self._made[number] = wanted.made_again()
        hold(tensor, self._clock, holder).is_known = False
        return None


class _Again(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """The node of a microbatch that takes recorded steps."""

    @staticmethod
    def forward(ctx: Any, repeated: _Repeated, _anchor: Tensor, *args: Any) -> Any:
        """Take those of the forward part."""
        ctx.set_materialize_grads(value=False)
        ctx.repeated, ctx.count = repeated, len(args)
        return repeated.forward()

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        """Take those of the backward part."""
        return (None, None, *ctx.repeated.backward()[: ctx.count])


def _microbatches_of(stage: Any, repetition: Repetition) -> _Microbatches | None:
    """Those of a stage; None if the rank that runs cannot repeat any."""
    rank = running_rank()
    mode = None if rank is None else rank.own_state.get(WITHOUT_DATA)
    if rank is None or mode is None or not isinstance(mode.clock, QueuedClock):
        return None
    found: _Microbatches | None = stage.__dict__.get(_KEY)
    if found is None:
        found = stage.__dict__[_KEY] = _Microbatches(stage, mode.clock, repetition)
    return found


def _output_of(recording: Recording, tensor: Any) -> _StageOutput | None:
    """How a tensor is made again; None, and a refusal, if that is not possible."""
    try:
        return _StageOutput(recording, tensor)
    except ValueError as error:
        recording.refuse(str(error))
        return None


def _likeness(stage: Any, args: Any, kwargs: Any) -> Any:
    """What must be equal for microbatches to be so; None if that does not say enough."""
    module = stage.submod
    if isinstance(module, DistributedDataParallel) or stage.dw_builder is not None:
        return None
    if not (torch.is_grad_enabled() and stage.has_backward and module.training):
        return None
    kept = [_kept(each) for each in (*args, *kwargs.values())]
    if None in kept or any(each.requires_grad for each in kwargs.values() if _is_tensor(each)):
        return None
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return (*kept, *kwargs, *autocast)


def _kept(value: Any) -> Any:
    if _is_tensor(value):
        of_tensor = value.shape, value.stride(), value.dtype, value.requires_grad
        return (*of_tensor, getattr(value, "_spec", None))
    return (value,) if isinstance(value, int | float | str | None) else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
