"""What follows when simulated ranks import a library that the simulation has a part of."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from rankwise.simranks.world.names_of_ranks import NAMES, NamesOfRanks
from rankwise.simranks.world.world import Extension, SimulatedWorld


def extensions_of(device: str) -> Mapping[str, Extension]:
    """By module, what is done in a world when it is imported; each returns what undoes it."""
    names = NamesOfRanks()
    return {
        "rankwise.drivers.real.windows.region": _follow_windows,
        "torch": partial(_follow_torch, device),
        "torch._dynamo.trace_rules": _follow_dynamo,
        "torch._dynamo.convert_frame": partial(_follow_compilation, device),
        "torch.distributed.checkpoint": _follow_checkpoint,
        "torch.distributed.pipelining.stage": _follow_pipelining,
        "torch.nn.attention.flex_attention": _follow_flexible_attention,
        "torch.distributed.fsdp": partial(_follow_fsdp, device),
        "torch.distributed._symmetric_memory": _follow_symmetric_memory,
        **{module: partial(names.follow, module) for module in NAMES},
        "torch.distributed.tensor": partial(_follow_dtensor, device, names),
    }


def _follow_windows(world: SimulatedWorld) -> Callable[[], None]:
    from rankwise.simranks.run import windows  # noqa: PLC0415  # only for programs that use them

    return windows.install(world)


def _follow_torch(device: str, world: SimulatedWorld) -> Callable[[], None]:
    from rankwise.simranks.torch import install  # noqa: PLC0415  # only for programs of torch

    stack = ExitStack()
    stack.callback(install(world, device))
    if world.equals is not None:
        from rankwise.simranks.torch import rank_reads  # noqa: PLC0415  # only for predictions

        stack.callback(rank_reads.note_reads(world.equals))
    return stack.close


def _follow_dtensor(device: str, names: NamesOfRanks, world: SimulatedWorld) -> Callable[[], None]:
    stack = ExitStack()
    if device == "cuda":
        from rankwise.simranks.torch import attention_sharding  # noqa: PLC0415  # for these alone

        stack.callback(attention_sharding.shard_attention_of_cpu())
    if world.equals is not None:
        from rankwise.simranks.torch import uneven_shards  # noqa: PLC0415  # the same

        stack.callback(uneven_shards.note_shards_of_dtensor(world.equals))
    if world.timing_only is not None:
        from rankwise.simranks.torch import sharding_strategies  # noqa: PLC0415  # the same

        stack.callback(sharding_strategies.remember_strategies())
    stack.callback(names.follow("torch.distributed.tensor", world))
    return stack.close


def _follow_dynamo(_world: SimulatedWorld) -> Callable[[], None]:
    from rankwise.simranks.torch import stay_out_of_graphs  # noqa: PLC0415  # only for programs of torch

    return stay_out_of_graphs()


def _follow_compilation(device: str, _world: SimulatedWorld) -> Callable[[], None]:
    if device != "cuda":
        return _nothing
    from rankwise.simranks.torch import compile_for_cpu  # noqa: PLC0415  # the same

    return compile_for_cpu()


def _follow_checkpoint(world: SimulatedWorld) -> Callable[[], None]:
    if world.timing_only is None:
        return _nothing
    from rankwise.simranks.torch.without_data import leave_checkpoints  # noqa: PLC0415  # rare

    return leave_checkpoints()


def _follow_pipelining(world: SimulatedWorld) -> Callable[[], None]:
    if world.timing_only is None or not world.prediction.repetition.is_wanted:
        return _nothing
    from rankwise.simranks.torch import equal_microbatches  # noqa: PLC0415  # rare

    return equal_microbatches.repeat_equal_microbatches(world.prediction.repetition)


def _follow_flexible_attention(world: SimulatedWorld) -> Callable[[], None]:
    if world.timing_only is None:
        return _nothing
    from rankwise.simranks.torch import flexible_attention  # noqa: PLC0415  # rare

    return flexible_attention.install()


def _follow_fsdp(device: str, world: SimulatedWorld) -> Callable[[], None]:
    if device != "cuda":
        return _nothing
    from rankwise.simranks.torch import shard_on_cpu  # noqa: PLC0415  # the same

    stack = ExitStack()
    stack.callback(shard_on_cpu())
    if world.timing_only is not None:
        from rankwise.simranks.torch.without_data import shard_on_device  # noqa: PLC0415  # rare

        stack.callback(shard_on_device())
    if world.equals is not None:
        from rankwise.simranks.torch import uneven_shards  # noqa: PLC0415  # the same

        stack.callback(uneven_shards.note_shards_of_fsdp(world.equals))
    return stack.close


def _follow_symmetric_memory(_world: SimulatedWorld) -> Callable[[], None]:
    from rankwise.simranks.torch import share_memory  # noqa: PLC0415  # the same

    return share_memory()


def _nothing() -> None:
    """Undo nothing."""
