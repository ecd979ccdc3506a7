"""Counting accelerators on machines made of files."""

import shlex
import sys
from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError
from rankwise.cli.main import invoke
from rankwise.launch.run.devices import device_count_by_torch, visible_gpu_count


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def nvidia_machine(root: Path, count: int, given: range | None = None) -> Path:
    """A host with `count` devices, of which a container was given some."""
    for minor in range(count):
        information = f"Model: \t\t NVIDIA H200\nDevice Minor: \t {minor}\n"
        write(root / f"proc/driver/nvidia/gpus/0000:{minor}a:00.0/information", information)
    for minor in given or range(count):
        write(root / f"dev/nvidia{minor}")
    write(root / "dev/nvidiactl")
    write(root / "dev/nvidia-uvm")
    return root


def test_a_machine_without_driver_has_no_devices(tmp_path: Path) -> None:
    assert visible_gpu_count({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0


def test_the_driver_tells_how_many_there_are(tmp_path: Path) -> None:
    assert visible_gpu_count({}, nvidia_machine(tmp_path, 8)) == 8


def test_a_container_has_those_that_it_was_given(tmp_path: Path) -> None:
    assert visible_gpu_count({}, nvidia_machine(tmp_path, 8, range(2, 5))) == 3


def test_device_nodes_count_where_the_driver_tells_nothing(tmp_path: Path) -> None:
    nvidia_machine(tmp_path, 0, range(2))

    assert visible_gpu_count({}, tmp_path) == 2


@pytest.mark.parametrize("chosen", ["GPU-abc", "GPU-a,GPU-b", "MIG-x,MIG-y,MIG-z"])
@pytest.mark.parametrize(
    "variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
)
def test_names_of_devices_count_nothing_on_a_machine_without_devices(
    tmp_path: Path, variable: str, chosen: str
) -> None:
    assert visible_gpu_count({variable: chosen}, tmp_path) == 0


def test_more_names_than_devices_count_as_many_as_there_are_devices(tmp_path: Path) -> None:
    root = nvidia_machine(tmp_path, 1)

    assert visible_gpu_count({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, root) == 1


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        ("0,1", 2),
        ("3", 1),
        (" 1 , 2 ", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,9,1", 1),
        ("NoDevFiles", 0),
        ("0,0", 0),
        ("GPU-8f2a,GPU-77aa", 2),
        ("MIG-8f2a", 1),
    ],
)
def test_the_environment_chooses_by_the_drivers_rule(
    tmp_path: Path, chosen: str, count: int
) -> None:
    root = nvidia_machine(tmp_path, 4)

    assert visible_gpu_count({"CUDA_VISIBLE_DEVICES": chosen}, root) == count


def test_amd_devices_are_nodes_that_are_no_cpus(tmp_path: Path) -> None:
    write(tmp_path / "dev/kfd")
    for node, gpu_id in enumerate(["0", "0", "4711", "4712", "4713"]):
        write(tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id", f"{gpu_id}\n")

    assert visible_gpu_count({}, tmp_path) == 3
    assert visible_gpu_count({"HIP_VISIBLE_DEVICES": "0,2"}, tmp_path) == 2
    assert visible_gpu_count({"ROCR_VISIBLE_DEVICES": "1"}, tmp_path) == 1


def fake_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    write(folder / "torch.py", body)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.system
def test_other_devices_are_counted_by_torch_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = (
        "class Hpu:\n"
        "    is_available = staticmethod(lambda: True)\n"
        "    device_count = staticmethod(lambda: 3)\n"
        "def get_device_module(kind):\n"
        "    assert kind == 'hpu', f'no {kind} here'\n"
        "    return Hpu\n"
    )
    fake_torch(tmp_path, monkeypatch, module)

    assert device_count_by_torch("hpu", sys.executable) == 3
    with pytest.raises(ConfigError, match="'xpu' devices: AssertionError: no xpu here"):
        device_count_by_torch("xpu", sys.executable)


@pytest.mark.system
def test_a_name_that_torch_does_not_know_is_told_without_all_that_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = (
        "def get_device_module(kind):\n"
        "    raise RuntimeError('Expected one of cpu, cuda, xpu device type, found ' + kind)\n"
    )
    fake_torch(tmp_path, monkeypatch, module)

    with pytest.raises(ConfigError, match=r"^torch has no device type 'abc'$"):
        device_count_by_torch("abc", sys.executable)


@pytest.mark.system
def test_where_torch_is_not_installed_a_word_is_refused_without_an_error_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S "$@"\n')
    python.chmod(0o700)
    write(tmp_path / "train.py", "")
    monkeypatch.setenv("PYTHON_EXEC", str(python))

    assert invoke(["run", "--nproc-per-node", "x", str(tmp_path / "train.py")]) == 2

    assert capsys.readouterr().err == (
        "rankwise run: error: --nproc-per-node is 'x', expected a number, auto, cpu, gpu or xpu; "
        "other devices need torch, which is not installed\n"
    )


@pytest.mark.system
def test_an_interpreter_that_cannot_be_asked_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could not be asked"):
        device_count_by_torch("xpu", str(tmp_path / "python"))
