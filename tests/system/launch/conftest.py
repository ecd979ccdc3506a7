from collections.abc import Iterator

import pytest

import rankwise


@pytest.fixture(scope="module")
def server() -> Iterator[rankwise.ForkServer]:
    """A warm fork server, which is not the first test's fault: it has served once."""
    with rankwise.ForkServer() as server:
        assert rankwise.run(rankwise.rank, nprocs=1, server=server) == [0]
        yield server
