"""Choices of streams and places of log files: torch's and ours through the same scenarios."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from elastic_sides import RANKWISE, Load, load_from


@pytest.fixture
def api(load: Load) -> ModuleType:
    return load("multiprocessing.api")


@pytest.fixture
def ours() -> ModuleType:
    return load_from(RANKWISE, "multiprocessing.api")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("3", 3),
        ("0:1", {0: 1}),
        ("0:1,1:2,7:3", {0: 1, 1: 2, 7: 3}),
        ("0:1,0:2", {0: 2}),
    ],
)
def test_choices_are_read(api: ModuleType, text: str, expected: int | dict[int, int]) -> None:
    choice = api.Std.from_str(text)

    assert choice == expected
    values = choice.values() if isinstance(choice, dict) else [choice]
    assert all(isinstance(value, api.Std) for value in values)


@pytest.mark.parametrize(
    "text", ["", "4", "11", "a", "0:4", "0:1,", ",0:1", "1,0:1", " 0", "0 ", "0:1;1:2", "0:1,1"]
)
def test_other_choices_are_refused(api: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        api.Std.from_str(text)


def test_ranks_of_two_digits_can_be_addressed(ours: ModuleType) -> None:
    assert ours.Std.from_str("12:3,0:1") == {12: ours.Std.ALL, 0: ours.Std.OUT}


def test_choices_are_spelled_out_for_all_ranks(api: ModuleType) -> None:
    std = api.Std

    assert api.to_map(std.OUT, 2) == {0: std.OUT, 1: std.OUT}
    assert api.to_map({0: std.OUT, 3: std.ERR}, 2) == {0: std.OUT, 1: std.NONE}
    assert std.OUT | std.ERR == std.ALL == 3


def relative(paths: dict[int, str], root: Path) -> dict[int, str]:
    """Drop the directories, whose names are random, down to `attempt_…`."""
    return {
        rank: "/".join(Path(path).relative_to(root).parts[1:]) if path.startswith("/t") else path
        for rank, path in paths.items()
    }


def test_files_are_laid_out_by_attempt_and_rank(api: ModuleType, tmp_path: Path) -> None:
    std = api.Std
    specs = api.DefaultLogsSpecs(str(tmp_path / "a" / "b"), redirects=std.OUT, tee={1: std.ALL})
    envs: dict[int, dict[str, str]] = {
        rank: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"} for rank in (0, 1)
    }

    dest = specs.reify(envs)

    root = tmp_path / "a" / "b"
    [run_directory] = root.iterdir()
    attempt = run_directory / "attempt_2"
    assert run_directory.name.startswith("job_")
    assert dest.stdouts == {0: f"{attempt}/0/stdout.log", 1: f"{attempt}/1/stdout.log"}
    assert dest.stderrs == {0: "", 1: f"{attempt}/1/stderr.log"}
    assert dest.tee_stdouts == {1: f"{attempt}/1/stdout.log"}
    assert dest.tee_stderrs == {1: f"{attempt}/1/stderr.log"}
    assert dest.error_files == {0: f"{attempt}/0/error.json", 1: f"{attempt}/1/error.json"}
    assert dest.filtered_stdout == f"{attempt}/filtered_stdout.log"
    assert dest.filtered_stderr == f"{attempt}/filtered_stderr.log"
    assert {r: env["TORCHELASTIC_ERROR_FILE"] for r, env in envs.items()} == dest.error_files
    assert sorted(path.name for path in attempt.iterdir()) == ["0", "1"]


def test_ranks_outside_the_filter_are_shown_nowhere(api: ModuleType, tmp_path: Path) -> None:
    specs = api.DefaultLogsSpecs(
        str(tmp_path), redirects=api.Std.OUT, tee={0: api.Std.ERR}, local_ranks_filter={1}
    )

    dest = specs.reify({0: {}, 1: {}})

    [run_directory] = tmp_path.iterdir()
    attempt = run_directory / "attempt_0"
    assert run_directory.name.startswith("test_run_id_")
    assert dest.stdouts == {0: f"{attempt}/0/stdout.log", 1: f"{attempt}/1/stdout.log"}
    assert dest.stderrs == {0: f"{attempt}/0/stderr.log", 1: ""}
    assert (dest.tee_stdouts, dest.tee_stderrs) == ({}, {})

    plain = api.DefaultLogsSpecs(str(tmp_path), local_ranks_filter={1}).reify({0: {}, 1: {}})
    assert (plain.stdouts, plain.stderrs) == ({0: os.devnull, 1: ""}, {0: os.devnull, 1: ""})


def test_a_run_has_one_directory_and_each_reify_an_empty_attempt(
    api: ModuleType, tmp_path: Path
) -> None:
    specs = api.DefaultLogsSpecs(str(tmp_path), redirects=api.Std.ALL)
    first = specs.reify({0: {}})
    Path(first.stdouts[0]).write_text("from the first time")

    second = specs.reify({0: {}})
    third = specs.reify({0: {"TORCHELASTIC_RESTART_COUNT": "1"}})

    assert second.stdouts == first.stdouts
    assert not Path(first.stdouts[0]).exists()
    assert Path(third.stdouts[0]).parents[2] == Path(first.stdouts[0]).parents[2]


def test_devnull_means_no_files_at_all(api: ModuleType) -> None:
    specs = api.DefaultLogsSpecs(os.devnull, redirects=api.Std.OUT, tee=api.Std.ALL)
    envs: dict[int, dict[str, str]] = {0: {}}

    dest = specs.reify(envs)

    assert specs.root_log_dir == os.devnull
    assert (dest.stdouts, dest.stderrs) == ({0: ""}, {0: ""})
    assert (dest.tee_stdouts, dest.tee_stderrs) == ({0: os.devnull}, {0: os.devnull})
    assert dest.error_files == {0: os.devnull}
    assert envs == {0: {"TORCHELASTIC_ERROR_FILE": ""}}


def test_a_file_is_no_log_directory(api: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(NotADirectoryError):
        api.DefaultLogsSpecs(str(tmp_path / "file"))


@pytest.mark.parametrize("log_dir", ["", None])
def test_without_a_directory_there_is_a_temporary_one_at_once(
    api: ModuleType, log_dir: str | None, no_leftovers: None
) -> None:
    root = api.DefaultLogsSpecs(log_dir).root_log_dir

    assert Path(root).is_dir()
    assert Path(root).name.startswith("torchelastic_")
    Path(root).rmdir()


def test_specs_are_equal_by_value(api: ModuleType, tmp_path: Path) -> None:
    def make(redirects: int) -> object:
        return api.DefaultLogsSpecs(str(tmp_path), api.Std(redirects), {0: api.Std.ERR}, {0})

    assert make(1) == make(1)
    assert make(1) != make(2)
    assert make(1) != "something else"
    assert repr(make(1)) == (
        f"DefaultLogsSpecs(root_log_dir={tmp_path}, redirects=1, "
        "tee={0: <Std.ERR: 2>}, local_ranks_filter={0})"
    )


def test_a_plug_in_keeps_what_it_was_given(api: ModuleType) -> None:
    class Specs(api.LogsSpecs):  # type: ignore[name-defined,misc]
        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            return api.LogsDest(stdouts=dict.fromkeys(envs, self._root_log_dir))

        @property
        def root_log_dir(self) -> str:
            return str(self._root_log_dir)

    specs = Specs("/somewhere", redirects=api.Std.OUT)

    assert specs.reify({0: {}}).stdouts == {0: "/somewhere"}
    with pytest.raises(TypeError):
        api.LogsSpecs()


def test_a_run_id_may_contain_slashes(ours: ModuleType, tmp_path: Path) -> None:
    ours.DefaultLogsSpecs(str(tmp_path)).reify({0: {"TORCHELASTIC_RUN_ID": "team/job"}})

    [run_directory] = tmp_path.iterdir()
    assert run_directory.name.startswith("team_job_")


@pytest.mark.parametrize(
    ("statements", "is_left"),
    [
        ("specs.root_log_dir", False),
        ("specs.reify({0: {}})", False),
        ("open(specs.reify({0: {}}).error_files[0], 'w').write('{}')", True),
        ("pass", False),
    ],
)
def test_temporary_directories_outlive_the_program_only_with_something_in_them(
    tmp_path: Path, statements: str, is_left: bool
) -> None:
    program = (
        "from rankwise.compat.torch.elastic.multiprocessing import DefaultLogsSpecs\n"
        f"specs = DefaultLogsSpecs()\n{statements}\n"
    )

    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )

    assert bool(list(tmp_path.iterdir())) == is_left
