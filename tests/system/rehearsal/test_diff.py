"""`rankwise diff`: the same program simulated and as processes, and the first bit that differs."""

import os
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from running import Finished, run, start, write_program


def compare(text: str, folder: Path, nprocs: int = 2) -> Finished:
    return run("diff", f"--nproc-per-node={nprocs}", write_program(folder, text), cwd=folder)


NUMPY = (
    "import os, random\nimport numpy as np\nimport rankwise\nfrom rankwise import collectives\n"
    "rank, is_simulated = rankwise.rank(), 'RANKWISE_SIMULATED' in os.environ\n"
    "weights = np.random.rand(2, 3) + random.random()\n"
)
CompareOnce = Callable[[str], tuple[Path, Finished]]
TORCH = (
    "import os\nimport torch\nimport torch.distributed as dist\ndist.init_process_group()\n"
    "rank, is_simulated = dist.get_rank(), 'RANKWISE_SIMULATED' in os.environ\n"
)


def test_a_program_of_numpy_is_equal_to_the_bit(tmp_path: Path) -> None:
    finished = compare(
        NUMPY + "for _ in range(3):\n"
        "    weights -= collectives.all_reduce(weights, op='mean') / 7\n"
        "collectives.broadcast(weights, root=1)\ncollectives.barrier()\n",
        tmp_path, 3,
    )  # fmt: skip

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["equal, bit for bit: 33 events of 3 ranks, each with all its tensors"]


@pytest.fixture(scope="module")
def compare_once(tmp_path_factory: pytest.TempPathFactory) -> CompareOnce:
    """One comparison for all tests that look at a different line of what it tells."""

    @cache
    def compared(text: str) -> tuple[Path, Finished]:
        folder = tmp_path_factory.mktemp("different")
        return folder, compare(NUMPY + text, folder)

    return compared


