"""What is recorded of the environment."""

from pathlib import Path

import pytest

from rankwise.launch.looking.rank_records import command_line, installed_versions, without_secrets


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--api-key", "abc", "train.py"), ("--api-key", "***", "train.py")),
        (("--password=abc",), ("--password=***",)),
        (("--rdzv-conf", "token=abc,lease_ttl=5"), ("--rdzv-conf", "token=***,lease_ttl=5")),
        (("HF_TOKEN=abc",), ("HF_TOKEN=***",)),
        (("https://user:abc@host/x",), ("https://***@host/x",)),
        (("--use-token", "--lr", "3"), ("--use-token", "--lr", "3")),
        (("--tokens-per-step=4096", "train.py"), ("--tokens-per-step=4096", "train.py")),
        (("--tokenizer", "gpt2"), ("--tokenizer", "gpt2")),
        (("--lr=3e-4", "train.py"), ("--lr=3e-4", "train.py")),
    ],
)
def test_what_looks_like_a_secret_is_left_out(
    words: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    assert without_secrets(words) == shown


def test_a_run_of_the_command_is_told_from_one_of_a_program() -> None:
    assert command_line(["/usr/bin/rankwise", "run", "x.py"]) == ("rankwise", "run", "x.py")
    assert command_line(["/lib/rankwise/__main__.py", "run"]) == ("rankwise", "run")
    assert command_line(["tune.py", "--lr", "3"]) == ("tune.py", "--lr", "3")


def test_versions_of_packages_are_those_that_are_imported_first(tmp_path: Path) -> None:
    for name in (
        "a/torch-2.13.0+cpu.dist-info",
        "b/torch-1.0.dist-info",
        "b/numpy-2.4.6.dist-info",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "b" / "torchvision-1.0.dist-info").mkdir()
    folders = ["", str(tmp_path / "a"), str(tmp_path / "none"), str(tmp_path / "b")]

    assert installed_versions(folders) == {"numpy": "2.4.6", "torch": "2.13.0+cpu"}
