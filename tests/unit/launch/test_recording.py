"""What is recorded of a command line."""

import pytest

from rankwise.launch.recording import without_secrets


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
