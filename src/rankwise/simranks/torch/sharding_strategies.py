"""DTensor's strategies, computed once for tensors that are alike.

The step of an optimizer on lists of DTensors asks for a strategy for each tensor and operation, and
DTensor remembers none of them. A model of 80 layers has 700 tensors of nine kinds: that is most of
what a prediction of tensor and data parallelism costs. A strategy follows from the mesh, the
placements and shapes of the arguments, and the rules of the operation.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def remember_strategies() -> Callable[[], None]:
    """Keep what DTensor expands to a mesh; returns what undoes it."""
    module: Any = import_module("torch.distributed.tensor._ops.utils")
    original = module.expand_to_full_mesh_op_strategy
    known: dict[Any, Any] = {}

    def expand(mesh: Any, op_schema: Any, rules: Any, **options: Any) -> Any:
        key = _key(mesh, op_schema, rules, options)
        if key is None:
            return original(mesh, op_schema, rules, **options)
        found = known.get(key)
        if found is None:
            found = known[key] = original(mesh, op_schema, rules, **options)
        return found

    module.expand_to_full_mesh_op_strategy = expand

    def undo() -> None:
        known.clear()  # its keys hold the groups of a finished world
        module.expand_to_full_mesh_op_strategy = original

    return undo


def _key(mesh: Any, op_schema: Any, rules: Any, options: dict[str, Any]) -> Any:
    """What a strategy follows from; None if it follows from more."""
    if options.get("is_valid_strategy_cb") is not None:
        return None
    taken = (*op_schema.args_strategy, *op_schema.kwargs_strategy)
    if any(len(each.strategies) != 1 for each in taken):
        return None
    key = (
        mesh,
        str(op_schema.op),
        tuple([each.strategies[0].output_spec for each in taken]),
        tuple(map(tuple, rules)),
        tuple([(name, _frozen(value)) for name, value in sorted(options.items())]),
    )
    try:
        hash(key)
    except TypeError:  # of symbolic shapes, say
        return None
    return key


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
