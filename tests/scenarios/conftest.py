"""To rewrite the transcripts: `pytest tests/scenarios --rewrite`, or of one folder in there."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what is printed now into the transcripts instead of comparing",
    )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rewrite", default=False))
