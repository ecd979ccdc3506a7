"""`torch.compile` for modelled CUDA devices: what `OnCpu` does to calls is done to graphs.

Dynamo would trace into the mode, whose Python code it cannot follow. So it takes the mode for none,
and the devices of each node that it puts into a graph are turned into the CPU instead.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.fx.node import map_aggregate

from rankwise.simranks.torch.cuda import CUDA, OnCpu, has_torch_function, on_cpu

_METHOD = "call_method"
_YES = True


def compile_for_cpu() -> Callable[[], None]:
    """Have dynamo make graphs for the CPU, whatever device a program names; returns what undoes it.

    To be called once dynamo is imported.
    """
    stack = ExitStack()

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        raw = vars(owner).get(name, original)  # which may be static
        setattr(owner, name, make(original))
        stack.callback(setattr, owner, name, raw)

    modes = import_module("torch._dynamo.variables.torch_function")
    replace(modes.SymbolicTorchFunctionState, "in_torch_function_mode", _but_for_ours)
    replace(modes.TorchFunctionModeVariable, "call_torch_function", _without_ours)
    graphs = import_module("torch._dynamo.output_graph").SubgraphTracer
    replace(graphs, "create_proxy", _for_cpu)
    functions = import_module("torch._dynamo.variables.torch").TorchInGraphFunctionVariable
    replace(functions, "_get_handlers", _with_ours)
    rules = import_module("torch._dynamo.trace_rules")
    replace(rules, "get_torch_obj_rule_map", partial(_knowing_ours, functions))
    tensors = import_module("torch._dynamo.variables.tensor").TensorVariable
    replace(tensors, "method_attr_is_cuda", _true_for_programs)
    return stack.close


def _with_ours(original: Callable[[], dict[Any, Any]]) -> Any:
    """What dynamo does with calls of functions: it takes our `has_torch_function` for torch's."""

    def get_handlers() -> dict[Any, Any]:
        handlers = original()
        known = handlers[torch.overrides.has_torch_function_unary]
        for function in (has_torch_function, torch._C._has_torch_function):  # noqa: SLF001  # torch has no public way
            handlers[function] = known
        return handlers

    return staticmethod(get_handlers)


def _knowing_ours(kind: type, original: Callable[[], dict[Any, type]]) -> Any:
    """What dynamo knows, and ours: looked up when something is compiled, as it takes long."""

    def get_torch_obj_rule_map() -> dict[Any, type]:
        known = original()
        known[has_torch_function] = kind
        return known

    get_torch_obj_rule_map.cache_clear = original.cache_clear  # type: ignore[attr-defined]  # torch empties it
    return get_torch_obj_rule_map


def _but_for_ours(_original: Any) -> Callable[[Any], bool]:
    def in_torch_function_mode(state: Any) -> bool:
        return any(not isinstance(each.value, OnCpu) for each in state.mode_stack)

    return in_torch_function_mode


def _without_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ours is above that of a default device."""

    def call(mode: Any, tx: Any, function: Any, types: Any, *call: Any) -> Any:
        if isinstance(mode.value, OnCpu):
            args, kwargs = call
            return function.call_function(tx, list(args), kwargs)
        return original(mode, tx, function, types, *call)

    return call


def _for_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_proxy(
        tracer: Any, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any
    ) -> Any:
        if kind in {"call_function", _METHOD}:
            target, args, kwargs = _of_node(kind, target, args, dict(kwargs))
        return original(tracer, kind, target, args, kwargs, *more, **options)

    return create_proxy


def _of_node(kind: str, target: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The target and the arguments that a node has on the CPU; a copy stays a copy."""
    if kind == _METHOD and target in {"cpu", "cuda"}:
        return "clone", args[:1], {}
    is_to = kind == _METHOD and target == "to"
    kwargs.pop("pin_memory", None)
    if type(kwargs.get("device")) is int:
        kwargs["device"] = CUDA
    if is_to and len(args) > 1 and type(args[1]) is int:
        args = (args[0], CUDA, *args[2:])
    if is_to and any(on_cpu(each) is not each for each in (*args, *kwargs.values())):
        kwargs["copy"] = True
    return target, map_aggregate(args, on_cpu), map_aggregate(kwargs, on_cpu)


def _true_for_programs(original: Callable[..., Any]) -> Callable[..., Any]:
    def is_cuda(tensor: Any, tx: Any) -> Any:
        if str(tx.f_globals.get("__name__")).partition(".")[0] == "torch":
            return original(tensor, tx)
        constants = import_module("torch._dynamo.variables.constant").ConstantVariable
        return constants.create(_YES)

    return is_cuda
