"""What programs do besides computing, under `--timing-only`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from preloaded import Preloaded
from running import Finished, write_program

import rankwise

pytestmark = [pytest.mark.torch, pytest.mark.system]

BEGIN = """
import os

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
"""

LOADERS = """
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Numbers(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        print("item", index)
        return {"x": torch.full((3,), index)}


class Endless(IterableDataset):
    def __iter__(self):
        yield from (torch.full((2,), index) for index in range(3))


loader = DataLoader(Numbers(), batch_size=4, num_workers=WORKERS)
for _ in range(2):
    for batch in loader:
        print(batch.pop("x")[:, 0].tolist())
stream = iter(DataLoader(Endless(), batch_size=None))
if os.environ.get("RANKWISE_TEST_ENDLESS"):
    print([next(stream)[0].item() for _ in range(5)])
"""

FAKES = """
import contextlib

from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode() if FAKE else contextlib.nullcontext():
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, foreach=False)
    for _ in range(3):
        layer(torch.ones(512, 1024, device="cuda")).square().mean().backward()
        dist.all_reduce(layer.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
assert layer.weight.is_cuda
"""

SEEDED = """
x = torch.randn(4, device="cuda")
print([round(x.sum().item(), 6) for _ in range(3)])
"""

LEFT_OUT = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import save

model = torch.nn.Linear(16, 16, device="cuda")
state = model.state_dict()
dcp.save(state, checkpoint_id="saved")
save(state, checkpoint_id="saved")
dcp.async_save(state, checkpoint_id="saved").result()
dcp.load(state, checkpoint_id="of another machine")
torch.save(state, "saved.pt")
print(os.path.exists("saved"), os.path.exists("saved.pt"))
"""

STREAMS = """
def active():
    torch.empty(1, device="cuda")  # the allocator looks at its events when it is called
    stats = torch.cuda.memory_stats()
    return stats["active_bytes.all.current"] >> 20, torch.cuda.memory_allocated() >> 20


side = torch.cuda.Stream()
x = torch.empty(1 << 14, 1 << 14, device="cuda")
with torch.cuda.stream(side):
    for _ in range(5):
        y = x @ x
if RECORDED:
    x.record_stream(side)
del x
print(active())
side.synchronize()
print(active())
"""

ODD = """
mesh = dist.init_device_mesh("cuda", (4, 2), mesh_dim_names=("data", "tensor"))
layer = torch.nn.Linear(64, 64, device="cuda")
if rank % 2 and ODD:
    layer = torch.nn.Linear(64, 65, device="cuda")
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(3):
    layer(torch.ones(8, 64, device="cuda")).sum().backward()
    dist.all_reduce(torch.ones(64, device="cuda"), group=mesh.get_group("tensor"))
    optimizer.step()
"""

EXTRAS = """
from torch.cuda import comm, tunable

x = torch.randn(4, 256, device="cuda")
optimizer = torch.optim.SGD([torch.nn.Parameter(x)], lr=0.1)
tunable.set_max_tuning_iterations(7 + rank)
tunable.enable(True)
for _ in range(3):
    torch.cuda._sleep(1_000_000)
    torch.cuda.synchronize()
    optimizer.step()
assert tunable.is_enabled() and tunable.get_max_tuning_iterations() == 7 + rank
assert tunable.get_results() == ()
assert [each.shape for each in comm.broadcast(x, [0, 1])] == [x.shape] * 2
assert len(comm.broadcast_coalesced([x, x, x], [0, 1])) == 2
assert [each.shape[0] for each in comm.scatter(x, [0, 1])] == [2, 2]
assert [each.shape[0] for each in comm.scatter(x, chunk_sizes=[1, 3])] == [1, 3]
assert comm.gather([x, x]).shape == (8, 256)
assert comm.reduce_add([x, x]).shape == x.shape
assert len(comm.reduce_add_coalesced([[x, x, x], [x, x, x]])) == 3
"""


def run(
    preloaded: Preloaded, tmp_path: Path, program: str, *options: str, nprocs: int = 1, **env: str
) -> Finished:
    return preloaded.run(
        "run", "--on=sim:h100-sxm", "--timing-only", f"--nproc-per-node={nprocs}", "--no-prefix",
        f"--prediction={tmp_path / 'p.json'}", *options,
        write_program(tmp_path, BEGIN + program), cwd=tmp_path, **env,
    )  # fmt: skip


def figures_in(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "p.json").read_text())
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders_repeat_their_first_batch_if_data_is_synthetic(
    workers: int, preloaded: Preloaded, tmp_path: Path
) -> None:
    program = LOADERS.replace("WORKERS", str(workers)).replace(
        'os.environ.get("RANKWISE_TEST_ENDLESS")', "True"
    )

    finished = run(preloaded, tmp_path, program, "--synthetic-data")

    assert finished.code == 0, finished.stderr
    items = [f"item {index}" for index in range(4)]
    assert finished.lines == [*items, *["[0, 1, 2, 3]"] * 6, "[0, 0, 0, 0, 0]"]
    assert "data loaders do not run: each repeats its first batch" in finished.stderr
    assert figures_in(tmp_path)["remarks"] == [
        "data loaders do not run: each repeats its first batch (--synthetic-data)",
        "a data loader without a length repeats its first batch without end (--synthetic-data)",
    ]


