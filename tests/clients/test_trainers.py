"""Trainers that nobody here wrote, as released: simulated ranks do what processes do.

`make test-clients` installs them. Without them these tests are skipped.
"""

import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from running import run, start

pytestmark = [pytest.mark.system, pytest.mark.torch]

PROGRAMS = Path(__file__).parent / "programs"
NEEDS = {
    "transformers_trainer.py": "transformers",
    "lightning_ddp.py": "lightning",
    "megatron_layers.py": "megatron.core",
}
QUIET = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
PATIENCE_S = 900.0
"""A model of 8 billion parameters takes 42 s of CPU."""
TITAN = """
[job]
dump_folder = "out"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "tests/assets/tokenizer"
[training]
local_batch_size = 4
seq_len = 64
steps = 3
dataset = "c4_test"
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 1
[checkpoint]
enable = false
[activation_checkpoint]
mode = "selective"
"""


@pytest.mark.timeout(2 * PATIENCE_S)  # each rank imports the trainer for itself
@pytest.mark.parametrize("program", NEEDS)
def test_a_trainer_prints_the_same_lines_on_both(program: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[program])

    def lines_of(*options: str) -> list[str]:
        words = ("run", *options, "--nproc-per-node=4", "--no-prefix", str(PROGRAMS / program))
        with start(*words, environment=QUIET, cwd=tmp_path) as running:
            done = running.finish(PATIENCE_S)
        assert done.code == 0, done.stderr
        return sorted(line for line in done.lines if line.startswith("rank "))

    simulated, real = lines_of("--on=sim"), lines_of("--standalone")

    assert simulated == real
    assert len(real) == 4


