"""What a program of torch does, written down for a comparison (`rankwise diff`).

Simulated or real, its groups are wrapped into a `RecordedProcessGroup`: real ones are gloo's. Each
operation is recorded with what it takes, when it is called, and with what it gives, when it is
waited for. The loss of a step is the scalar that `backward` is called on; parameters are looked at
after each step of an optimizer.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import Work as TorchWork
from torch.futures import Future
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rankwise.simranks.torch.gloo_arithmetic import data_of, plainly
from rankwise.simranks.torch.named_group import NamedProcessGroup
from rankwise.simranks.torch.sentences import describe_shapes
from rankwise.simranks.world.rank_events import EventRecorder, Plain, present_recorder

_NO_TIMEOUT = timedelta(0)
_OPERATIONS: dict[str, tuple[int | None, int | None]] = {
    "allreduce": (0, 0), "allreduce_coalesced": (0, 0), "broadcast": (0, 0), "reduce": (0, 0),
    "allgather": (1, 0), "all_gather_single": (1, 0), "_allgather_base": (1, 0),
    "allgather_coalesced": (1, 0), "all_gather_single_coalesced": (1, 0),
    "allgather_into_tensor_coalesced": (1, 0), "gather": (1, 0), "scatter": (1, 0),
    "reduce_scatter": (1, 0), "reduce_scatter_single": (1, 0), "_reduce_scatter_base": (1, 0),
    "reduce_scatter_single_coalesced": (1, 0), "reduce_scatter_tensor_coalesced": (1, 0),
    "alltoall": (1, 0), "all_to_all_single": (1, 0), "alltoall_base": (1, 0),
    "barrier": (None, None),
    "send": (0, None), "recv": (None, 0), "recv_anysource": (None, 0),
}  # fmt: skip
"""Methods of a group: which argument it takes tensors from, and which it fills."""


class RecordedWork(TorchWork):  # type: ignore[misc]  # torch is untyped here
    """An operation under way; what it gives is recorded when it is first waited for."""

    def __init__(self, work: Any, outputs: Any, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._outputs = outputs
        self._finish: Callable[[], None] | None = finish
        self._future: Any = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for it."""
        self._work.wait(timeout)
        self.finish()
        return True

    synchronize = wait

    def finish(self) -> None:
        """Record what it has given, once."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        """Whether it is done."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it is done, and well."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Why it has failed, if it has."""
        return self._work.exception()

    def result(self) -> Any:
        """The tensors that were filled."""
        return self._outputs

    def get_future(self) -> Any:
        """A future that is done, as on simulated ranks: both runs wait at the same places."""
        if self._future is None:
            self.wait()
            self._future = Future()
            self._future.set_result(self._outputs)
        return self._future

    def source_rank(self) -> int:
        """Which rank of the group a message came from."""
        return int(self._work._source_rank())  # noqa: SLF001  # torch's name for it

    _source_rank = source_rank


class RecordedProcessGroup(NamedProcessGroup):
    """Another group, whose operations are recorded.

    Args:
        group: carries the operations out.
        name: how records call it; the same on simulated ranks and on processes.
    """

    def __init__(self, group: Any, backend: str, name: str, recorder: EventRecorder) -> None:
        super().__init__(group.rank(), group.size(), backend)
        self._group = group
        self._group_name = name
        self._recorder = recorder
        self._coalescing: list[RecordedWork] | None = None

    def monitored_barrier(
        self, timeout: timedelta = _NO_TIMEOUT, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and name those that do not come in time."""
        self._group.monitored_barrier(timeout, wait_all_ranks)

    def shutdown(self) -> None:
        """Let go of what is held."""
        self._group.shutdown()

    def abort(self) -> None:
        """Let go of what is held."""
        self._group.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Note how long operations may take."""
        self._group.set_timeout(timeout)

    def _start_coalescing(self, device: Any) -> None:
        self._group._start_coalescing(device)  # noqa: SLF001  # torch's name
        self._coalescing = []

    def _end_coalescing(self, device: Any) -> RecordedWork:
        works, self._coalescing = self._coalescing or [], None

        def finish() -> None:
            for work in works:
                work.finish()

        return RecordedWork(self._group._end_coalescing(device), [], finish)  # noqa: SLF001  # the same

    def _get_sequence_number_for_group(self) -> int:
        return self._recorder.operations.get(self._group_name, 0)

    def record(self, name: str, args: tuple[Any, ...], taken: int | None, given: int | None) -> Any:
        """Carry an operation out, and record it."""
        inputs = [] if taken is None else _flat(args[taken])
        outputs = [] if given is None else _flat(args[given])
        words = f"{name.strip('_')} #{self._recorder.numbered(self._group_name)}"
        shapes = describe_shapes(inputs or outputs)
        words += (f" of {shapes}" if shapes else "") + f" in group {self._group_name}"
        if name == "broadcast" and args[1].rootRank != self.rank():
            inputs = []
        if name == "reduce" and args[1].rootRank != self.rank():
            outputs = []
        self._recorder.note(f"{words}: its input", plains(inputs))
        work = RecordedWork(
            getattr(self._group, name)(*args),
            [] if given is None else args[given],
            lambda: self._recorder.note(f"{words}: its output", plains(outputs)),
        )
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work


def _operation(name: str, taken: int | None, given: int | None) -> Callable[..., Any]:
    def call(self: RecordedProcessGroup, *args: Any, **options: Any) -> Any:
        return self.record(name, (*args, *options.values()), taken, given)

    return call


for _name, (_taken, _given) in _OPERATIONS.items():
    setattr(RecordedProcessGroup, _name, _operation(_name, _taken, _given))


def recorded(group: Any, backend: str, name: str) -> Any:
    """The group itself, or one that records, if this rank is recorded."""
    recorder = present_recorder()
    return group if recorder is None else RecordedProcessGroup(group, backend, name, recorder)


def follow_steps() -> Callable[[], None]:
    """Record losses and parameters of the ranks that are recorded; returns what undoes it."""
    backward = Tensor.backward

    def recorded_backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        recorder = present_recorder()
        if recorder is not None and self.numel() == 1:
            number = recorder.numbered("loss")
            recorder.note(f"loss #{number}", plains([self]), f"{_whole(self).item():.9g}")
        return backward(self, *args, **kwargs)

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        recorder = present_recorder()
        if recorder is not None:
            kind = type(optimizer).__name__
            groups = optimizer.param_groups
            parameters = [each for group in groups for each in group["params"]]
            number = recorder.numbered("step")
            recorder.note(f"parameters after step #{number} ({kind})", plains(parameters))

    Tensor.backward = recorded_backward
    handle = register_optimizer_step_post_hook(after_step)

    def undo() -> None:
        Tensor.backward = backward
        handle.remove()

    return undo


def install_in_process() -> None:
    """Record the only rank of this process."""
    from rankwise.simranks.torch import hooks  # noqa: PLC0415  # which uses this module

    hooks.record_in_process()
    follow_steps()


def plains(tensors: Sequence[Tensor]) -> list[Plain]:
    """What of tensors can be compared; of distributed ones, this rank's part."""
    found = [part for tensor in tensors for part in _parts("", tensor).values()]
    return [part for part in found if not isinstance(part, str)]


