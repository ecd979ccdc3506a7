"""torchrun's predecessor, the actions of its parser, and the options that bind workers."""

import argparse
import importlib
from pathlib import Path
from types import ModuleType

import pytest
from elastic_sides import RANKWISE, TORCH, load_from


@pytest.fixture
def launch(side: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    load_from(side, "multiprocessing")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return importlib.import_module(f"{side}.launch")


@pytest.fixture
def actions(side: str) -> ModuleType:
    load_from(side, "multiprocessing")
    return importlib.import_module(f"{side}.argparse_util")


def parser_of(actions: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--number", action=actions.env, type=int, default=3)
    parser.add_argument("--needed", action=actions.env, required=True)
    parser.add_argument("-f", "--flag", action=actions.check_env)
    return parser


@pytest.mark.torch
@pytest.mark.parametrize(
    ("variables", "arguments", "values"),
    [
        ({}, ["--needed=a"], (3, "a", False)),
        ({"PET_NUMBER": "7", "PET_NEEDED": "b"}, [], (7, "b", False)),
        ({"PET_NUMBER": "7", "PET_FLAG": "1"}, ["-n", "8", "--needed=a"], (8, "a", True)),
        ({"PET_FLAG": "0"}, ["--needed=a", "-f"], (3, "a", True)),
        ({"PET_FLAG": "0"}, ["--needed=a"], (3, "a", False)),
    ],
)
def test_defaults_come_from_the_environment(
    actions: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    arguments: list[str],
    values: tuple[object, ...],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    parsed = parser_of(actions).parse_args(arguments)

    assert (parsed.number, parsed.needed, parsed.flag) == values


@pytest.mark.torch
def test_what_is_required_and_nowhere_is_missed(actions: ModuleType) -> None:
    with pytest.raises(SystemExit):
        parser_of(actions).parse_args([])


@pytest.mark.torch
def test_scripts_are_given_their_local_rank_unless_they_read_it_themselves(
    side: str, launch: ModuleType
) -> None:
    run = importlib.import_module(f"{side}.run")

    plain = run.config_from_args(launch.parse_args(["a.py", "x"]))[2]
    modern = run.config_from_args(launch.parse_args(["--use-env", "a.py", "x"]))[2]

    assert plain == ["-u", "a.py", "--local-rank=${local_rank}", "x"]
    assert modern == ["-u", "a.py", "x"]


@pytest.mark.torch
def test_a_program_that_is_no_script_cannot_be_given_its_local_rank(launch: ModuleType) -> None:
    with pytest.raises(ValueError, match="you must also set the '--use-env' flag"):
        launch.launch(launch.parse_args(["--no-python", "bash"]))


@pytest.mark.system
def test_the_old_module_warns_and_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launch = importlib.import_module(f"{RANKWISE}.launch")
    script = tmp_path / "write.py"
    script.write_text(
        f"import os, sys\nopen(f'{tmp_path}/' + os.environ['LOCAL_RANK'], 'w').write(sys.argv[1])\n"
    )

    with pytest.warns(FutureWarning, match="rankwise run"):
        launch.main(["--nproc-per-node=2", str(script)])

    assert [(tmp_path / rank).read_text() for rank in "01"] == ["--local-rank=0", "--local-rank=1"]


@pytest.mark.torch
def test_binding_options_are_torchs() -> None:
    theirs = pytest.importorskip("torch.numa.binding")
    ours = importlib.import_module(f"{RANKWISE}.numa.binding")

    assert {m.name: m.value for m in ours.AffinityMode} == {
        m.name: m.value for m in theirs.AffinityMode
    }
    assert ours.AffinityMode.NODE == "node"
    options = ours.NumaOptions(ours.AffinityMode.NODE)
    same = theirs.NumaOptions(theirs.AffinityMode.NODE)
    assert vars(options) == vars(same)
    arguments = ["--numa-binding=socket", "a.py"]
    config = {
        side: importlib.import_module(f"{side}.run").config_from_args(
            importlib.import_module(f"{side}.run").parse_args(arguments)
        )[0]
        for side in (TORCH, RANKWISE)
    }
    assert vars(config[RANKWISE].numa_options) == vars(config[TORCH].numa_options)
