"""Charges each aten operation of a rank to the rank's clock, and its results to its memory.

A dispatch mode sees every operation below autograd, backward and optimiser included. Views and
queries are free. Matrix products, convolutions and attention are counted by their formulas
(`flops`); all other operations do one operation per element of their largest argument, which may be
a list. An operation reads its tensors and writes its results, whole.

A storage that an operation has made takes memory of the device until Python and autograd have
forgotten it. Tensors inside of an operation are not seen.

Fake tensors are charged like those that they stand for, above the mode that computes their shapes:
that mode has kernels and caches of its own, and what it calls says little of what a device would
do. Making and initialising meta tensors takes no time and no memory, since programs use them to put
that off. What is computed from them takes the time of other tensors, and with that they take
memory, too: they stand for tensors of the device.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.simranks.prediction.bill import BACKWARD, FORWARD, OPTIMIZER
from rankwise.simranks.prediction.clocks import PricedWork, RankClock
from rankwise.simranks.prediction.costs import DeviceOperation, Engine
from rankwise.simranks.torch.flops import Flops, formula_of, is_of_matrices
from rankwise.simranks.torch.loads import FAKE_TENSOR, fake_mode
from rankwise.simranks.torch.storages import are_of_host, hold
from rankwise.simranks.torch.unseen_mode import MOVES_NOTHING, NOT_OF_DEVICES, PLAIN, UnseenMode
from rankwise.simranks.world.places import OUR_PACKAGE, place_of

DTYPE_NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "bool", torch.float8_e4m3fn: "f8e4", torch.float8_e5m2: "f8e5",
}  # fmt: skip
_SCALED = frozenset({"aten._scaled_mm", "aten._scaled_grouped_mm"})
_ITEM = "aten._local_scalar_dense"
_EMBEDDING = torch.ops.aten.embedding.default
_ENGINE = "/torch/autograd/graph.py"
"""The file of torch that calls autograd's engine."""
_node = torch._C._current_autograd_node  # noqa: SLF001  # no public way
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001  # no public way
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001  # no other name


class _OperationKind(NamedTuple):
    """What there is to know of an operation before its arguments.

    Attributes:
        flops: gives its flops on the matrix engine; None for other operations.
        is_unknown: whether it is of the matrix kind all the same.
        is_composite: whether it is made of other operations, which are charged instead.
        is_free: whether it takes no time.
        allocates: whether its results are new storages.
        initialises: whether it only makes tensors, or writes to those that there are.
        written: which of its arguments it writes without returning them.
        is_query: whether the host waits for what it gives: a value of the device.
        causal: the place of its argument `is_causal`; behind all others if it has none.
        looks_up: whether it looks indices up in an embedding.
    """

    name: str
    flops: Flops | None = None
    is_unknown: bool = False
    is_composite: bool = False
    is_free: bool = True
    allocates: bool = False
    initialises: bool = False
    written: tuple[int, ...] = ()
    is_query: bool = False
    causal: int = sys.maxsize
    looks_up: bool = False


