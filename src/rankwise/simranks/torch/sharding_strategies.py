"""DTensor's strategies, computed once for tensors that are alike.

The step of an optimizer on lists of DTensors asks for a strategy for each tensor and operation, and
DTensor remembers none of them. A model of 80 layers has 700 tensors of nine kinds: that is most of
what a prediction of tensor and data parallelism costs. A strategy follows from the mesh, the
placements and shapes of the arguments, and the rules of the operation.
"""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
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
    propagating: Any = import_module("torch.distributed.tensor._sharding_prop")
    agree = propagating._propagate_use_strided_shard_flag  # noqa: SLF001  # no public way
    propagating._propagate_use_strided_shard_flag = _asking_once(agree)  # noqa: SLF001  # the same

    def undo() -> None:
        propagating._propagate_use_strided_shard_flag = agree  # noqa: SLF001  # the same
        known.clear()  # its keys hold the groups of a finished world
        module.expand_to_full_mesh_op_strategy = original

    return undo


def _asking_once(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """`_propagate_use_strided_shard_flag`, which asks all arguments of an operation."""
    strided: Any = import_module("torch.distributed.tensor.placement_types")._StridedShard  # noqa: SLF001  # no public name
    latest: list[Any] = [None, None]

    def propagate(op_strategy: Any, op_schema: Any) -> None:
        # DTensor asks all tensors of a list for each of them: the time of a step would grow with
        # the square of their number. So the answer is kept for the list: tensors without strided
        # shards have none, and those that agree give it once.
        if latest[0] is not op_schema:
            by_flag = {
                spec.use_strided_shard_as_shard_order: spec
                for spec in op_schema.args_spec
                if any(isinstance(each, strided) for each in spec.placements)
            }
            latest[:] = op_schema, SimpleNamespace(args_spec=tuple(by_flag.values()))
        original(op_strategy, latest[1])

    return propagate


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
