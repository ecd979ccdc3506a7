"""torchrun's parser and what it makes of a command line: torch's and ours side by side."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from elastic_sides import RANKWISE, TORCH, load_from

pytestmark = pytest.mark.torch


@pytest.fixture
def run(side: str) -> ModuleType:
    pytest.importorskip("torch")
    load_from(side, "multiprocessing")
    return importlib.import_module(f"{side}.run")


@pytest.fixture(autouse=True)
def _threads_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


COMMAND_LINES = [
    ["a.py"],
    ["--nnodes=1:3", "--nproc-per-node", "4", "a.py", "-x", "--nnodes=9"],
    ["--nproc_per_node=2", "--rdzv_backend=etcd", "--rdzv-endpoint=h:1", "--rdzv-id=r", "a.py"],
    ["--rdzv-backend", "c10d", "--rdzv-conf", "timeout=5, last_call_timeout=1", "a.py"],
    ["--standalone", "-m", "package.module", "arg"],
    ["--no-python", "--max-restarts=3", "--role=worker", "bash", "-c", "true"],
    ["--run-path", "--monitor-interval=2", "--start-method=fork", "a.py"],
    ["-r", "3", "-t", "0:1,1:2", "--local-ranks-filter=0,1", "a.py"],
    ["--duplicate-stdout-filters=a,,b,c", "--redirect=1", "a.py"],
    ["--node-rank=1", "--master-addr=h", "--master-port=5", "--local-addr=me", "a.py"],
    ["--signals-to-handle=SIGTERM", "--shutdown-timeout=4", "--virtual-local-rank", "a.py"],
]


@pytest.mark.parametrize("arguments", COMMAND_LINES, ids=" ".join)
def test_command_lines_mean_the_same(arguments: list[str]) -> None:
    pytest.importorskip("torch")
    theirs = importlib.import_module(f"{TORCH}.run").parse_args(arguments)
    ours = importlib.import_module(f"{RANKWISE}.run").parse_args(arguments)

    assert vars(ours) == vars(theirs)


@pytest.mark.parametrize("arguments", COMMAND_LINES, ids=" ".join)
def test_launches_are_the_same(arguments: list[str]) -> None:
    pytest.importorskip("torch")

    def described(side: str) -> Any:
        module = importlib.import_module(f"{side}.run")
        args = module.parse_args(arguments)
        config, command, command_args = module.config_from_args(args)
        fields = {name: value for name, value in vars(config).items() if name != "logs_specs"}
        return fields, getattr(command, "__name__", command), command_args

    assert described(RANKWISE) == described(TORCH)


def test_variables_stand_for_flags(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2:5")
    monkeypatch.setenv("PET_STANDALONE", "1")
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "0.5")

    args = run.parse_args(["--nnodes=3", "a.py"])

    assert args.nnodes == "3"
    assert args.standalone is True
    assert args.monitor_interval == 0.5


def test_a_variable_that_is_no_number_is_refused(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_STANDALONE", "yes")

    with pytest.raises(ValueError, match="yes"):
        run.get_args_parser()


@pytest.mark.parametrize("text", ["'timeout=5,is_host=1'", ' "timeout=5, is_host=1" '])
def test_quotes_that_no_shell_has_taken_off_are_no_part_of_the_settings(text: str) -> None:
    # torch looks for a setting that is called 'timeout, and finds none.
    module = importlib.import_module(f"{RANKWISE}.run")
    args = module.parse_args(["--rdzv-backend=c10d", f"--rdzv-conf={text}", "a.py"])

    config, _, _ = module.config_from_args(args)

    assert config.rdzv_configs == {"timeout": "5", "is_host": "1"}


def test_numbers_of_nodes(run: ModuleType) -> None:
    assert run.parse_min_max_nnodes("5") == (5, 5)
    assert run.parse_min_max_nnodes("5:10") == (5, 10)
    with pytest.raises(RuntimeError, match='nnodes=2:20:30 is not in "MIN:MAX" format'):
        run.parse_min_max_nnodes("2:20:30")


def test_numbers_of_workers(run: ModuleType) -> None:
    assert run.determine_local_world_size("4") == 4
    assert run.determine_local_world_size("cpu") == len(os.sched_getaffinity(0))
    assert run.determine_local_world_size("auto") >= 1
    with pytest.raises(ValueError, match=r"Cuda is not available\."):
        run.determine_local_world_size("gpu")
    with pytest.raises(ValueError, match=r"Unsupported nproc_per_node value: many"):
        run.determine_local_world_size("many")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--nnodes=0", "a.py"], AssertionError),
        (["--nnodes=3:2", "a.py"], AssertionError),
        (["--max-restarts=-1", "a.py"], AssertionError),
        (["--no-python", "-m", "a"], ValueError),
        (["--local-ranks-filter=a", "a.py"], ValueError),
        (["--logs-specs=nobodys", "a.py"], ValueError),
    ],
)
def test_what_cannot_be_launched(
    run: ModuleType, arguments: list[str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run.config_from_args(run.parse_args(arguments))


@pytest.mark.system
def test_a_script_is_launched(tmp_path: Path) -> None:
    module = importlib.import_module(f"{RANKWISE}.run")
    script = tmp_path / "write.py"
    script.write_text(
        "import os, sys\n"
        f"open(f'{tmp_path}/rank{{os.environ[\"RANK\"]}}', 'w').write(' '.join(sys.argv[1:]))\n"
    )

    module.main(["--nproc-per-node=2", str(script), "one", "--two"])

    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["one --two"] * 2


@pytest.mark.system
def test_a_script_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"{RANKWISE}.run")
    errors = load_from(RANKWISE, "multiprocessing.errors")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    script = tmp_path / "fail.py"
    script.write_text("raise SystemExit(7)")

    with pytest.raises(errors.ChildFailedError, match=r"fail\.py FAILED"):
        module.main(["--standalone", str(script)])

    assert sys.argv[0] != str(script)


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["no-such-script.py"], 1)])
@pytest.mark.parametrize("name", ["run", "launch"])
def test_a_full_disk_changes_nothing_about_our_exit_code(
    name: str, arguments: list[str], code: int
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", f"{RANKWISE}.{name}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=full,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            check=False,
        )

    assert done.returncode == code