class ChargingMode(UnseenMode):
    """Charges what a rank computes; belongs on the stack of the rank's own thread."""

    def __init__(self, clock: RankClock) -> None:
        super().__init__()
        self.clock = clock
        clock.phase = self._phase
        self._record = clock.record
        self._is_inside = False
        self._kinds: dict[Any, _OperationKind] = {}
        self._flops: dict[Any, int] = {}
        self._priced: dict[Any, PricedWork] = {}
        self._latest_priced: PricedWork | None = None
        self._share_of_indices: int | None = None
        self._is_graph_repeated = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry an operation out, and charge it."""
        if self._is_inside or _is_of_torch(fake_mode()):
            return func(*args, **kwargs or {})  # shapes are computed
        if types and not PLAIN.issuperset(types):
            if any(each.__name__ == FAKE_TENSOR for each in types):
                return func(*args, **kwargs or {})  # of a mode that is left
            self.clock.note_subclass()
            if func is _EMBEDDING:
                self._share_of_indices = _share_of(args[1])
            return NotImplemented  # of a subclass, such as DTensor: what it calls comes by here
        if self._kind_of(func).is_composite:  # in inference mode: elsewhere autograd takes it apart
            with self:
                # Not `decompose`: it prefers Python's versions, which call other operations.
                return func._op_dk(_COMPOSITE, *args, **kwargs or {})  # noqa: SLF001  # no public way
        result = self._compute(func, args, kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _phase(self) -> str:
        """The phase of the training that the rank is in; all but two count as forward."""
        if self.clock.is_updating:
            return OPTIMIZER
        return FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD  # noqa: SLF001  # see `hooks`

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry an operation out."""
        return func(*args, **kwargs) if kwargs else func(*args)

    def _hold(self, tensor: Tensor) -> None:
        """Count what an operation has made."""
        hold(tensor, self.clock)

    def compute_fake(
        self, compute: Callable[[], Any], func: Any, args: Any, kwargs: Any, *, is_charged: bool
    ) -> Any:
        """Have an operation on fake tensors carried out, and charge it if the program calls it."""
        if self._is_inside:
            return compute()
        self._is_inside = True
        try:
            result = compute()
        finally:
            self._is_inside = False
        if is_charged and result is not NotImplemented:
            self._note(func, args, kwargs, result)
        return result

    def compute_as_one(self, func: Any, compute: Callable[[], Any], args: Any) -> Any:
        """Have something computed, and charge it as one operation with these arguments."""
        is_outermost, self._is_inside = not self._is_inside, True
        try:
            result = compute()
        finally:
            self._is_inside = not is_outermost
        if is_outermost:
            self._note(func, args, {}, result)
        return result

    def charge_as_one(self, func: Any, taken: Any, made: Any) -> None:
        """Charge an operation that nothing computes, with what it takes and gives."""
        self._note(func, taken, {}, made)

    def charge_work(self, work: DeviceOperation) -> None:
        """Charge a kernel that no operation of torch stands for."""
        priced = self._priced.get(work)
        if priced is None:
            priced = self._priced[work] = self.clock.price(work)
        self.clock.compute(priced)

    def charge_call(
        self, func: Any, args: Any, kwargs: Any, result: Any, *, is_repeated: bool = False
    ) -> None:
        """Charge an operation on fake tensors, which nothing carries out.

        Checkpointing may have it carried out once more: then it is repeated.
        """
        kind = self._kind_of(func)
        if not kind.is_free:
            self._is_graph_repeated = is_repeated
            self._charge(func, kind, args, kwargs, result)
            self._is_graph_repeated = False

    def _kind_of(self, func: Any) -> _OperationKind:
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        return kind

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        kind = self._kind_of(func)
        if self._record is not None and kind.name == _ITEM and self.clock.number == 0:
            self._record.note(describe_place(sys._getframe(2)), result)  # noqa: SLF001  # the only way that costs no stack
        if self._is_of_host(kind, args):
            self.clock.note_free()
        elif not kind.is_free:
            self._charge(func, kind, args, kwargs, result)
        elif kind.is_query:
            self._wait_for_value()
        else:
            self.clock.note_free()
        if kind.allocates:
            for tensor in tensors_in((result,)):
                if not tensor.is_meta:
                    self._hold(tensor)

    def _is_of_host(self, kind: _OperationKind, args: Any) -> bool:
        """Whether an operation is one of the host, such as an optimiser's count of its steps."""
        if kind.is_free and not kind.is_query:
            return False
        first = args[0] if args else None
        first = first[0] if isinstance(first, list | tuple) and first else first
        if not isinstance(first, Tensor) or first.dim():  # most are told by that alone
            return False
        return are_of_host(tensors_in(args))

    def _wait_for_value(self) -> None:
        """The program reads a value: the host waits for its device."""
        self.clock.synchronize()

    def _charge(self, func: Any, kind: _OperationKind, args: Any, kwargs: Any, result: Any) -> None:
        size = largest = 0
        widest: list[Tensor] = []
        taken: list[Any] = []
        last = len(args) + len(kwargs or ())
        for index, value in enumerate((*args, *(kwargs or {}).values(), result)):
            if not isinstance(value, Tensor | list | tuple):
                continue
            tensors = tensors_in((value,))
            if index < last:
                taken += [() if tensor.is_nested else tensor.shape for tensor in tensors]
            count = sum([tensor.nbytes for tensor in tensors])
            # A tensor that is changed in place is read and written.
            size += 2 * count if index in kind.written else count
            if count >= largest and tensors:
                largest, widest = count, tensors
        if not size:
            return
        # Work that checkpointing repeats is no work of the model, and asked for only where counted.
        if kind.flops is not None or kind.looks_up:
            self.clock.work.is_repeated = self._is_graph_repeated or is_repeated()
        if kind.looks_up and torch.is_grad_enabled():
            self._count_lookups(*args[:2])
        if widest[0].is_meta:
            # A model that is made on meta takes no memory until something is computed with it.
            if kind.initialises:
                return
            for tensor in tensors_in((*args, *(kwargs or {}).values(), result)):
                self._hold(tensor)
        dtype = widest[0].dtype
        if kind.name in _SCALED:  # its result is of another type, and may be larger
            dtype = args[0].dtype
        if kind.flops is not None:
            flops = self._flops_of(kind, args, kwargs, result)
        else:
            flops = 0 if kind.is_unknown else sum([tensor.numel() for tensor in widest])
        shapes, is_causal = tuple(taken), kind.causal < len(args) and args[kind.causal] is True
        key = (func, flops, size, dtype, shapes, is_causal)
        priced = self._priced.get(key)
        if priced is None:
            engine: Engine = "math" if kind.flops is None else "gemm"
            work = DeviceOperation(
                kind.name, engine, flops, size, DTYPE_NAMES.get(dtype, ""),
                shapes=tuple(map(tuple, shapes)), is_causal=is_causal,
            )  # fmt: skip
            priced = self._priced[key] = self.clock.price(work)
            if kind.is_unknown:
                self.clock.note_unknown(priced)
        self._latest_priced = priced
        self.clock.compute(priced)

    def _count_lookups(self, table: Tensor, indices: Tensor) -> None:
        share, self._share_of_indices = self._share_of_indices, None
        which = id(table.untyped_storage()), table.storage_offset(), table.shape
        count = indices.numel() if share is None else share
        if self.clock.recording is not None:
            self.clock.recording.note_lookup(which, count)
        self.clock.work.count_lookups(which, count)

    def _flops_of(self, kind: _OperationKind, args: Any, kwargs: Any, result: Any) -> int:
        assert kind.flops is not None, "asked of matrix operations only"
        if any(isinstance(each, Tensor) and each.is_nested for each in args):  # without a shape
            return int(kind.flops(*args, **kwargs or {}, out_val=result))
        key = (kind.name, *(each.shape if isinstance(each, Tensor) else str(each) for each in args))
        flops = self._flops.get(key)
        if flops is None:
            flops = self._flops[key] = int(kind.flops(*args, **kwargs or {}, out_val=result))
        return flops