@pytest.mark.parametrize("script", ["test_ops", "test_sync", "test_script"])
def test_accelerates_own_scripts_pass(script: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    module = f"accelerate.test_utils.scripts.{script}"

    done = run(
        *("run", "--on=sim", "--nproc-per-node=2", "-m", module), environment=QUIET, cwd=tmp_path
    )

    assert done.code == 0, done.stderr


def test_a_script_of_accelerate_that_hangs_on_processes_is_told_why(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    module = "accelerate.test_utils.scripts.test_distributed_data_loop"

    done = run(
        *("run", "--on=sim", "--nproc-per-node=2", "-m", module), environment=QUIET, cwd=tmp_path
    )

    assert done.code == 1
    assert "differs between its ranks" in done.stderr
    assert "rank 0 called broadcast" in done.stderr
    assert "rank 1 called barrier" in done.stderr


@pytest.mark.parametrize(
    ("size", "tensor", "pipeline"),
    [(2, 1, 1), (4, 2, 1), (4, 2, 2)],
    ids=["data", "tensor", "tensor and pipeline"],
)
def test_torchtitan_trains_on_modelled_devices(
    size: int, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    need_titan("0.2")
    write_titans_files(tmp_path)

    done = run(
        *("run", "--on=sim", "--device=cuda", f"--nproc-per-node={size}", "--no-prefix"),
        *("-m", "torchtitan.train", "--job.config_file", "titan.toml"),
        *("--parallelism.tensor_parallel_degree", str(tensor)),
        *("--parallelism.pipeline_parallel_degree", str(pipeline)),
        environment={**QUIET, "HF_DATASETS_CACHE": str(tmp_path / "cache")},
        cwd=tmp_path,
    )

    assert done.code == 0, done.stderr
    found = re.findall(r"step: +(\d+).*?loss: +([\d.]+)", done.stdout + done.stderr)
    losses = {int(step): float(loss) for step, loss in found}  # other stages of a pipeline say -1
    assert losses.keys() == {1, 2, 3}
    assert losses[3] < losses[2] < losses[1]


def predicted(folder: Path, *words: object, ranks: int) -> dict[str, Any]:
    """What is predicted of a client on nodes of 8 H100."""
    answer = folder / "p.json"
    nodes, per_node = max(1, ranks // 8), min(ranks, 8)
    with start(
        *("run", "--on=sim:h100-sxm", f"--nnodes={nodes}", f"--nproc-per-node={per_node}"),
        *("--timing-only", "--no-prefix", "--prediction", str(answer), *map(str, words)),
        environment={
            **QUIET,
            "HF_DATASETS_CACHE": str(folder / "cache"),
            "ACCELERATE_USE_CPU": "no",
        },
        cwd=folder,
    ) as running:
        done = running.finish(PATIENCE_S)
    assert done.code == 0, done.stderr
    found: dict[str, Any] = json.loads(answer.read_text())
    assert found["steps"] == 2
    assert found["too_cheap"] == []
    return found


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize(
    ("flavor", "ranks", "least", "most"), [("debugmodel", 2, 0.01, 0.1), ("8b", 8, 1.0, 1.8)]
)
def test_todays_torchtitan_is_predicted_on_an_h100(
    flavor: str, ranks: int, least: float, most: float, tmp_path: Path
) -> None:
    need_titan("0.3")
    write_titans_files(tmp_path)

    found = predicted(
        tmp_path, PROGRAMS / "titan.py", "--module=llama3", f"--config=llama3_{flavor}",
        "--training.steps=3", "--hf_assets_path=tests/assets/tokenizer",
        "--dataloader.dataset=c4_test", "--parallelism.spmd_backend=partial_dtensor", ranks=ranks,
    )  # fmt: skip

    assert least < found["step_time_s"] < most
    assert found["peak_active_bytes"] < found["capacity_bytes"] / 2


@pytest.mark.timeout(PATIENCE_S)
def test_torchtitans_70b_with_tensor_parallelism_is_predicted(tmp_path: Path) -> None:
    need_titan("0.3")
    write_titans_files(tmp_path)

    found = predicted(
        tmp_path, PROGRAMS / "titan.py", "--module=llama3", "--config=llama3_70b",
        "--training.steps=3", "--hf_assets_path=tests/assets/tokenizer",
        "--dataloader.dataset=c4_test", "--parallelism.spmd_backend=partial_dtensor",
        "--parallelism.tensor_parallel_degree=8", ranks=64,
    )  # fmt: skip

    assert found["checked_ranks"] < 10
    assert found["exposed_communication_by_kind_s"]


def test_torchtitan_of_before_is_predicted_on_an_h100(tmp_path: Path) -> None:
    need_titan("0.2")
    write_titans_files(tmp_path)

    found = predicted(
        tmp_path, "-m", "torchtitan.train", "--job.config_file", "titan.toml", ranks=2
    )

    assert found["peak_active_bytes"] < found["capacity_bytes"] / 100


def test_a_trainer_with_fsdp_is_predicted_on_an_h100(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    found = predicted(tmp_path, PROGRAMS / "transformers_fsdp.py", ranks=4)

    assert found["checked_ranks"] == 2
    assert found["communication_s"] > 0


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize(
    ("program", "package", "kinds"),
    [
        ("megatron_gpt.py", "megatron.core", {"all_reduce", "reduce_scatter", "all_gather"}),
        ("lightning_fsdp.py", "lightning", {"reduce_scatter", "all_gather"}),
    ],
)
def test_a_client_that_splits_weights_is_predicted_on_an_h100(
    program: str, package: str, kinds: set[str], tmp_path: Path
) -> None:
    pytest.importorskip(package)

    found = predicted(tmp_path, PROGRAMS / program, ranks=8)

    assert kinds <= found["exposed_communication_by_kind_s"].keys()
    assert found["peak_active_bytes"] < found["peak_reserved_bytes"] < found["capacity_bytes"]


def need_titan(release: str) -> None:
    """Skip without a release of torchtitan; its command changes from one to the next."""
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        pytest.skip("needs torchtitan")
    if not found.startswith(f"{release}."):
        pytest.skip(f"needs torchtitan {release}, and {found} is installed")


def write_titans_files(folder: Path) -> None:
    """A tokenizer of bytes and a small text, where torchtitan's own repository has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415  # a client

    (folder / "titan.toml").write_text(TITAN)
    assets = folder / "tests" / "assets"
    (assets / "tokenizer").mkdir(parents=True)
    (assets / "c4_test").mkdir()
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    texts = [json.dumps({"text": f"line {number} " * 60}) for number in range(200)]
    (assets / "c4_test" / "data.json").write_text("\n".join(texts))