def parts_of_value(value: Any) -> dict[str, Plain | str] | None:
    """What of a tensor, a module or an optimizer can be compared, by name of its part.

    A text says why a part cannot.
    """
    if isinstance(value, Tensor):
        return _parts("", value)
    if isinstance(value, torch.nn.Module):
        named = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        return _all_parts({f".{name}": each for name, each in named.items()})
    if isinstance(value, torch.optim.Optimizer):
        states = enumerate(value.state.values())
        return _all_parts(
            {
                f".state[{index}].{name}": each
                for index, state in states
                for name, each in state.items()
                if isinstance(each, Tensor)
            }
        )
    return None


def _all_parts(tensors: dict[str, Tensor]) -> dict[str, Plain | str]:
    parts: dict[str, Plain | str] = {}
    for name, tensor in tensors.items():
        parts |= _parts(name, tensor)
    return parts


def _parts(name: str, tensor: Any) -> dict[str, Plain | str]:
    """What of a tensor can be compared: reading one never fails the program that has it."""
    try:
        return _read(name, tensor)
    except Exception as error:  # noqa: BLE001  # of a class of tensors that is not known here
        reason = str(error).partition("\n")[0].partition(". ")[0]
        return {name: f"reading it fails: {type(error).__name__}: {reason}"}


def _read(name: str, tensor: Any) -> dict[str, Plain | str]:
    """The tensor itself, or those that it is made of.

    A tensor of a class of its own has no memory that C++ could read: DTensors, results of
    functional collectives and nested tensors tell what they wrap by `__tensor_flatten__`.
    """
    if is_lazy(tensor):
        return {name: "it has no shape yet"}
    if (local := getattr(tensor, "to_local", None)) is not None:
        with torch.no_grad():
            return _parts(name, local())
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return {name: "it has no values"}
    if is_traceable_wrapper_subclass(tensor):
        if (trigger_wait := getattr(tensor, "trigger_wait", None)) is not None:
            return _parts(name, trigger_wait())  # of a functional collective, perhaps under way
        names, _ = tensor.__tensor_flatten__()
        return _all_parts({f"{name}.{each}": getattr(tensor, each) for each in names})
    if type(tensor) is Tensor and tensor.is_nested:
        return {name: "it is a nested tensor"}
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        return {name: f"it is a {kind} tensor"}
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return {name: f"{type(tensor).__name__} does not tell what it is made of"}
    return {name: _plain(tensor)}


def _whole(tensor: Any) -> Tensor:
    local = getattr(tensor, "to_local", None)
    with torch.no_grad():
        return tensor if local is None else local()


def _plain(tensor: Tensor) -> Plain:
    found: list[bytes] = []
    plainly(lambda: found.append(_bytes_of(tensor)))
    return found[0], str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _bytes_of(tensor: Tensor) -> bytes:
    # A copy: storage that numpy has seen can never be resized, which FSDP wants to do.
    values = data_of(tensor).clone(memory_format=torch.contiguous_format).reshape(-1)
    return values.view(torch.uint8).numpy().tobytes() if values.numel() else b""


def _flat(tensors: Any) -> list[Tensor]:
    """The tensors of an argument, which may be one, a list, or a list of lists."""
    if isinstance(tensors, Tensor):
        return [tensors]
    return [each for part in tensors for each in _flat(part)]
