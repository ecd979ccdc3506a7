"""Classes of equal ranks: a prediction with some ranks of each is the same as with all."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from preloaded import Preloaded

import rankwise

pytestmark = [pytest.mark.torch, pytest.mark.system]

BEGIN = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("nccl")
size = dist.get_world_size()
device = torch.device("cuda")


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def mesh_of(**sizes):
    return dist.init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def cut(model, mesh):
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard(model, mesh):
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(model, loss_of=lambda y: y.sum(), group=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(1):  # the figures are of the whole run then
        loss_of(model(torch.zeros(8, 64, device=device))).backward()
        if group is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()


model = nn.Sequential(Block()).to(device)
"""

PIPELINE = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

mesh = mesh_of(pp=4, other=size // 4)
stages, others = mesh["pp"].get_group(), mesh["other"].get_group()
at = mesh["pp"].get_local_rank()
stage = nn.Sequential(Block()).to(device)
SHAPED
schedule = ScheduleGPipe(
    PipelineStage(stage, at, 4, device, group=stages), 2, loss_fn=lambda y, _: y.sum()
)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for _ in range(1):
    x = INPUT
    schedule.step(*[x] * (at == 0), **{"target": x} if at == 3 else {})
    for parameter in stage.parameters():
        if not hasattr(parameter, "placements"):
            dist.all_reduce(parameter.grad, group=others)
    FINISHED
    optimizer.step()
    optimizer.zero_grad()
"""
NUMBERS = "torch.zeros(16, 64, device=device)"


def pipeline(shaped: str = "", given: str = NUMBERS, finished: str = "") -> str:
    text = PIPELINE.replace("SHAPED", shaped).replace("INPUT", given)
    return text.replace("FINISHED", finished)


LAYOUTS = {
    "fsdp2": ("shard(model, mesh_of(dp=size)); train(model)", 2, 1),
    "ddp": ("train(nn.parallel.DistributedDataParallel(model))", 2, 1),
    "hsdp": ("shard(model, mesh_of(replicas=2, dp=size // 2)); train(model)", 5, 1),
    "tp": ("cut(model, mesh_of(tp=size)); train(model)", 2, 1),
    "tp x fsdp": (
        """
mesh = mesh_of(dp=size // 4, tp=4)
cut(model, mesh["tp"])
shard(model, mesh["dp"])
train(model)
""", 5, 1,
    ),
    "pp x tp": (pipeline(shaped="cut(stage, mesh['other'])"), 8, 4),
    "pp": (pipeline(), 8, 4),
    "ep": (
        """
from torch.distributed._functional_collectives import all_to_all_single_autograd

mesh = mesh_of(dp=size // 4, ep=4)
experts, equal = mesh["ep"].get_group(), [2] * 4


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.expert = Block().to(device)

    def forward(self, x):
        sent = all_to_all_single_autograd(x, equal, equal, experts)
        return x + all_to_all_single_autograd(self.expert(sent), equal, equal, experts)


train(nn.Sequential(model, Routed()), group=mesh["dp"].get_group())
""", 5, 1,
    ),
    "cp": (
        """
mesh = mesh_of(dp=size // 4, cp=4)
ring, at = mesh["cp"].get_group(), mesh["cp"].get_local_rank()

def passed_on(x):
    y = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, group=ring, group_peer=(at + 1) % 4),
           dist.P2POp(dist.irecv, y, group=ring, group_peer=(at - 1) % 4)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return y

def attention(y):
    keys, total = y.detach(), 0
    for _ in range(4):
        total = total + (y @ keys.T).sum()
        keys = passed_on(keys)
    return total

train(model, attention, group=mesh["dp"].get_group())
""", 8, 4,
    ),
}  # fmt: skip
"""By name: a program, how many of 16 ranks run, and in how many classes."""

LARGER = [("hsdp", (32, 5, 1)), ("ddp", (32, 2, 1)), ("tp x fsdp", (64, 5, 1))]
"""The same of other numbers of ranks: how many there are, how many run, classes."""

ODD = {
    "collective of rank 0": (
        """
alone = dist.new_group([0])
if dist.get_rank() == 0:
    dist.all_reduce(torch.zeros(1 << 20, device=device) + 1, group=alone)
train(nn.parallel.DistributedDataParallel(model))
""",
        [(1, 1), (15, 3)],
        r"ranks are not equal: rank 0 .*, rank \d+ .*: 4 of 16 are run",
    ),
    "uneven shards": (
        """
model.append(nn.Linear(64, 50, device=device))
shard(model, mesh_of(dp=size))
train(model)
""",
        [(12, 2), (1, 1), (3, 2)],
        "shards of 50 rows are uneven: 5 of 16 are run",
    ),
    "embedding on the first stage": (
        pipeline(
            shaped="""
words = nn.Embedding(512, 64, device=device) if at in (0, 3) else None
tied = [dist.new_group([each, 12 + each]) for each in range(4)][dist.get_rank() % 4]
if at == 0:
    stage.insert(0, words)
""",
            given="torch.zeros(16, dtype=torch.long, device=device)",
            finished="if words is not None: dist.all_reduce(words.weight.detach(), group=tied)",
        ),
        [(4, 2)] * 4,
        "ranks send messages in groups of 4: 8 of 16 are run",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def machine(preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A switch with 64 devices."""
    path = tmp_path_factory.mktemp("machine") / "switch64.yaml"
    words = ("sim", "topology", "switch8", "--set", "system.sips.count=64", "--yaml")
    path.write_text(preloaded.run(*words).stdout)
    return f"sim:{path}"


@pytest.mark.parametrize(
    ("name", "counts"),
    [*((name, (16, *counts)) for name, (_, *counts) in LAYOUTS.items()), *LARGER],
    ids=[*LAYOUTS, *(f"{name} on {counts[0]}" for name, counts in LARGER)],
)
def test_prediction_of_layout_is_the_same_with_classes_and_with_every_rank(
    name: str, counts: tuple[int, int, int], machine: str, tmp_path: Path
) -> None:
    program, *_ = LAYOUTS[name]
    ranks, checked, classes = counts

    few = predicted(machine, tmp_path, program, ranks)
    every = predicted(machine, tmp_path, program, ranks, every_rank=True)

    assert (few["checked_ranks"], len(few["classes"])) == (checked, classes)
    assert (every["checked_ranks"], every["classes"]) == (ranks, None)
    assert answers(few) == pytest.approx(answers(every), rel=1e-9)


@pytest.mark.parametrize("name", ODD)
def test_odd_rank_is_a_class_of_its_own(
    name: str, machine: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program, classes, said = ODD[name]

    few = predicted(machine, tmp_path, program)
    told = capfd.readouterr().err
    every = predicted(machine, tmp_path, program, every_rank=True)

    assert re.search(said, told), told
    assert [(each["count"], len(each["checked"])) for each in few["classes"]] == classes
    assert answers(few) == pytest.approx(answers(every), rel=1e-9)


def test_lines_that_read_the_number_of_a_rank_are_reported(machine: str, tmp_path: Path) -> None:
    program = """
import os
rank = int(os.environ["RANK"]) + dist.get_rank()
mesh_of(dp=size)
dist.all_reduce(torch.zeros(8, device=device))
"""

    figures = predicted(machine, tmp_path, program)

    reads = figures["reads_of_rank"]
    assert [(each["what"], each["times"]) for each in reads] == [("RANK", 2), ("get_rank", 2)]
    assert len({each["place"] for each in reads}) == 1, "groups read it, too, and are left out"


@pytest.mark.parametrize("fault", ["slow:rank=3,by=1ms"])
def test_faults_let_every_rank_run(fault: str, machine: str, tmp_path: Path) -> None:
    figures = predicted(machine, tmp_path, LAYOUTS["ddp"][0], faults=fault)

    assert figures["checked_ranks"] == 16


def answers(figures: dict[str, Any]) -> dict[str, float]:
    """What a prediction says of all ranks together."""
    kinds = figures["exposed_communication_by_kind_s"]
    return {
        name: value
        for name, value in {**figures, **kinds}.items()
        if isinstance(value, int | float) and name not in {"checked_ranks", "peak_rank"}
    }


def predicted(
    machine: str, tmp_path: Path, program: str, ranks: int = 16, **options: Any
) -> dict[str, Any]:
    def train() -> None:
        exec(compile(BEGIN + program, "program.py", "exec"), {"__name__": "__main__"})

    path = tmp_path / "p.json"
    rankwise.run(train, (), ranks, on=machine, timing_only=True, prediction=path, **options)
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures
