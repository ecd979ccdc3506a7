"""`torch.compile` without data: graphs are priced by the kernels that inductor would make of them.

Theory of operation
===================

Dynamo, AOTAutograd and inductor's passes run as they are, on fake tensors. inductor gets a graph on
CPU tensors; its devices are turned into CUDA first. Inductor lowers it, and its scheduler fuses and
orders the nodes as for a GPU. There it ends: no code is generated. A *plan* is kept of the
scheduler's nodes: what each one reads and writes, which buffers it makes, and what is read for the
last time.

A call of the graph follows the plan. It takes the time of each fused node by its bytes, and of each
kernel of a library (matrix products, attention) by the formula of its operation. It makes the
buffers and drops them, so that memory is that of the compiled program. Collectives in a graph are
carried out.

Graphs of equal text and inputs have one plan, whatever layer or rank they come from. A graph that
inductor cannot lower here runs as eager code, and the result is marked as an upper bound.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.fx.node import map_aggregate

from rankwise.simranks.prediction.costs import INDUCTOR, DeviceOperation
from rankwise.simranks.torch.operations import DTYPE_NAMES
from rankwise.simranks.torch.storages import PLACEMENT, mark_hollow

_CUDA, _CPU = torch.device("cuda", 0), torch.device("cpu")
_EAGER_BACKENDS = frozenset({"eager", "aot_eager", "aot_eager_decomp_partition"})
_COLLECTIVES = "_c10d_functional"
_KERNELS = {False: f"{INDUCTOR}.pointwise", True: f"{INDUCTOR}.reduction"}
_RECOMPILATIONS = 1_024
_empty = torch.empty_strided


class _Buffer(NamedTuple):
    """A tensor that a kernel makes."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Call(NamedTuple):
    """A kernel of a library: an operation, on fake tensors that its price follows from."""

    function: Any
    args: Any
    kwargs: Mapping[str, Any]
    result: Any
    is_repeated: bool


class _Collective(NamedTuple):
    """An operation of a group, which is carried out: on what, and which names its results get."""

    function: Any
    read: Sequence[str]
    bind: Callable[[Sequence[Tensor]], tuple[Any, Any]]
    written: str


class _GraphStep(NamedTuple):
    """A node of the scheduler.

    Attributes:
        work: a fused kernel, a kernel of a library, a collective, or nothing.
        makes: the buffers that it makes.
        drops: what is not read any more after it.
        drops_first: what it can write its results to.
    """

    work: DeviceOperation | _Call | _Collective | None
    makes: Sequence[_Buffer]
    drops: Sequence[str]
    drops_first: Sequence[str]


class _Output(NamedTuple):
    """A result: a buffer and how it is seen; no name is a constant."""

    name: str
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    constant: Any = None


class GraphPlan(NamedTuple):
    """What a call of a graph does; `keeps` says whether its results are kept for a backward."""

    inputs: Sequence[str]
    constants: Mapping[str, Tensor]
    keeps: bool
    steps: Sequence[_GraphStep]
    outputs: Sequence[_Output]


Remark = Callable[[str], None]


