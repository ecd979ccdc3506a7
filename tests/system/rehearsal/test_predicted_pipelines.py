"""Pipelines of torch: the bubble of each schedule, overlap of messages, and memory by stage."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import rankwise

pytestmark = [pytest.mark.torch, pytest.mark.system]

STAGES, MICROBATCHES, LAYERS, ROWS, WIDTH = 4, 8, 4, 4096, 4096

VIRTUAL = {"Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2}
"""How many stages a rank has in schedules that give it more than one."""


def train(name: str) -> None:
    import torch  # noqa: PLC0415  # of the rank
    import torch.distributed as dist  # noqa: PLC0415  # the same
    from torch import nn  # noqa: PLC0415  # the same
    from torch.distributed.pipelining import PipelineStage, schedules  # noqa: PLC0415  # the same

    dist.init_process_group("nccl")
    rank, device = dist.get_rank(), torch.device("cuda")
    virtual = VIRTUAL.get(name, 1)
    places = [rank + index * STAGES for index in range(virtual)]
    if name == "ZBVZeroBubble":
        places = [rank, 2 * STAGES - 1 - rank]
    stages = [
        PipelineStage(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))),
            place, STAGES * virtual, device,
        )
        for place in places
    ]  # fmt: skip
    schedule = schedules.get_schedule_class(name)(
        stages if virtual > 1 else stages[0], MICROBATCHES, loss_fn=lambda y, _: y.sum()
    )
    x = torch.zeros(MICROBATCHES * ROWS, WIDTH, device=device)
    optimizer = torch.optim.SGD([torch.zeros(1, device=device, requires_grad=True)])
    for _ in range(2):
        is_last = STAGES * virtual - 1 in places
        given = {"target": x} if is_last else {}
        schedule.step(*[x] * (0 in places), **given, return_outputs=False)
        for stage in stages:
            stage.submod.zero_grad(set_to_none=False)
        optimizer.step()


Predict = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Predict:
    """The prediction of a schedule, made once."""
    path = tmp_path_factory.mktemp("predictions") / "p.json"

    @cache
    def predict(name: str) -> dict[str, Any]:
        rankwise.run(
            train, (name,), STAGES, on="sim:switch8", timing_only=True, every_rank=True,
            prediction=path,
        )  # fmt: skip
        figures: dict[str, Any] = json.loads(path.read_text())
        return figures

    return predict


@pytest.mark.parametrize(
    ("name", "bubble"),
    [
        ("GPipe", (STAGES - 1) / (MICROBATCHES + STAGES - 1)),
        ("1F1B", (STAGES - 1) / (MICROBATCHES + STAGES - 1)),
        ("Interleaved1F1B", (STAGES - 1) / (2 * MICROBATCHES + STAGES - 1)),
        ("InterleavedZeroBubble", (STAGES - 1) / (6 * MICROBATCHES + STAGES - 1)),
        ("ZBVZeroBubble", 0.0),
    ],
)
def test_bubble_of_schedule_is_the_closed_form(
    name: str, bubble: float, predicted: Predict
) -> None:
    figures = predicted(name)

    assert figures["bubble"] == pytest.approx(bubble, abs=0.02)


def test_messages_overlap_with_other_microbatches(predicted: Predict) -> None:
    figures = predicted("1F1B")

    # A receive begins when its stage has done what it was given before, so about half is hidden.
    assert 0 < figures["exposed_communication_s"] < 0.7 * figures["communication_s"]


def test_memory_of_stages_is_that_of_the_microbatches_in_flight(predicted: Predict) -> None:
    gpipe, one = (predicted(name)["stages"] for name in ("GPipe", "1F1B"))

    # Besides, 1F1B has the gradients of a microbatch in flight, which is half a unit.
    of_microbatch = LAYERS * ROWS * WIDTH * 4
    more = [
        (all_of["peak_active_bytes"] - few["peak_active_bytes"]) / of_microbatch
        for all_of, few in zip(gpipe, one, strict=True)
    ]
    in_flight = [STAGES - stage for stage in range(STAGES)]
    assert more == pytest.approx([MICROBATCHES - each for each in in_flight], abs=0.6)
