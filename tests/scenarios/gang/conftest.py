"""To rewrite the transcripts: `pytest tests/scenarios/gang --rewrite`."""

import contextlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    # Another folder of transcripts may offer the same option in the same run.
    with contextlib.suppress(ValueError):
        parser.addoption(
            "--rewrite",
            action="store_true",
            help="write what is printed now into the transcripts instead of comparing",
        )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rewrite", default=False))