def test_data_loaders_with_workers_run_for_real(preloaded: Preloaded, tmp_path: Path) -> None:
    finished = run(preloaded, tmp_path, LOADERS.replace("WORKERS", "2"))

    assert finished.code == 0, finished.stderr
    batches = [line for line in finished.lines if line.startswith("[")]
    assert batches == ["[0, 1, 2, 3]", "[4, 5, 6, 7]", "[8, 9]"] * 2


def test_fake_tensors_of_the_program_take_time_and_memory_as_tensors_without_data(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    found = {}
    for is_fake in ("True", "False"):
        finished = run(
            preloaded,
            tmp_path,
            FAKES.replace("FAKE)", f"{is_fake})").replace("if FAKE", f"if {is_fake}"),
            nprocs=2,
        )
        assert finished.code == 0, finished.stderr
        found[is_fake] = figures_in(tmp_path)

    fake, plain = found["True"], found["False"]
    # Their mode calls more operations on the host, which small kernels do not hide.
    assert fake["step_time_s"] == pytest.approx(plain["step_time_s"], rel=0.15)
    assert fake["peak_active_bytes"] == pytest.approx(plain["peak_active_bytes"], rel=0.01)


def test_seeded_values_depend_on_the_seed_alone(preloaded: Preloaded, tmp_path: Path) -> None:
    once, again, other = (
        run(preloaded, tmp_path, SEEDED, "--values=seeded", f"--seed={seed}").lines
        for seed in (1, 1, 2)
    )

    assert once == again != other
    assert len(set(json.loads(once[0]))) == 3


def test_checkpoints_are_left_out_with_a_line(preloaded: Preloaded, tmp_path: Path) -> None:
    finished = run(preloaded, tmp_path, LEFT_OUT, nprocs=2)

    assert finished.code == 0, finished.stderr
    assert finished.lines == ["False False"] * 2
    assert figures_in(tmp_path)["remarks"] == [
        "checkpoints are not written",
        "checkpoints are not read, but for the shapes in them",
    ]


@pytest.mark.parametrize(
    ("recorded", "lines"),
    [(True, ["(2048, 1024)", "(1024, 1024)"]), (False, ["(1024, 1024)", "(1024, 1024)"])],
)
def test_memory_that_another_stream_uses_is_active_until_the_stream_is_done(
    recorded: bool, lines: list[str], preloaded: Preloaded, tmp_path: Path
) -> None:
    finished = run(preloaded, tmp_path, STREAMS.replace("RECORDED", str(recorded)))

    assert finished.code == 0, finished.stderr
    assert finished.lines == lines


def test_sleep_after_the_last_step_divides_no_class(preloaded: Preloaded, tmp_path: Path) -> None:
    sleeping = "import time\n\ntime.sleep(2 if rank == 0 else 0)\n"

    finished = run(preloaded, tmp_path, ODD.replace("ODD:", "False:") + sleeping, nprocs=8)

    assert finished.code == 0, finished.stderr
    assert figures_in(tmp_path)["checked_ranks"] == 5


def test_ranks_of_each_group_position_are_run(preloaded: Preloaded, tmp_path: Path) -> None:
    finished = run(preloaded, tmp_path, ODD.replace("ODD:", "False:"), nprocs=8)

    assert finished.code == 0, finished.stderr
    assert figures_in(tmp_path)["checked_ranks"] == 5
    assert "ranks have positions in groups: 5 of 8 are run" in finished.stderr


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rank_that_differs_by_its_position_is_named_and_all_are_run(
    seed: int, preloaded: Preloaded, tmp_path: Path
) -> None:
    program = ODD.replace("ODD:", "True:")

    finished = run(preloaded, tmp_path, program, f"--seed={seed}", nprocs=8)

    assert finished.code == 0, finished.stderr
    assert figures_in(tmp_path)["checked_ranks"] == 8
    assert re.search(
        r"ranks are not equal: rank 0 \(position 0 in groups of 2, .*\) computes aten.addmm of .*,"
        r" rank [1357] \(position 1 in groups of 2, .*\) computes .*; all 8 are run",
        finished.stderr,
    )


def test_functions_on_equal_ranks_are_run_once(tmp_path: Path) -> None:
    def train(odd: int) -> int:
        import torch  # noqa: PLC0415  # of the rank
        import torch.distributed as dist  # noqa: PLC0415  # the same

        dist.init_process_group("nccl")
        rank = dist.get_rank()
        width = 65 if rank == odd else 64
        torch.randn(64, 64, device="cuda") @ torch.randn(64, width, device="cuda")
        dist.all_reduce(torch.ones(64, device="cuda"))
        return rank

    file = tmp_path / "p.json"
    results = rankwise.run(train, (-1,), 6, on="sim:h100-sxm", timing_only=True, prediction=file)
    checked = json.loads(file.read_text())["checked_ranks"]
    of_odd = rankwise.run(train, (0,), 6, on="sim:h100-sxm", timing_only=True, prediction=file)

    assert checked == 2
    assert results[0] == 0
    assert sorted(each is None for each in results) == [False] * 2 + [True] * 4
    assert of_odd == [0, 1, None, None, None, 5], "rank 0 differs, and both ends of the others run"
    assert json.loads(file.read_text())["checked_ranks"] == 3


NORMED = """
norm = torch.nn.RMSNorm(1024, device="cuda", dtype=torch.bfloat16)
x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
norm(x).sum().backward()
assert x.grad.shape == x.shape and norm.weight.grad.dtype is torch.bfloat16
"""


def test_rms_norm_is_one_kernel_each_way(preloaded: Preloaded, tmp_path: Path) -> None:
    finished = run(preloaded, tmp_path, NORMED, f"--trace={tmp_path / 'trace.json'}")

    assert finished.code == 0, finished.stderr
    names = re.findall(r'"name":"aten\.(\w+)"', (tmp_path / "trace.json").read_text())
    assert sorted(set(names)) == [
        "_fused_rms_norm", "_fused_rms_norm_backward", "fill_", "ones_like", "randn", "sum",
    ]  # fmt: skip


def test_sleeping_kernels_tuning_and_copies_of_cuda_work_on_modelled_devices(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    finished = run(preloaded, tmp_path, EXTRAS, "--every-rank", nprocs=2)

    assert finished.code == 0, finished.stderr
    assert "copies of torch.cuda.comm stay on the rank's own device" in finished.stderr
    assert figures_in(tmp_path)["step_time_s"] == pytest.approx(600e-6, rel=0.1)


MISFIT = """
class Of:
    total, part = torch.randn(2048, 64, device="cuda"), torch.randn(4096, 64, device="cuda")


for call in (Of.total.add_, Of.total.copy_, Of.total.mul_):
    call(Of.part[:2048])
    try:
        call(Of.part)
    except RuntimeError:
        continue
    raise SystemExit(f"{call.__name__} takes a tensor of another shape")
"""


def test_shape_that_does_not_fit_in_place_is_refused(preloaded: Preloaded, tmp_path: Path) -> None:
    finished = run(preloaded, tmp_path, MISFIT)

    assert finished.code == 0, finished.stderr


UNSTEPPED = """
weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    weight.grad = weight @ weight
    if dist.get_rank() == 0:
        optimizer.step()
    dist.barrier()
"""


def test_rank_without_steps_is_named_if_figures_are_of_the_whole_run(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    finished = run(preloaded, tmp_path, UNSTEPPED, "--every-rank", nprocs=2)

    remark = "figures are of the whole run: rank 1 never stepped an optimizer, another rank 3 times"
    assert finished.code == 0, finished.stderr
    assert remark in " ".join(finished.stderr.split())
    assert [remark] == figures_in(tmp_path)["remarks"]


WRAPPED = """
try:
    torch.empty(1 << 40, device="cuda")
except torch.OutOfMemoryError as error:
    raise RuntimeError("stage 0 has failed") from error
"""


def test_full_device_that_a_library_wraps_is_told_by_exit_code_and_hint(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    finished = run(preloaded, tmp_path, WRAPPED)

    assert finished.code == 77, finished.stderr
    assert "choose a machine with more memory" in " ".join(finished.stderr.split())
