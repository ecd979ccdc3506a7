"""What a shell completes behind `rankwise sim`."""

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from rankwise.cli.main import command_line
from rankwise.sim.benches import NAMES


def completions(*words: str) -> list[str]:
    completer = ShellComplete(command_line, {}, "rankwise", "_RANKWISE_COMPLETE")
    return [
        item.value if item.type == "plain" else f"<{item.type}>"
        for item in completer.get_completions(["sim", *words[:-1]], words[-1])
    ]


def test_benches_are_completed_by_name() -> None:
    assert completions("bench", "") == list(NAMES)
    assert completions("bench", "so") == ["softmax"]


@pytest.mark.parametrize("words", [("topology",), ("bench", "gemm", "--topology")])
def test_machines_are_presets_and_files(words: tuple[str, ...]) -> None:
    assert completions(*words, "to") == ["torus16", "<file>"]


@pytest.mark.parametrize("option", ["--set", "--sweep"])
def test_parameters_of_the_bench_come_with_the_values_that_they_may_have(option: str) -> None:
    assert completions("bench", "gemm", option, "dt") == ["dtype=f16", "dtype=bf16", "dtype=f32"]
    assert completions("bench", "gemm", option, "m") == ["m=1024"]


def test_fields_are_those_of_the_machine_that_was_chosen() -> None:
    words = ("bench", "gemm", "--topology", "torus16", "--set", "system.sips.")

    assert "system.sips.count=16" in completions(*words)
    assert "system.sips.link.bandwidth_GBps=100" in completions(*words)


def test_fields_of_the_collectives_are_completed_for_programs_too() -> None:
    assert completions("run", "mine.py", "--set", "n_l") == ["n_lanes=0"]
    assert "algorithm=tree_allreduce" in completions("bench", "gemm", "--set", "alg")


def test_programs_and_outputs_are_files() -> None:
    assert completions("run", "") == ["<file>"]
    for option in ("--trace", "--report", "--ccl"):
        assert completions("bench", "gemm", option, "") == ["<file>"]


def test_a_program_is_not_executed_to_complete_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("raise SystemExit('executed')")

    assert completions("run", "mine.py", "--set", "world") == ["world_size="]


def test_a_topology_that_is_broken_leaves_the_rest_to_be_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("system: {")

    words = completions("bench", "gemm", "--topology", "mine.yaml", "--set", "")

    assert "m=1024" in words
    assert not any(word.startswith("system.") for word in words)
