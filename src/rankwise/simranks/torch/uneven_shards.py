"""Shards of tensors tell which ranks are alike: those with as many rows as rank 0, and others."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch.distributed as dist

from rankwise.simranks.world.equals import Equals


def note_shards_of_fsdp(equals: Equals) -> Callable[[], None]:
    """Have `fully_shard` tell the rows that it shares out; returns what undoes it."""
    parameter = import_module("torch.distributed.fsdp._fully_shard._fsdp_param").FSDPParam

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **options: Any) -> None:
            original(self, *args, **options)
            group = getattr(self.mesh_info, "shard_process_group", None)
            if group is not None:
                rows = self._orig_size[self.fsdp_placement.dim]
                equals.note_shard(tuple(dist.get_process_group_ranks(group)), rows)

        return init

    return _replace(parameter, "_init_sharded_param", make)


def note_shards_of_dtensor(equals: Equals) -> Callable[[], None]:
    """The same of `distribute_tensor`, and so of tensor parallelism."""
    placement = import_module("torch.distributed.tensor.placement_types").Shard

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def shard(self: Any, tensor: Any, mesh: Any, mesh_dim: int, *args: Any, **more: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(mesh.get_group(mesh_dim)))
            equals.note_shard(ranks, tensor.size(self.dim))
            return original(self, tensor, mesh, mesh_dim, *args, **more)

        return shard

    return _replace(placement, "_shard_tensor", make)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    return lambda: setattr(owner, name, original)
