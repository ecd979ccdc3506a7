"""Timers, `utils.data` and the control plane: torch's own objects behind our names."""

import importlib
import subprocess
import sys
import uuid
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import agents_of_a_job as job
import pytest
from elastic_sides import RANKWISE, TORCH, load_from

MODULES = [
    "control_plane",
    "timer",
    "timer.api",
    "timer.debug_info_logging",
    "timer.file_based_local_timer",
    "timer.local_timer",
    "utils.data",
    "utils.data.cycling_iterator",
    "utils.data.elastic_distributed_sampler",
]


WITHOUT_TORCH = """
import importlib.abc
import sys

class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
"""
"""What Python does if it finds no torch, on a machine that has it."""


@pytest.mark.torch
@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_torchs_own_objects(module: str) -> None:
    original = load_from(TORCH, module)
    ours = load_from(RANKWISE, module)

    assert set(getattr(original, "__all__", ())) <= set(ours.__all__)
    assert all(getattr(ours, name) is getattr(original, name) for name in ours.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_missing_torch_is_named_with_its_installation(module: str) -> None:
    name = importlib.import_module(f"{RANKWISE}.elastic.{module}").__all__[0]
    program = f"{WITHOUT_TORCH}from {RANKWISE}.elastic.{module} import {name}\n"

    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert ended.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: {RANKWISE}.elastic.{module}.{name} is torch's own: pip install torch"
    )


@pytest.mark.torch
@pytest.mark.system
def test_agent_survives_a_timer_that_kills_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's agent dies with its worker: its caller gets no report.
    pytest.importorskip("torch")
    fifo = tmp_path / "timers"
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(fifo))
    node = job.Node("embedded", "localhost:0", uuid.uuid4().hex, job.exceed_a_timer)

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        error = pool.submit(job.run_agent, node).exception(job.LONG_S)

    assert not isinstance(error, BrokenProcessPool)
    assert "Signal 9 (SIGKILL)" in str(error)
    assert not fifo.exists()


@pytest.mark.torch
@pytest.mark.system
def test_agent_with_unused_timers_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(tmp_path / "timers"))
    node = job.Node("embedded", "localhost:0", uuid.uuid4().hex, job.places)

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        threads = pool.submit(job.threads_after_agent, node).result(job.LONG_S)

    assert threads == []
