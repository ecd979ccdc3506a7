"""A range of addresses may lie in several memories in turn, and is one run of bytes still."""

import numpy as np
import pytest

from rankwise.sim.hardware import (
    GraphEngine,
    MemoryExhausted,
    MemoryRead,
    MemoryWrite,
    MmuMap,
    MmuUnmap,
)


def test_a_range_over_several_channels_is_read_and_written_as_one() -> None:
    engine = GraphEngine("default")
    places = ((100, 0, 0), (50, 1, 3), (106, 2, 7))
    engine.wait(engine.submit(MmuMap(sip=0, address=4096, size=256, places=places)))
    data = np.arange(256, dtype=np.uint8)
    engine.wait(engine.submit(MemoryWrite(sip=0, address=4096, data=data)))

    read = engine.wait(engine.submit(MemoryRead(sip=0, address=4096 + 90, size=80)))

    np.testing.assert_array_equal(read, data[90:170])
    space = engine.space(0)
    assert [(memory.name, count) for memory, count in space.stretches(4096 + 90, 80)] == [
        ("sip0.cube0.hbm0", 10),
        ("sip0.cube1.hbm3", 50),
        ("sip0.cube2.hbm7", 20),
    ]


def test_unmapping_gives_back_what_each_memory_had() -> None:
    engine = GraphEngine("default")
    places = ((64, 0, 0), (64, 1, 0), (64, 0, 0))
    engine.wait(engine.submit(MmuMap(sip=0, address=4096, size=192, places=places)))
    space, cube = engine.space(0), engine.machine.sip(0).cube(0)
    assert space.used(cube.hbm(0)) == 128

    engine.wait(engine.submit(MmuUnmap(sip=0, address=4096)))

    assert space.used(cube.hbm(0)) == 0


def test_a_mapping_that_does_not_fit_takes_nothing() -> None:
    engine = GraphEngine("default")
    channel = engine.machine.sip(0).cube(0).hbm(0)
    places = ((64, 1, 0), (channel.capacity + 1, 0, 0))

    with pytest.raises(MemoryExhausted, match=r"sip0\.cube0\.hbm0 is full"):
        engine.wait(
            engine.submit(MmuMap(sip=0, address=4096, size=channel.capacity + 65, places=places))
        )

    assert engine.space(0).used(engine.machine.sip(0).cube(1).hbm(0)) == 0


def test_a_command_waits_for_one_that_brings_a_value() -> None:
    engine = GraphEngine("default")
    engine.wait(engine.submit(MmuMap(sip=0, address=4096, size=64)))
    read = engine.submit(MemoryRead(sip=0, address=4096, size=64))

    second = engine.submit(MemoryRead(sip=0, stream=1, after=(read,), address=4096, size=64))
    engine.wait(second)

    assert read.completed_at is not None
    assert second.started_at == read.completed_at