class GraphPrices:
    """Compiles for the ranks of one process.

    Args:
        mode_here: the mode that charges the calling rank; None for what is no rank.
        remark: has the user told, once, which part is predicted as slower code than it is.
    """

    def __init__(self, mode_here: Callable[[], Any], remark: Remark) -> None:
        self._mode_here = mode_here
        self._remark = remark
        self._plans: dict[Any, GraphPlan] = {}
        self._is_prepared = False
        self._breaks_before = 0
        self._undo = ExitStack()

    def compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile`, for ranks without data."""

        def compile_graphs(model: Any = None, **options: Any) -> Any:
            if self._mode_here() is None:
                return original(model, **options)
            if model is None:
                return lambda function: compile_graphs(function, **options)
            backend = options.get("backend", "inductor")
            if backend in _EAGER_BACKENDS:
                return model
            if backend != "inductor":
                self._remark(
                    "torch.compile with a backend other than inductor is predicted as eager code"
                )
                return model
            self._prepare()
            made = original(model, backend=self._backend, dynamic=False)
            if isinstance(model, torch.nn.Module):
                _begin_below_our_call(made, model)
            return made

        return compile_graphs

    def close(self) -> None:
        """Tell what dynamo could not follow."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is not None and self._is_prepared:
            if sum(dynamo.counters["graph_break"].values()) > self._breaks_before:
                self._remark(_BREAKS)
            self._undo.close()

    def _prepare(self) -> None:
        if self._is_prepared:
            return
        self._is_prepared = True
        dynamo = import_module("torch._dynamo")
        dynamo.config.recompile_limit = _RECOMPILATIONS
        dynamo.config.accumulated_recompile_limit = _RECOMPILATIONS
        dynamo.config.suppress_errors = True
        modules: Any = import_module("torch._dynamo.variables.nn_module")
        functions: Any = import_module("torch._dynamo.variables.functions").UserFunctionVariable
        counters = import_module("torch._dynamo.utils").counters
        # Earlier runs in the process may have had breaks.
        self._breaks_before = sum(counters["graph_break"].values())
        call = torch.nn.Module.__call__  # ours: dynamo goes by it as by torch's
        self._undo.callback(
            setattr, modules, "unpatched_nn_module_call", modules.unpatched_nn_module_call
        )
        self._undo.callback(setattr, functions, "__init__", functions.__init__)
        modules.unpatched_nn_module_call = call
        substitute = dynamo.substitute_in_graph(call, skip_signature_check=True)
        self._undo.callback(_forget, _TORCHS_CALL, substitute(_TORCHS_CALL))
        # Dynamo does not look up what calls a module that has hooks.
        functions.__init__ = _with_torchs_call(functions.__init__, call)

    def _backend(self, graph: Any, inputs: Sequence[Any]) -> Any:
        try:
            compile_fx = import_module("torch._inductor.compile_fx").compile_fx
            with _without_caches(), _without_random_states():
                return compile_fx(graph, inputs, inner_compile=self._compile_inner)
        except Exception as error:  # noqa: BLE001  # whatever inductor lacks: the graph runs as it is
            what = str(error).strip().partition("\n")[0][:160] or type(error).__name__
            self._remark(f"a compiled graph is predicted as eager code: {what}")
            return graph.forward

    def _compile_inner(self, graph: Any, inputs: Sequence[Any], **options: Any) -> Any:
        key = _key(graph, inputs, options)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = plan_of(graph, inputs, options)
        else:
            import_module("torch._inductor.compile_fx").record_original_output_strides(graph)
        made = plan

        def call(args: list[Any]) -> tuple[Any, ...]:
            return _follow(made, args, self._mode_here())

        call._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001  # torch's name
        return call


_TORCHS_CALL = torch.nn.Module._wrapped_call_impl  # noqa: SLF001  # torch has no public way


def _with_torchs_call(original: Callable[..., None], ours: Any) -> Callable[..., None]:
    """What dynamo knows of a function: it takes our call of a module for torch's."""

    def begin(variable: Any, fn: Any, *args: Any, **options: Any) -> None:
        original(variable, _TORCHS_CALL if fn is ours else fn, *args, **options)

    return begin


def _forget(*functions: Any) -> None:
    """Let dynamo forget a substitution: the next run in the process has another call of modules."""
    rules: Any = import_module("torch._dynamo.trace_rules")
    variables: Any = import_module("torch._dynamo.variables")
    by_id = variables.builder.VariableBuilder._id_dispatch()  # noqa: SLF001  # torch has no public way
    handlers = variables.PolyfilledFunctionVariable._get_polyfill_handlers()  # noqa: SLF001
    for each in functions:
        by_id.pop(id(each), None)
        rules._polyfilled_function_ids.remove(id(each))  # noqa: SLF001
        rules.get_torch_obj_rule_map().pop(each, None)
        handlers.pop(each, None)


def _begin_below_our_call(compiled: Any, model: torch.nn.Module) -> None:
    """Let dynamo begin at torch's own call of a module.

    It begins at `Module.__call__`, which follows the modules here. Dynamo skips that frame, counts
    it as a break, and compiles `forward` whole all the same.
    """
    if not import_module("torch._dynamo.trace_rules").check(model.forward):
        call = MethodType(_TORCHS_CALL, model)
        compiled.forward = compiled.dynamo_ctx(call)


_BREAKS = "torch.compile breaks graphs at some lines; what lies between is predicted as eager code"


@contextmanager
def _without_caches() -> Any:
    """Inductor's caches on the disk keep generated code, and there is none."""
    config = import_module("torch._inductor.config")
    functorch = import_module("torch._functorch.config")
    with (
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, force_disable_caches=True),
        functorch.patch(enable_autograd_cache=False),
    ):
        yield


@contextmanager
def _without_random_states() -> Any:
    """Leave out states for random numbers that are drawn again in backward: none are drawn here.

    On CUDA they are generators, and take no memory.
    """
    partitioners: Any = import_module("torch._functorch.partitioners")
    original = partitioners.functionalize_rng_ops
    partitioners.functionalize_rng_ops = lambda _joint, forward, backward, _count: (
        forward,
        backward,
    )
    try:
        yield
    finally:
        partitioners.functionalize_rng_ops = original


def _key(graph: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """What equal graphs have in common."""
    tensors = tuple(
        # As text: a saved state of random numbers may have a size that torch keeps as a symbol.
        (str(each.shape), str(each.stride()), each.dtype) if isinstance(each, Tensor) else str(each)
        for each in inputs
    )
    constants = tuple(sorted(name for name, _ in graph.named_buffers()))
    nodes = tuple(
        (node.op, node.name, str(node.target), str(node.args), str(node.kwargs))
        for node in graph.graph.nodes
    )
    return (
        nodes, tensors, constants, options.get("is_backward", False),
        options.get("is_inference", False),
    )  # fmt: skip


def plan_of(graph: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> GraphPlan:
    """Have inductor lower and schedule a graph as for CUDA."""
    compile_fx = import_module("torch._inductor.compile_fx")
    virtualized = import_module("torch._inductor.virtualized").V
    lowering = import_module("torch._inductor.graph").GraphLowering
    propagation = import_module("torch.fx.passes.fake_tensor_prop").FakeTensorProp
    fake_mode = import_module("torch._dynamo.utils").detect_fake_mode(inputs)
    if fake_mode is None:
        fake_mode = import_module("torch._subclasses").FakeTensorMode()
    is_inference = bool(options.get("is_inference", False))
    debugging = import_module("torch._inductor.debug").DebugContext()
    with ExitStack() as stack:
        for each in (torch.no_grad(), _modelled_device(), _without_modes(), debugging):
            stack.enter_context(each)
        _turn_to_cuda(graph)
        with fake_mode:
            fakes = [_on_cuda(each) for each in inputs]
        compile_fx.view_to_reshape(graph)
        stack.enter_context(virtualized.set_fake_mode(fake_mode))
        propagation(graph, mode=fake_mode).propagate_dont_convert_inputs(*fakes)
        compile_fx.record_original_output_strides(graph)
        compile_fx._recursive_post_grad_passes(graph, is_inference=is_inference)  # noqa: SLF001  # no public way
        lowered = lowering(
            graph, example_inputs=fakes, shape_env=fake_mode.shape_env,
            is_inference=is_inference, is_backward=bool(options.get("is_backward", False)),
        )  # fmt: skip
        stack.enter_context(virtualized.set_graph_handler(lowered))
        stack.enter_context(virtualized.set_extern_kernel_nodes([]))
        lowered.run(*fakes)
        lowered.init_wrapper_code()
        lowered._update_scheduler()  # noqa: SLF001  # the same
        keeps = not is_inference and not options.get("is_backward", False)
        return _plan_of_lowered(lowered, keeps=keeps)


@contextmanager
def _without_modes() -> Any:
    """Keep the modes of the rank, which charge what they see, out of this."""
    dispatch = import_module("torch.utils._python_dispatch")
    with dispatch._disable_current_modes(), DisableTorchFunction():  # noqa: SLF001  # the same
        yield


@contextmanager
def _modelled_device() -> Any:
    """Inductor asks the device for its properties, and for a compiler that it has not."""
    hints = import_module("torch._inductor.runtime.hints").DeviceProperties
    scheduler = import_module("torch._inductor.scheduler").Scheduler
    backend = import_module("torch._inductor.codegen.cuda_combined_scheduling")
    virtualized = import_module("torch._inductor.virtualized").V
    major, minor = torch.cuda.get_device_capability()
    properties = torch.cuda.get_device_properties()
    given = hints(
        type="cuda", index=0,
        multi_processor_count=getattr(properties, "multi_processor_count", 132),
        cc=10 * major + minor, major=major, regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2_048, max_threads_per_block=1_024, warp_size=32,
    )  # fmt: skip

    def create_backend(self: Any, device: Any) -> Any:
        virtualized.graph.add_device_info(device)
        return backend.CUDACombinedScheduling(self)

    with ExitStack() as stack:
        for owner, name, value in (
            (hints, "create", classmethod(lambda _cls, _device: given)),
            (scheduler, "create_backend", create_backend),
        ):
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        yield


def _turn_to_cuda(graph: Any) -> None:
    def on_cuda(value: Any) -> Any:
        return _CUDA if isinstance(value, torch.device) and value == _CPU else value

    for node in graph.graph.nodes:
        node.args = map_aggregate(node.args, on_cuda)
        node.kwargs = map_aggregate(node.kwargs, on_cuda)


def _on_cuda(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _empty(value.shape, value.stride(), dtype=value.dtype, device=_CUDA)


def _plan_of_lowered(lowered: Any, *, keeps: bool) -> GraphPlan:
    """The steps of what inductor has scheduled."""
    outputs = [_output_of(each) for each in lowered.graph_outputs]
    nodes = [node for node in lowered.scheduler.nodes if type(node).__name__ != _NOTHING]
    last: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for dependency in node.read_writes.reads | node.read_writes.writes:
            last[_real(lowered, dependency.name)] = index
    kept = {output.name for output in outputs}
    steps = []
    sizes: dict[str, int] = {}
    for index, node in enumerate(nodes):
        makes = _made_by(lowered, node)
        sizes |= {each.name: _bytes_of(each) for each in makes}
        ended = sorted(name for name, at in last.items() if at == index and name not in kept)
        is_extern = node.is_extern()
        wanted = [sizes[each.name] for each in makes]
        first = []
        for name in [] if is_extern else ended:
            if sizes.get(name) in wanted and name not in {each.name for each in makes}:
                wanted.remove(sizes[name])
                first.append(name)
        work = _extern_work(lowered, node) if is_extern else _fused_work(node, makes)
        steps.append(_GraphStep(work, makes, [name for name in ended if name not in first], first))
    return GraphPlan(
        list(lowered.graph_input_names), dict(lowered.constants), keeps, steps, outputs
    )


_NOTHING = "NopKernelSchedulerNode"


def _real(lowered: Any, name: str) -> str:
    """The buffer behind a name: a mutation is one of what it writes to."""
    return str(lowered.scheduler.mutation_real_name.get(name, name))


def _bytes_of(buffer: _Buffer) -> int:
    return _extent(buffer) * int(buffer.dtype.itemsize)


def _extent(buffer: _Buffer) -> int:
    if 0 in buffer.shape:
        return 0
    pairs = zip(buffer.shape, buffer.stride, strict=True)
    return 1 + sum(((size - 1) * stride for size, stride in pairs), 0)


def _made_by(lowered: Any, node: Any) -> list[_Buffer]:
    found = []
    for part in node.get_nodes():
        for output in part.get_outputs():
            made = output.node
            name = output.get_name()
            layout: Any = getattr(made, "layout", None)
            if name in lowered.removed_buffers or type(layout).__name__ not in _LAYOUTS:
                continue
            found.append(_Buffer(name, _whole(layout.size), _whole(layout.stride), layout.dtype))
    return found


_LAYOUTS = frozenset({"FixedLayout", "FlexibleLayout"})


def _whole(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(each) for each in sizes)


def _output_of(output: Any) -> _Output:
    kind = type(output).__name__
    if kind == "NoneAsConstantBuffer":
        return _Output("")
    if kind == "ShapeAsConstantBuffer":
        return _Output("", constant=int(output.expr))
    if kind == "TorchBindObject":  # a mesh, which backward needs
        return _Output(output.get_name())
    layout = output.get_layout()
    return _Output(
        output.get_name(), _whole(layout.size), _whole(layout.stride), int(layout.offset),
        layout.dtype,
    )  # fmt: skip


def _fused_work(node: Any, makes: Sequence[_Buffer]) -> DeviceOperation:
    """A fused kernel: it reads and writes its buffers, once."""
    size = int(node.get_read_write_buffers_sizes())
    _, (numel, rnumel) = node.group
    elements = int(numel) * int(rnumel)
    dtype = DTYPE_NAMES.get(makes[0].dtype, "") if makes else ""
    return DeviceOperation(_KERNELS[node.is_reduction()], "math", elements, size, dtype)


def _extern_work(lowered: Any, node: Any) -> _Call | _Collective | None:
    kernel = node.node
    if type(kernel).__name__ == "MultiOutput":
        return None
    overload = getattr(kernel, "op_overload", None)
    if overload is not None and str(getattr(overload, "namespace", "")) == _COLLECTIVES:
        return _collective_of(lowered, kernel, overload)
    origins = [
        each
        for each in kernel.get_origins()
        if each.op == "call_function" and hasattr(each.target, "overloadpacket")
    ]
    named = [each for each in origins if overload is not None and _is_of(each.target, overload)]
    name = str(getattr(kernel, "python_kernel_name", "")).rpartition(".")[2]
    named += [each for each in origins if str(each.target.overloadpacket).endswith(f".{name}")]
    if not named:
        raise NotImplementedError(f"kernel {name or kernel} has no operation")
    (origin, *_) = named

    args, kwargs = map_aggregate(origin.args, _value), map_aggregate(origin.kwargs, _value)
    return _Call(origin.target, args, kwargs, origin.meta["val"], _is_repeated(origin, lowered))


def _is_repeated(origin: Any, lowered: Any) -> bool:
    """Whether a graph of backward computes a part of forward again."""
    return bool(lowered.is_backward) and origin.meta.get("partitioner_tag") == "is_forward"


def _value(given: Any) -> Any:
    return given.meta["val"] if isinstance(given, torch.fx.Node) else given


def _is_of(target: Any, overload: Any) -> bool:
    return bool(target.overloadpacket is getattr(overload, "overloadpacket", None))


def _collective_of(lowered: Any, kernel: Any, overload: Any) -> _Collective:
    names = [_real(lowered, each.get_name()) for each in kernel.inputs]

    def bind(tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        bound: tuple[Any, Any] = kernel.unflatten_args(list(tensors), kernel.constant_args)
        return bound

    return _Collective(overload, names, bind, kernel.get_name())


def _follow(plan: GraphPlan, args: list[Any], mode: Any) -> tuple[Any, ...]:
    """Do what a call of a graph does, on the device of the rank that calls it."""
    held: dict[str, Any] = dict(zip(plan.inputs, args, strict=True))
    args.clear()
    held |= plan.constants
    for step in plan.steps:
        for name in step.drops_first:
            held.pop(name, None)
        for buffer in step.makes:
            if type(step.work) is not _Collective:
                held[buffer.name] = _made(buffer, is_kept=plan.keeps)
        match step.work:
            case DeviceOperation():
                mode.charge_work(step.work)
            case _Call() as call:
                mode.charge_call(
                    call.function, call.args, call.kwargs, call.result, is_repeated=call.is_repeated
                )
            case _Collective() as work:
                given, names = work.bind([held[name] for name in work.read])
                held[work.written] = work.function(*given, **names)
            case None:
                pass
        for name in step.drops:
            held.pop(name, None)
    return tuple(_seen(held, output) for output in plan.outputs)


def _made(buffer: _Buffer, *, is_kept: bool) -> Tensor:
    before, PLACEMENT.hint = PLACEMENT.hint, True
    try:
        # The mode asks for a device, and what is made with gradients enabled is an activation.
        with DisableTorchFunction(), torch.set_grad_enabled(is_kept):
            made = _empty(buffer.shape, buffer.stride, dtype=buffer.dtype)
    finally:
        PLACEMENT.hint = before
    mark_hollow(made)
    return made


def _seen(held: Mapping[str, Any], output: _Output) -> Any:
    if not output.name:
        return output.constant
    found = held[output.name]
    if not isinstance(found, Tensor):  # a mesh
        return found
    if output.dtype is not None and found.dtype is not output.dtype:
        found = found.view(output.dtype)
    if (
        tuple(found.shape) == output.shape
        and found.stride() == output.stride
        and found.storage_offset() == output.offset
    ):
        return found
    return found.as_strided(output.shape, output.stride, output.offset)
