"""Variables of installed packages, which are imported once for all simulated ranks."""

from pathlib import Path

import pytest
from preloaded import Preloaded
from running import write_program

pytestmark = [pytest.mark.torch, pytest.mark.system]

UNEVEN = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), dist.get_rank()
sent = [mesh if rank == 0 else None]
dist.broadcast_object_list(sent, 0)
for size in (5, 9, 13, 3, 7, 11):
    whole = torch.arange(1.0, size + 1)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    half = sharded.redistribute(placements=[Shard(0), Replicate()]).to_local()
    assert half.tolist() == torch.chunk(whole, 2)[rank // 2].tolist(), (size, half)
    assert sharded.full_tensor().equal(whole), (size, sharded.full_tensor())
    assert sharded.redistribute(sent[0], [Replicate()] * 2).to_local().equal(whole)
square = torch.arange(1.0, 26).view(5, 5)
sharded = distribute_tensor(square, mesh, [Shard(0), Shard(0)])
assert (sharded @ sharded.t()).full_tensor().equal(square @ square.t())
print("right")
dist.destroy_process_group()
"""

OWN = """
import sys
from importlib import import_module

import torch.distributed as dist

from rankwise.simranks.world.names_of_ranks import NAMES

dist.init_process_group("gloo")
rank = dist.get_rank()
found = []
for module in NAMES:
    if not module.startswith("torch"):
        continue
    import_module(module)
    for path in NAMES[module]:
        *owners, name = path.split(".")
        owner = sys.modules[module]
        if owners and owners[0] == "torch":
            owner = sys.modules[owners.pop(0)]
        for each in owners:
            owner = getattr(owner, each)
        assert vars(owner)[name] is not rank, (module, path)
        found.append((owner, name, f"{path} of rank {rank}"))
before = [vars(owner)[name] for owner, name, _ in found]
for owner, name, value in found:
    assert not str(vars(owner)[name]).endswith(f"of rank {1 - rank}"), name
    setattr(owner, name, value)
dist.barrier()
for owner, name, value in found:
    assert vars(owner)[name] == value, (name, vars(owner)[name])
for (owner, name, _), value in zip(found, before):
    setattr(owner, name, value)
print(len(found), "are own")
"""

PLANS = """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlanner

dist.init_process_group("gloo")
planner = DefaultSavePlanner(enable_plan_caching=True)
checkpoint.save({f"x{dist.get_rank()}": torch.ones(2)}, checkpoint_id="saved", planner=planner)
(plan,) = SavePlanner._cached_save_plan.values()
print(*(item.index.fqn for item in plan.items))
"""


def test_uneven_tensors_in_a_mesh_of_two_dimensions_are_right_in_every_run(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, UNEVEN)

    # The caches of torch outlive a run: the second one has other threads with the same identities.
    finished = preloaded.run(
        "run", "--on=sim", "--nproc-per-node=4", "--no-prefix", "--explore=2", program, cwd=tmp_path
    )

    assert finished.code == 0, finished.stderr


def test_listed_variables_of_torch_are_each_ranks_own(preloaded: Preloaded, tmp_path: Path) -> None:
    program = write_program(tmp_path, OWN)

    finished = preloaded.run(
        "run", "--on=sim", "--nproc-per-node=2", "--no-prefix", "--explore=2", program, cwd=tmp_path
    )

    assert finished.code == 0, finished.stderr


def test_cached_plans_of_a_checkpoint_are_those_of_the_rank(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = write_program(tmp_path, PLANS)

    finished = preloaded.run(
        "run", "--on=sim", "--nproc-per-node=2", "--no-prefix", program, cwd=tmp_path
    )

    assert finished.code == 0, finished.stderr
    assert sorted(finished.lines) == ["x0", "x1"]
