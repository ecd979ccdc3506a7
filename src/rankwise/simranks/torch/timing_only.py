"""Operations without data: shapes, strides and aliases as on CUDA, and untouched memory.

A tensor is a plain one of the CPU. Its memory is reserved and never written, so that the kernel of
the operating system gives it no page; all of torch takes it, C++ as well. Whether it has numbers is
known of its storage (`storages`). An operation is carried out for real if the numbers of all that
it takes are known and its results are small: token counts, masks, the steps of optimisers, pickled
objects. Views are always real, and cost nothing. Of any other operation, torch's kernels for meta
tensors tell the shape and strides of the results, once for each combination of shapes.

Parameters are never known, since random numbers are not drawn. Code that asks for numbers of a
tensor that has none gets what `values` say.
"""

import mmap
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from rankwise.base.errors import ConfigError
from rankwise.simranks.prediction.clocks import PricedWork, RankClock
from rankwise.simranks.prediction.device_memory import DeviceFull
from rankwise.simranks.prediction.values import Asked, ValuePolicy
from rankwise.simranks.torch.loads import fake_mode
from rankwise.simranks.torch.module_paths import ModulePaths
from rankwise.simranks.torch.operations import (
    ChargingMode,
    describe_place,
    is_repeated,
    tensors_in,
)
from rankwise.simranks.torch.storages import (
    PLACEMENT,
    SMALL_BYTES,
    Storage,
    hold,
    mark_hollow,
    note_size,
    storage_of,
)

_INPUT_BYTES_MAX = 4 * SMALL_BYTES
_FROM_LARGE = frozenset({"index", "index_select", "gather", "embedding", "take"})
"""Operations that read a small part of a large tensor, such as a batch of a data set."""
_INDEX = "index"
"""Tagged as of dynamic shape, as it is by masks; by numbers it is not."""
_OVERWRITE = frozenset({"copy_", "fill_", "zero_", "set_", "normal_", "uniform_", "random_"})
_REAL = frozenset({"resize_", "resize_as_", "_resize_output_", "set_", "detach_", "record_stream"})
"""Operations that only change what a tensor is, not its numbers."""
_ALIASES = frozenset({
    "_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes",
})  # fmt: skip
"""Views that autograd need not know as such: the product of rows of a batch is one."""
_IN_PLACE_VIEW = torch.Tag.inplace_view
_RANDOM = torch.Tag.nondeterministic_seeded
_POINTWISE = torch.Tag.pointwise
_DYNAMIC = torch.Tag.dynamic_output_shape
_DATA_DEPENDENT = torch.Tag.data_dependent_output
_TRANSPARENT = frozenset({"prim", "profiler", "c10d", "c10d_functional", "_c10d_functional"})
_KERNELS_OF_LIBRARIES = (
    torch._C.DispatchKey.CPU,  # noqa: SLF001  # no other name
    torch._C.DispatchKey.CompositeExplicitAutograd,  # noqa: SLF001  # the same
    torch._C.DispatchKey.CompositeImplicitAutograd,  # noqa: SLF001  # the same
)
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001  # the same
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Python has it since 3.13; the number is Linux's."""
_META = torch.device("meta")
_empty = torch.empty_strided


