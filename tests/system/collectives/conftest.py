from collections.abc import Callable, Iterator
from typing import Any

import pytest
from worlds import WindowWorld, World

from rankwise.workers.domains import DomainSpec


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(size: int, **options: Any) -> World:
        worlds.append(World(size, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture(scope="module")
def lasting_worlds() -> Iterator[dict[int, World]]:
    """Worlds of 1 to 8 ranks for tests that leave them intact.

    All are made before the first test that wants one, which would otherwise be blamed for them.
    """
    worlds = {size: World(size) for size in range(1, 9)}
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture
def make_window_world() -> Iterator[Callable[[DomainSpec], WindowWorld]]:
    worlds: list[WindowWorld] = []

    def make(spec: DomainSpec) -> WindowWorld:
        worlds.append(WindowWorld(spec))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