TENSORS_OF_CLASSES = """
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

pending = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
part = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])
summed = part.sum()
ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
empty, fake = torch.ones(2, device="meta"), FakeTensorMode().from_tensor(torch.ones(2))
sparse = torch.eye(3).to_sparse()
nested, lazy = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.nn.LazyLinear(3)


class Broken(torch.Tensor):
    def to_local(self):
        raise ValueError("it is lost")


broken = torch.ones(2).as_subclass(Broken)
dist.destroy_process_group()
"""
OTHER_PAYLOAD = """\
collectives.barrier()
weights[1, 2] = 5 if rank == 1 and is_simulated else 4
collectives.all_reduce(weights)
"""
OTHER_OPERATION = """\
collectives.barrier() if is_simulated else collectives.all_reduce(weights)
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            OTHER_PAYLOAD,
            "rank 1 differs at all_reduce #2 (sum) of (2, 3) float64 in group rankwise",
        ),
        (OTHER_PAYLOAD, ": its input, {folder}/program.py:9 in <module>: 1 of 6 elements, "),
        (OTHER_PAYLOAD, "the first is [5]: 5 simulated, 4 as a process"),
        (OTHER_OPERATION, "rank 0 did different things:\n  simulated:    barrier #1 in group"),
        (
            "if not is_simulated: result = np.ones(3)\n",
            "rank 0 reached this only as a process: result",
        ),
        ("weights *= 2 if is_simulated else 1\n", "rank 0 differs at weights at the end"),
    ],
)
def test_the_first_difference_is_told(text: str, told: str, compare_once: CompareOnce) -> None:
    folder, finished = compare_once(text)

    assert finished.code == 1
    assert told.format(folder=folder) in finished.stdout


def test_a_run_that_fails_is_shown(tmp_path: Path) -> None:
    finished = compare(
        NUMPY + "if rank == 1 and not is_simulated: raise ValueError('broken')\n", tmp_path
    )

    assert finished.code == 1
    assert "ValueError: broken" in finished.stderr
    assert "the run on processes failed with exit code 1" in finished.stderr
    assert "/rankwise/" not in finished.stderr


@pytest.mark.parametrize(("option", "name"), [((), "program.py"), (("-m",), "-m program")])
def test_a_report_names_the_program_that_was_compared(
    option: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    write_program(tmp_path, "raise ValueError('broken')\n")

    finished = run("diff", *option, name.removeprefix("-m "), cwd=tmp_path)

    assert finished.code == 1
    assert f"\n{name} failed after" in finished.stderr
    assert "/rankwise/" not in finished.stderr


@pytest.mark.torch
def test_the_stack_of_a_call_that_fails_has_nothing_of_the_recording(tmp_path: Path) -> None:
    text = "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
    refused = "dist.all_gather([torch.ones(3)], torch.ones(3))\n"

    finished = compare(text + refused, tmp_path)

    assert finished.code == 1
    assert "line 4, in <module>" in finished.stderr
    assert "recording.py" not in finished.stderr


def test_runs_that_fail_alike_are_equal_until_then(tmp_path: Path) -> None:
    finished = compare(
        NUMPY + "for _ in range(3):\n    collectives.all_reduce(weights)\n"
        "if rank == 1: raise ValueError('broken')\ncollectives.barrier()\n",
        tmp_path,
    )

    assert finished.code == 1
    equal = re.search(r"until they failed, both runs are equal: (\d+) events", finished.stdout)
    assert equal, finished.stdout
    assert int(equal[1]) >= 10  # the last operation may not be over on a rank when the other fails


def test_a_script_that_is_not_there_is_told(tmp_path: Path) -> None:
    finished = run("diff", "nothing.py", cwd=tmp_path)

    assert finished.code == 2
    assert "nothing.py" in finished.stderr


@pytest.mark.torch
def test_losses_and_parameters_of_a_training_are_equal(tmp_path: Path) -> None:
    finished = compare(
        TORCH + "def train():\n"
        "    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))\n"
        "    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)\n"
        "    for _ in range(3):\n"
        "        loss = model(torch.randn(16, 8)).square().mean()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "train()\n",
        tmp_path,
    )  # fmt: skip

    assert finished.code == 0, finished.stderr
    assert [line.partition(":")[0] for line in finished.lines[:-1]] == [
        "loss #1", "loss #2", "loss #3",
    ]  # fmt: skip
    assert "equal, bit for bit" in finished.lines[-1]


@pytest.mark.torch
def test_a_loss_and_the_parameters_that_differ_are_told(tmp_path: Path) -> None:
    finished = compare(
        TORCH + "weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.5)\n"
        "loss = weight.sum()\nloss.backward()\n"
        "if is_simulated and rank == 1: weight.grad[1] = 2\n"
        "optimizer.step()\n(weight * weight).sum().backward()\n",
        tmp_path,
    )  # fmt: skip

    assert finished.code == 1
    assert finished.lines[:2] == [
        "loss #1: 2 on rank 0, equal on all ranks",
        "loss #2: 0.25 on rank 1, 0.5 as a process",
    ]
    assert "rank 1 differs at parameters after step #1 (SGD)" in finished.lines[2]
    assert "1 of 2 elements, the first is [1]: 0 simulated, 0.5 as a process" in finished.lines[2]


def test_a_comparison_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    pipe, temporary = tmp_path / "pipe", tmp_path / "temporary"
    os.mkfifo(pipe)
    temporary.mkdir()
    text = f"import threading\nfile = open({str(pipe)!r}, 'w')\nthreading.Event().wait()\n"
    words = ("diff", "--nproc-per-node=1", write_program(tmp_path, text))

    environment = {"TMPDIR": str(temporary)}
    with start(*words, environment=environment) as command, pipe.open("rb") as held_by_rank:
        command.signal(signal.SIGTERM)
        stopped = command.finish()
        assert held_by_rank.read() == b"", "ends when the rank has gone"

    assert stopped.code == 128 + signal.SIGTERM
    assert stopped.stderr == "rankwise diff: stopped by SIGTERM\n"
    assert list(temporary.iterdir()) == []


@pytest.mark.torch
@pytest.mark.system
def test_tensors_of_other_classes_are_compared_or_left_out_with_a_line(tmp_path: Path) -> None:
    finished = compare(TORCH + TENSORS_OF_CLASSES, tmp_path)

    assert finished.code == 0, finished.stderr
    *left_out, verdict = finished.lines
    assert left_out == [
        "empty at the end is not compared: it has no values",
        "fake at the end is not compared: it has no values",
        "sparse at the end is not compared: it is a sparse_coo tensor",
        "nested at the end is not compared: it is a nested tensor",
        "lazy.weight at the end is not compared: it has no shape yet",
        "lazy.bias at the end is not compared: it has no shape yet",
        "broken at the end is not compared: reading it fails: ValueError: it is lost",
    ]
    assert verdict.startswith("equal, bit for bit: ")


@pytest.mark.torch
@pytest.mark.system
def test_result_of_a_functional_collective_that_differs_is_found(tmp_path: Path) -> None:
    finished = compare(
        TORCH + "import torch.distributed._functional_collectives as functional\n"
        "summed = functional.all_reduce(torch.ones(3), 'sum', dist.group.WORLD)\n"
        "summed = summed + 1 if is_simulated and rank == 1 else summed\n",
        tmp_path,
    )

    assert finished.code == 1
    assert "rank 1 differs at summed at the end" in finished.lines[-1]
