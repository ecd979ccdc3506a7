"""Equal microbatches of a pipeline are carried out once, and figures are those of all of them."""

import json
from pathlib import Path
from typing import Any

import pytest

import rankwise

pytestmark = [pytest.mark.torch, pytest.mark.system]

STAGES, MICROBATCHES, ROWS, WIDTH = 2, 6, 64, 256
EXACT = (
    "peak_active_bytes", "peak_reserved_bytes", "peak_of_steps_bytes", "holders",
    "memory_over_step", "tokens_per_step", "model_flops_per_step", "communication_s",
)  # fmt: skip
TIMES = "step_time_s", "computing_s", "exposed_communication_s", "waiting_s", "mfu", "hfu"


def train(schedule: str, oddity: str = "") -> int:
    """Train a pipeline; returns how often the module of the rank's first stage was called."""
    import torch  # noqa: PLC0415  # of the rank
    import torch.distributed as dist  # noqa: PLC0415  # the same
    from torch import nn  # noqa: PLC0415  # the same
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415  # the same
    from torch.distributed.pipelining import PipelineStage, schedules  # noqa: PLC0415  # the same
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415  # the same
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    calls = [0, 0]

    class Stage(nn.Module):  # type: ignore[misc]  # torch is untyped here
        def __init__(self, place: int) -> None:
            super().__init__()
            self.table = nn.Embedding(512, WIDTH) if not place else None
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.place = place

        def forward(self, x: Any) -> Any:
            calls[0] += self.place < STAGES
            if self.table is not None:
                x = self.table(x)
            y = x + self.down(torch.relu(self.up(x)))
            if oddity == "forward" and calls[0] % 2:
                y = y + torch.relu(y)
            if oddity == "backward":
                y.register_hook(self.go_backward)
            return y

        def go_backward(self, grad: Any) -> Any:
            calls[1] += 1
            return grad * 2 if calls[1] % 3 == 2 else None

    dist.init_process_group("nccl")
    shape = (STAGES, dist.get_world_size() // STAGES // 2, 2)
    mesh = dist.init_device_mesh("cuda", shape, mesh_dim_names=("pp", "dp", "tp"))
    at, device = mesh["pp"].get_local_rank(), torch.device("cuda")
    virtual = 2 if schedule.startswith("Interleaved") else 1
    places = [at + STAGES * index for index in range(virtual)]
    stages = []
    for place in places:
        with torch.device("meta"):
            stage = Stage(place)
        parallelize_module(stage, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(
            stage, mesh=mesh["dp"], reshard_after_forward=False,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )  # fmt: skip
        stage.to_empty(device="cuda")
        group = mesh["pp"].get_group()
        stages.append(PipelineStage(stage, place, STAGES * virtual, device, group=group))
    runs = schedules.get_schedule_class(schedule)(
        stages if virtual > 1 else stages[0], MICROBATCHES, loss_fn=lambda y, _: y.float().sum()
    )
    weights = [each for stage in stages for each in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(weights)
    x = torch.zeros(MICROBATCHES, ROWS, dtype=torch.int64, device=device)
    for _ in range(2):
        is_last = STAGES * virtual - 1 in places
        runs.step(*[x] * (0 in places), **{"target": x} if is_last else {}, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
    return calls[0]


def predict(
    path: Path, schedule: str, oddity: str = "", *, every_rank: bool
) -> tuple[dict[str, Any], list[int]]:
    calls = rankwise.run(
        train, (schedule, oddity), 4, on="sim:h100-sxm", timing_only=True, every_rank=every_rank,
        prediction=path,
    )  # fmt: skip
    return json.loads(path.read_text()), [each for each in calls if each]


def are_alike(few: dict[str, Any], everything: dict[str, Any]) -> None:
    assert {name: few[name] for name in EXACT} == {name: everything[name] for name in EXACT}
    # The step is bound by its host. FSDP looks for a prefetch in all but its last backward, 3 us.
    for name in TIMES:
        assert few[name] == pytest.approx(everything[name], rel=0.01), name


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "GPipe"])
def test_repeated_microbatches_give_the_figures_of_all(schedule: str, tmp_path: Path) -> None:
    few, some_calls = predict(tmp_path / "few.json", schedule, every_rank=False)
    everything, all_calls = predict(tmp_path / "all.json", schedule, every_rank=True)

    are_alike(few, everything)
    assert max(some_calls) < min(all_calls)


@pytest.mark.parametrize(
    ("schedule", "oddity"),
    [("1F1B", "forward"), ("1F1B", "backward"), ("InterleavedZeroBubble", "")],
)
def test_microbatches_that_differ_are_all_carried_out(
    schedule: str, oddity: str, tmp_path: Path
) -> None:
    few, _ = predict(tmp_path / "few.json", schedule, oddity, every_rank=False)
    everything, _ = predict(tmp_path / "all.json", schedule, oddity, every_rank=True)

    are_alike(few, everything)