def _kind_of(func: Any) -> _OperationKind:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator: what it runs is seen by itself
        return _OperationKind(str(func))
    packet = func.overloadpacket
    name = str(packet)
    library, _, operation = name.partition(".")
    is_view = bool(getattr(func, "is_view", False))
    flops = formula_of(packet)
    return _OperationKind(
        name,
        flops,
        is_unknown=flops is None and is_of_matrices(name),
        # Of torch's own operators: `prim.device` has such a kernel, and none that can be called.
        is_composite=flops is None and library == "aten" and _has_kernel(func.name(), _COMPOSITE),
        is_free=is_view or operation in MOVES_NOTHING or library in NOT_OF_DEVICES,
        allocates=not is_view and any(each.alias_info is None for each in schema.returns),
        initialises=operation.endswith("_")
        or not any("Tensor" in str(argument.type) for argument in schema.arguments),
        written=tuple(
            index
            for index, argument in enumerate(schema.arguments)
            if not schema.returns and argument.alias_info and argument.alias_info.is_write
        ),
        is_query=operation == "_local_scalar_dense",
        looks_up=func is _EMBEDDING,
        causal=[*(argument.name for argument in schema.arguments), "is_causal"].index("is_causal"),
    )


def is_repeated() -> bool:
    """Whether the operation under way was carried out before: in backward, by code of Python.

    Activation checkpointing calls the model again there, with gradients enabled. What the engine
    calls itself then is the gradient of a gradient.
    """
    if not torch.is_grad_enabled() or _node() is None:
        return False
    frame = sys._getframe(1)  # noqa: SLF001  # the only way that costs no stack
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OUR_PACKAGE):
        frame = frame.f_back
    return not frame.f_code.co_filename.endswith(_ENGINE)


def _share_of(indices: Any) -> int:
    """How many of distributed indices are one rank's share; of plain ones all are."""
    mesh = getattr(indices, "device_mesh", None)
    return int(indices.numel() if mesh is None else indices.numel() // mesh.size())


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Those that lie on the device, those in lists too."""
    found = []
    for value in values:
        if type(value) in PLAIN or type(value).__name__ == FAKE_TENSOR:
            if value.layout is torch.strided:
                found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def describe_place(frame: Any) -> str:
    """The program's line among these frames, as `file:line`."""
    site = place_of(frame)
    return "" if site is None else f"{site.code.co_filename}:{site.line}"


_OF_PROGRAM = "is_of_program"


def _is_of_torch(mode: Any) -> bool:
    """Whether torch has entered a `FakeTensorMode` itself, such as DTensor for its layouts."""
    return mode is not None and not getattr(mode, _OF_PROGRAM, False)


_TORCH = f"{Path(torch.__file__).parent}/"
_modes = threading.local()
"""The mode of the rank whose thread it is."""


def charge_thread(mode: ChargingMode) -> ChargingMode:
    """Have a mode charge what the rank computes whose thread calls this."""
    _modes.mode = mode
    return mode


def charging_mode() -> ChargingMode | None:
    """The mode that charges what the calling thread computes, if there is one."""
    return getattr(_modes, "mode", None)


def with_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    """`FakeTensorMode.__torch_dispatch__`, charged as what it stands for."""

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = charging_mode()
        compute = partial(original, self, func, types, args, kwargs)
        if mode is None:
            return compute()
        is_charged = getattr(self, _OF_PROGRAM, False)
        return mode.compute_fake(compute, func, args, kwargs, is_charged=is_charged)

    return dispatch


def with_makers(original: Callable[..., None]) -> Callable[..., None]:
    """`FakeTensorMode.__init__`: torch makes such modes itself, to learn shapes ahead of a call."""

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        maker = sys._getframe(1).f_code.co_filename  # noqa: SLF001  # whose it is
        setattr(self, _OF_PROGRAM, not maker.startswith(_TORCH))

    return init