class _Result(NamedTuple):
    """A tensor that an operation makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Plan(NamedTuple):
    """How to carry an operation out that has no data.

    Attributes:
        name: of the operation, without its library.
        is_real: whether it is carried out as it is: a view, or what moves no data.
        is_foreign: whether a library other than torch's has it: what it calls is seen.
        is_random, is_dynamic, asks: see torch's tags.
        overwrites: whether it replaces all numbers of its first argument.
        returned: for each result, the place of the argument that it is; None for a new one.
        outputs: the names of keywords of results that the caller gives.
        makes: whether any result is new.
        written: the places and names of the arguments that it writes.
        broadcasts: whether it writes in place what torch refuses if shapes do not fit.
    """

    name: str
    is_real: bool
    is_foreign: bool = False
    is_random: bool = False
    is_dynamic: bool = False
    asks: bool = False
    overwrites: bool = False
    returned: tuple[Any, ...] = ()
    outputs: tuple[str, ...] = ()
    makes: bool = False
    written: tuple[tuple[int, str], ...] = ()
    broadcasts: bool = False


class _Learnt:
    """What is known of an operation with arguments of such shapes.

    Attributes:
        results: the tensors that it makes; None until they are asked for.
        priced: what it costs; None until it has been charged once.
    """

    __slots__ = ("priced", "results")

    def __init__(self) -> None:
        self.results: Any = None
        self.priced: PricedWork | None = None


class TimingMode(ChargingMode):
    """Charges what a rank would compute, and computes next to nothing."""

    def __init__(self, clock: RankClock, values: ValuePolicy, paths: ModulePaths) -> None:
        super().__init__(clock)
        self._values = values
        self.paths = paths
        self._plans: dict[Any, _Plan] = {}
        self._learnt: dict[Any, _Learnt] = {}
        self._present: _Learnt | None = None
        self._is_quiet = False
        self._is_known = True
        self._is_on_device = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry an operation out, and charge it; torch's own fake tensors compute shapes alone."""
        if fake_mode() is not None:
            return func(*args, **kwargs or {})
        # In backward our mode for functions would be asked for each attribute of a tensor.
        with DisableTorchFunction():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._present = None
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = _plan_of(func)
        kwargs = kwargs or {}
        taken = tensors_in((*args, *kwargs.values()) if kwargs else args)
        if any(tensor.is_meta for tensor in taken) or kwargs.get("device") == _META:
            return func(*args, **kwargs)
        found = [storage_of(tensor) for tensor in taken]
        if plan.is_real:
            self._see(found, taken)
            result = func(*args, **kwargs)
            if plan.name in _REAL and taken:
                storage = taken[0].untyped_storage()
                note_size(storage, storage.nbytes())
            return result
        if plan.is_foreign:
            return self._compute_parts(func, args, kwargs)
        return self._compute_without_data(func, plan, args, kwargs, found, taken)

    def charge_as_one(self, func: Any, taken: Any, made: Any) -> None:
        """Charge an operation that nothing computes, with what it takes and gives."""
        tensors = tensors_in(taken)
        self._see([storage_of(tensor) for tensor in tensors], tensors)
        self._is_known = False
        mark_hollow(list(made))
        super().charge_as_one(func, taken, made)

    def charge_call(
        self, func: Any, args: Any, kwargs: Any, result: Any, *, is_repeated: bool = False
    ) -> None:
        """The same of an operation of a compiled graph, on fake tensors."""
        self._is_known, self._is_on_device = False, True
        super().charge_call(func, args, kwargs, result, is_repeated=is_repeated)

    def _compute_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Have a library compute, whose own operations are seen, and charged as this one."""
        was_quiet, self._is_quiet = self._is_quiet, True
        try:
            for key in _KERNELS_OF_LIBRARIES:
                if _has_kernel(func.name(), key):
                    with self:  # not `func`: it would come by here again
                        return func._op_dk(key, *args, **kwargs)  # noqa: SLF001  # no public way
            return func(*args, **kwargs)
        finally:
            self._is_quiet = was_quiet

    def _see(self, found: list[Storage | None], taken: list[Tensor]) -> None:
        """Note where the results lie, and whether they have numbers."""
        # Tensors that no operation has made have numbers: numpy's, say.
        self._is_known = all(each is None or each.is_known for each in found)
        hint = PLACEMENT.hint
        if hint is None or not PLACEMENT.names_cuda:
            places = [
                each.is_on_device
                for each, tensor in zip(found, taken, strict=True)
                if each is not None and tensor.dim()
            ] or [each.is_on_device for each in found if each is not None]
            is_away = bool(found) and not places and PLACEMENT.names_cuda
            hint = not is_away and (any(places) or not places)
        self._is_on_device = hint

    def _compute_without_data(  # noqa: PLR0917  # of one operation
        self,
        func: Any,
        plan: _Plan,
        args: Any,
        kwargs: Any,
        found: list[Storage | None],
        taken: list[Tensor],
    ) -> Any:
        self._see(found, taken)
        own = found[0] if plan.overwrites and found else None
        if own is not None:  # all its numbers are replaced: what they were says nothing
            others = all(each is None or each.is_known for each in found[1:])
            self._is_known = taken[0].nbytes == own.size <= SMALL_BYTES and others
        if plan.asks and self.clock.recording is not None:
            self.clock.recording.refuse("it reads a value")
        if plan.asks:
            return func(*args, **kwargs) if self._is_known else self._ask(func, args)
        if plan.is_random and not self._may_draw(func, plan, args, kwargs, taken):
            self._is_known = False
        elif plan.is_random and self.clock.recording is not None:
            self.clock.recording.refuse("it draws a number")
        if self._is_known and (
            plan.name in _FROM_LARGE or sum([each.nbytes for each in taken]) <= _INPUT_BYTES_MAX
        ):
            if plan.is_dynamic or not plan.makes:
                result = func(*args, **kwargs)
                if own is not None:
                    own.is_known = True
                return result
            if self._result_bytes(func, args, kwargs) <= SMALL_BYTES:
                return func(*args, **kwargs)
        self._is_known = False
        return self._result_without_data(func, plan, args, kwargs)

    def _may_draw(
        self, func: Any, plan: _Plan, args: Any, kwargs: Any, taken: list[Tensor]
    ) -> bool:
        """Whether random numbers are drawn: whole ones, and single ones that decide something."""
        if plan.makes:
            (result, *_) = self._infer(func, args, kwargs)
            shape, dtype = result.shape, result.dtype
        else:
            shape, dtype = taken[0].shape, taken[0].dtype
        return not dtype.is_floating_point or torch.Size(shape).numel() <= 1

    def _result_bytes(self, func: Any, args: Any, kwargs: Any) -> int:
        return sum(
            torch.Size(each.shape).numel() * each.dtype.itemsize
            for each in _results_in(self._infer(func, args, kwargs))
        )

    def _result_without_data(self, func: Any, plan: _Plan, args: Any, kwargs: Any) -> Any:
        """What an operation gives: tensors of the right shape, whose memory is never touched."""
        if plan.is_dynamic and plan.name != _INDEX:
            return self._count_rows(func, args)
        learnt = self._learnt_of(func, args, kwargs)
        inferred: Any = ()
        # In place nothing new is made; the kernel for meta tensors refuses shapes that do not fit.
        if plan.makes or plan.outputs or plan.broadcasts:
            inferred = self._inferred(learnt, func, args, kwargs)
        if not plan.is_dynamic:  # a mask's price depends on the rows that it selects
            self._present = learnt
        given = []
        for index, place in enumerate(plan.returned):
            if place is None:
                given.append(_made(inferred[index]))
            else:
                given.append(kwargs[place] if isinstance(place, str) else args[place])
        for tensor in _written(plan, args, kwargs):
            held = storage_of(tensor)
            if held is not None:
                held.is_known = False
        for index, name in enumerate(plan.outputs):
            self._fit(kwargs[name], inferred[index])
        if not given:
            return None
        return given[0] if len(given) == 1 else tuple(given)

    def _fit(self, output: Tensor, wanted: Any) -> None:
        if isinstance(wanted, _Result) and tuple(output.shape) != wanted.shape:
            output.resize_(wanted.shape)
            storage = output.untyped_storage()
            note_size(storage, storage.nbytes())

    def _infer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The tensors that an operation makes, by its kernel for meta tensors."""
        return self._inferred(self._learnt_of(func, args, kwargs), func, args, kwargs)

    def _learnt_of(self, func: Any, args: Any, kwargs: Any) -> _Learnt:
        key = (func, *map(_described, args))
        if kwargs:
            key += tuple([(name, _described(each)) for name, each in kwargs.items()])
        learnt = self._learnt.get(key)
        if learnt is None:
            learnt = self._learnt[key] = _Learnt()
        return learnt

    def _inferred(self, learnt: _Learnt, func: Any, args: Any, kwargs: Any) -> Any:
        known = learnt.results
        if known is None:
            try:
                result = func(
                    *map(_as_meta, args),
                    **{name: _as_meta(each) for name, each in kwargs.items()},
                )
            except NotImplementedError as error:
                if _has_masks(args):
                    return self._infer_masked(func, args, kwargs)
                raise NotImplementedError(
                    f"{func} says nothing of the shape of its results without data, so"
                    f" --timing-only cannot pass it: {str(error).partition(chr(10))[0]}"
                ) from error
            results = result if isinstance(result, tuple | list) else (result,)
            is_list = isinstance(result, list)
            described = tuple(map(_described_result, results))
            known = learnt.results = (described,) if is_list else described
        return known

    def _infer_masked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An index that is a mask: as many rows as the values say."""
        indices = list(args[1])
        for place, index in enumerate(indices):
            if index is not None and index.dtype in {torch.bool, torch.uint8}:
                count = self._ask_rows(func, index.numel())
                rows = torch.empty(count, dtype=torch.int64, device="meta")
                indices[place : place + 1] = [rows] * index.dim()
                break
        return self._infer(func, (_as_meta(args[0]), indices, *args[2:]), kwargs)

    def _ask(self, func: Any, args: Any) -> Any:
        """A number that was not computed."""
        tensor = args[0]
        kind: type = float if tensor.dtype.is_floating_point else int
        if str(func.overloadpacket) == "aten.equal" or tensor.dtype is torch.bool:
            kind = bool
        elif tensor.dtype.is_complex:
            kind = float
        return self.answer(kind)

    def answer(self, kind: type) -> Any:
        """What the program's line gets that asks for a number."""
        frame = sys._getframe(2)  # noqa: SLF001  # as below
        if kind is not int and _is_of_scaler(frame):
            return kind(0)  # no gradient is infinite
        return self._values.answer(
            self.clock.number, Asked(describe_place(frame), kind.__name__), kind
        )

    def _ask_rows(self, func: Any, most: int) -> int:
        what = f"the length of the result of {func.overloadpacket}"
        asked = Asked(describe_place(sys._getframe(2)), what)  # noqa: SLF001  # as below
        return int(self._values.answer(self.clock.number, asked, int, most))

    def _count_rows(self, func: Any, args: Any) -> Any:
        """An operation whose values decide the shape of what it gives."""
        name = str(func.overloadpacket).partition(".")[2]
        source = args[0]
        count = self._ask_rows(func, source.numel())
        if name == "nonzero":
            return _empty([count, source.dim()], [1, count], dtype=torch.int64)
        if name == "masked_select":
            return _empty([count], [1], dtype=source.dtype)
        raise ConfigError(
            f"{func} gives a result whose shape depends on numbers that are not computed with"
            f" --timing-only, at {describe_place(sys._getframe(1))}",  # noqa: SLF001  # as below
            hint="leave it out on such a run, or predict with real tensors",
        )

    def _hold(self, tensor: Tensor) -> None:
        if storage_of(tensor) is not None:
            return
        holder = self.paths.holder() if self._is_on_device else None
        try:
            held = hold(tensor, self.clock, holder, is_on_device=self._is_on_device)
        except DeviceFull as full:
            raise self.out_of_memory(full) from None
        held.is_known = self._is_known and held.size <= SMALL_BYTES

    def out_of_memory(self, full: DeviceFull) -> Exception:
        """The error of a rank whose device is full."""
        from rankwise.simranks.torch.out_of_memory import out_of_memory  # noqa: PLC0415  # rare

        self.paths.note_gradients()
        return out_of_memory(full, self.clock, torch.OutOfMemoryError)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self._is_quiet:
            kind = self._kind_of(func)
            if kind.allocates:
                for tensor in tensors_in((result,)):
                    self._hold(tensor)
        else:
            super()._note(func, args, kwargs, result)
        self._present = None  # what comes next may be charged without being carried out

    def _is_of_host(self, kind: Any, args: Any) -> bool:
        del kind, args
        return False  # `_is_on_device` tells

    def _wait_for_value(self) -> None:
        # A value of the host, such as an optimiser's count of steps, waits for nothing.
        if self._is_on_device:
            super()._wait_for_value()

    def _charge(self, func: Any, kind: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not self._is_on_device:
            self.clock.note_free()
            return
        learnt = self._present
        if learnt is not None and learnt.priced is not None:
            if kind.flops is not None or kind.looks_up:
                self.clock.work.is_repeated = is_repeated()
            if kind.looks_up and torch.is_grad_enabled():
                self._count_lookups(*args[:2])
            self.clock.compute(learnt.priced)
            return
        self._latest_priced = None
        trail = self.clock.trail
        if self._is_known:  # what one rank logs, say: it makes no rank another one
            self.clock.trail = None
        super()._charge(func, kind, args, kwargs, result)
        self.clock.trail = trail
        if learnt is not None:
            learnt.priced = self._latest_priced


def _plan_of(func: Any) -> _Plan:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return _Plan(str(func), is_real=False, is_foreign=True)
    library, _, name = str(func.overloadpacket).partition(".")
    tags = func.tags
    is_view = func.is_view or _IN_PLACE_VIEW in tags or name in _ALIASES
    if is_view or library in _TRANSPARENT or name in _REAL:
        return _Plan(name, is_real=True)
    if library != "aten":
        return _Plan(name, is_real=False, is_foreign=True)
    places = {argument.name: index for index, argument in enumerate(schema.arguments)}
    keywords = {argument.name for argument in schema.arguments if argument.kwarg_only}
    written: dict[str, Any] = {}
    for argument in schema.arguments:
        if argument.alias_info is not None:
            place = argument.name if argument.name in keywords else places[argument.name]
            for letter in argument.alias_info.before_set:
                written[letter] = place
    returned = tuple(
        None
        if each.alias_info is None
        else next((written[letter] for letter in each.alias_info.before_set), None)
        for each in schema.returns
    )
    outputs = tuple(
        argument.name for argument in schema.arguments if argument.kwarg_only and argument.is_out
    )
    places_written = tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return _Plan(
        name,
        is_real=False,
        is_random=_RANDOM in tags,
        is_dynamic=_DYNAMIC in tags,
        asks=_DATA_DEPENDENT in tags,
        overwrites=name in _OVERWRITE,
        returned=returned,
        outputs=outputs,
        makes=any(place is None for place in returned),
        written=places_written,
        broadcasts=name.endswith("_") and (_POINTWISE in tags or name == "copy_"),
    )


def _written(plan: _Plan, args: Any, kwargs: Any) -> list[Tensor]:
    count = len(args)
    return tensors_in(
        args[index] if index < count else kwargs.get(name) for index, name in plan.written
    )


def _described(value: Any) -> Any:
    """What of an argument decides the shape of results, as a part of a key."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return float if type(value) is float else (type(value), value)


def _as_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _empty(list(value.shape), list(value.stride()), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(map(_as_meta, value)) if type(value) is list else [*map(_as_meta, value)]
    return torch.device("meta") if isinstance(value, torch.device) else value


def _described_result(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Result(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return list(map(_described_result, value))
    return value


def _made(described: Any) -> Any:
    if isinstance(described, _Result):
        try:
            return _empty(described.shape, described.stride, dtype=described.dtype)
        except RuntimeError:
            return _reserved(described)
    if isinstance(described, list | tuple):
        return list(map(_made, described))
    return described


def _reserved(described: _Result) -> Tensor:
    """A tensor larger than this machine's memory, which it refuses to promise."""
    extents = zip(described.shape, described.stride, strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in extents)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, count * described.dtype.itemsize, flags=flags)
    flat = torch.frombuffer(memory, dtype=described.dtype)
    return flat.set_(flat.untyped_storage(), 0, described.shape, described.stride)


def _results_in(described: Any) -> list[_Result]:
    if isinstance(described, _Result):
        return [described]
    if isinstance(described, list | tuple):
        return [result for each in described for result in _results_in(each)]
    return []


def _has_masks(args: Any) -> bool:
    """Whether an operation is indexed by masks."""
    return (
        len(args) > 1
        and isinstance(args[1], list | tuple)
        and any(
            isinstance(each, Tensor) and each.dtype in {torch.bool, torch.uint8} for each in args[1]
        )
    )


def _is_of_scaler(frame: Any) -> bool:
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith("/torch/amp/grad_scaler.py"):
            return True
        frame = frame.f_back
    return False
