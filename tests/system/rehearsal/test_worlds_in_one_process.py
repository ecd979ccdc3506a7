"""Worlds that follow each other in one process: a world that fails or hangs leaves nothing."""

from pathlib import Path

import pytest
from running import run_program

WORLDS = """
import os, sys
import rankwise

folder = sys.argv[1]


def hang():
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as shared

    sys.path.insert(0, folder)
    import of_user

    of_user.value = "of the rank that hung"
    dist.init_process_group("gloo")
    group = dist.new_group()
    shared.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    torch.set_default_dtype(torch.float64)
    if dist.get_rank() == 0:
        os.read(os.pipe()[0], 1)
    dist.barrier()


def work():
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    import torch.distributed._symmetric_memory as shared
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sys.path.insert(0, folder)
    import of_user

    dist.init_process_group("gloo")
    group = dist.new_group()
    shared.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    total = functional.all_reduce(torch.ones(2), "sum", group)
    model = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
    model(torch.ones(1, 2)).sum().backward()
    return total.tolist(), of_user.value, str(torch.get_default_dtype())


def end(how):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = dist.new_group(group_desc="of the world that ended")
    dist.all_reduce(torch.ones(1), group=group, async_op=True)
    if how == "differ":
        dist.all_reduce(torch.ones(1 + dist.get_rank()), group=group)
    if dist.get_rank() == 1:
        {"raise": int, "exit": os._exit, "kill": lambda code: os.kill(os.getpid(), 9)}[how](
            "no number" if how == "raise" else 3
        )
    dist.barrier(group)


for how in ("raise", "exit", "kill", "differ"):
    try:
        rankwise.run(end, (how,), nprocs=2, on="sim")
    except rankwise.WorkersFailed:
        print(how, rankwise.run(work, nprocs=2, on="sim"))
for _ in range(2):
    try:
        rankwise.run(hang, nprocs=2, on="sim", hang_timeout=0.5)
    except rankwise.RankwiseError as error:
        print("hung" if "the gang hung: rank 0 has let" in str(error) else error)
    print(rankwise.run(work, nprocs=2, on="sim"))
print("of_user" in sys.modules)
"""


@pytest.mark.torch
@pytest.mark.system
def test_ranks_that_fail_or_hang_leave_nothing_for_the_next_world(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "of_user.py").write_text("value = 'fresh'\n")

    finished = run_program(WORLDS, tmp_path, str(tmp_path / "library"))

    rank = ([2.0, 2.0], "fresh", "torch.float32")
    ends = [f"{how} {[rank, rank]}" for how in ("raise", "exit", "kill", "differ")]
    assert finished.stdout.splitlines() == [*ends, *["hung", str([rank, rank])] * 2, "False"]
