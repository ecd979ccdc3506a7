import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from rankwise.base.errors import ConfigError, Deadlock, LocalProtocolError, TimeLimit
from rankwise.sim import GraphEngine
from rankwise.sim.hardware import (
    AddressSpace,
    BadAddress,
    CommandHandle,
    Copy,
    KernelEnvironment,
    KernelLaunch,
    MemoryExhausted,
    MemoryRead,
    MemoryWrite,
    MmuMap,
    MmuUnmap,
    Operand,
    Run,
    load_topology,
)
from rankwise.sim.kernel import all_of, park, start_fiber

Steps = Generator[Any, Any, Any]
MIB = 1 << 20


def mapped(engine: GraphEngine, sip: int, size: int, *, cube: int = 0, pe: int = 0) -> int:
    address = engine.space(sip).reserve(size)
    engine.wait(engine.submit(MmuMap(sip=sip, address=address, size=size, cube=cube, pe=pe)))
    return address


def test_memory_that_was_only_mapped_reads_as_zero() -> None:
    engine = GraphEngine("default")
    address = mapped(engine, 2, 1_000)

    value = engine.wait(engine.submit(MemoryRead(sip=2, address=address, size=1_000)))

    assert value.dtype == np.uint8
    assert not value.any()


def test_what_was_written_and_copied_to_another_sip_is_read_there() -> None:
    engine = GraphEngine("default")
    here, there = mapped(engine, 0, MIB), mapped(engine, 3, MIB, cube=3, pe=5)
    data = np.arange(MIB // 4, dtype=np.int32)

    engine.submit(MemoryWrite(sip=0, address=here, data=data))
    copy = engine.submit(Copy(sip=0, address=here, destination_sip=3, destination=there, size=MIB))
    read = engine.submit(MemoryRead(sip=3, address=there, size=MIB, after=(copy,)))

    assert (engine.wait(read).view(np.int32) == data).all()
    assert copy.completed_at is not None
    assert copy.started_at is not None
    latency_ns = 500 + 100 + 500 + 15 + 15 + 100  # command, HBM, SIP link, two die links, HBM
    assert copy.completed_at - copy.started_at == latency_ns * 1_000 + MIB * 20


def test_a_range_may_cross_from_one_mapping_into_the_next() -> None:
    engine = GraphEngine("default")
    start = engine.space(0).reserve(300)
    for index in range(3):
        engine.submit(MmuMap(sip=0, address=start + 100 * index, size=100, pe=index))
    data = bytes(range(250))

    engine.submit(MemoryWrite(sip=0, address=start + 20, data=data))
    value = engine.wait(engine.submit(MemoryRead(sip=0, address=start + 20, size=250)))

    assert value.tobytes() == data


def test_handles_are_hashable_and_tell_their_times() -> None:
    engine = GraphEngine("default")
    first = engine.submit(MmuMap(sip=0, address=4_096, size=64))
    second = engine.submit(MmuMap(sip=0, address=8_192, size=64, after=(first,)))

    engine.wait(second)

    assert len({first, second, first}) == 2
    assert first.is_done
    assert (first.issued_at, first.started_at, first.completed_at) == (0, 0, 500_000)
    assert (second.issued_at, second.started_at, second.completed_at) == (0, 500_000, 1_000_000)
    assert engine.wait(first) is None


def test_streams_overlap_and_commands_of_one_stream_do_not() -> None:
    def load(env: KernelEnvironment) -> Steps:
        yield env.pes[0].start_dma(MIB)

    def time(streams: Sequence[int]) -> int:
        engine = GraphEngine("default")
        addresses = [mapped(engine, 0, MIB, cube=index) for index in range(2)]
        start = engine.now
        for address, stream in zip(addresses, streams, strict=True):
            engine.submit(Run(sip=0, stream=stream, start=load))
            del address
        engine.run()
        return engine.now - start

    assert time([0, 1]) < time([0, 0])


def test_without_data_only_time_passes_and_it_is_the_same_time() -> None:
    times = []
    for enable_data in (True, False):
        engine = GraphEngine("default", enable_data=enable_data)
        address = mapped(engine, 0, 4_096)
        engine.submit(MemoryWrite(sip=0, address=address, data=bytes(4_096)))
        value = engine.wait(engine.submit(MemoryRead(sip=0, address=address, size=4_096)))
        assert (value is not None) is enable_data
        times.append(engine.now)

    assert times[0] == times[1]


def test_what_the_host_writes_moves_in_as_many_chunks_however_many_memories_it_goes_to() -> None:
    size, taken, first_chunks = 256 * MIB, [], []
    for count in (1, 8):
        engine = GraphEngine("default", enable_data=False)
        address = engine.space(0).reserve(size)
        places = tuple((size // count, 0, pe) for pe in range(count))
        engine.wait(engine.submit(MmuMap(sip=0, address=address, size=size, places=places)))

        handle = engine.submit(MemoryWrite(sip=0, address=address, size=size))
        engine.simulator.run(engine.now + 10**7)
        (link,) = (each for each in engine.machine.links if each.name == "host->sip0")
        first_chunks.append(link.bytes_carried)
        engine.wait(handle)

        assert handle.completed_at is not None
        assert handle.started_at is not None
        taken.append(handle.completed_at - handle.started_at)

    assert first_chunks == [size // 64] * 2
    assert taken[0] == taken[1]


def test_a_full_memory_says_what_was_wanted_and_what_is_free() -> None:
    engine = GraphEngine("default", enable_data=False)
    channel = 512 * MIB
    mapped(engine, 1, channel - 100, cube=2, pe=3)

    with pytest.raises(
        MemoryExhausted,
        match=rf"sip1\.cube2\.hbm3 is full: 101 bytes wanted, 100 of {channel:,} free",
    ):
        mapped(engine, 1, 101, cube=2, pe=3)
    mapped(engine, 1, 100, cube=2, pe=3)


def test_unmapping_gives_the_memory_back() -> None:
    engine = GraphEngine("default", enable_data=False)
    address = mapped(engine, 0, 512 * MIB)

    engine.submit(MmuUnmap(sip=0, address=address))

    mapped(engine, 0, 512 * MIB)
    with pytest.raises(BadAddress, match="nothing is mapped"):
        engine.wait(engine.submit(MemoryRead(sip=0, address=address, size=4)))


def test_wrong_addresses_are_told_with_what_is_near() -> None:
    engine = GraphEngine("default")
    address = mapped(engine, 0, 100)
    read = engine.submit(MemoryRead(sip=0, address=address, size=101))

    with pytest.raises(BadAddress, match=rf"nothing is mapped at {address + 100:#x}; near it is"):
        engine.wait(read)
    with pytest.raises(BadAddress, match="overlaps"):
        engine.wait(engine.submit(MmuMap(sip=0, address=address + 99, size=10)))
    with pytest.raises(ConfigError, match="has no SIP 9"):
        engine.submit(MemoryRead(sip=9, address=0, size=1))


class OneFiberPerProgram:
    """A kernel runner as small as they get: `kernel(program, env, *args)`, which may `park`."""

    def run(
        self,
        env: KernelEnvironment,
        kernel_fn: Callable[..., Any],
        kernel_args: Sequence[Any],
        num_programs: int,
    ) -> Steps:
        programs = [
            start_fiber(
                env.simulator, kernel_fn, program, env, *kernel_args, name=f"program {program}"
            )
            for program in range(num_programs)
        ]
        return (yield all_of(programs))


def test_a_kernel_runs_its_programs_at_the_same_time_on_different_pes() -> None:
    def kernel(program: int, env: KernelEnvironment, address: int) -> int:
        park(env.start_dma(env.pe_of(program), address + 4_096 * program, 4_096, is_load=True))
        return env.simulator.now

    def end(num_programs: int) -> int:
        engine = GraphEngine("default")
        start = engine.space(0).reserve(4 * 4_096)
        for pe in range(4):
            engine.submit(MmuMap(sip=0, address=start + 4_096 * pe, size=4_096, pe=pe))
        launch = KernelLaunch(
            sip=0,
            runner=OneFiberPerProgram(),
            kernel_fn=kernel,
            kernel_args=(start,),
            num_programs=num_programs,
        )
        return int(max(engine.wait(engine.submit(launch))))

    assert end(1) == end(4)


def test_a_kernel_that_waits_for_ever_is_a_deadlock_with_its_line() -> None:
    engine = GraphEngine("default")

    def kernel(program: int, env: KernelEnvironment) -> None:
        park(env.simulator.future(f"a message for {program}"))

    launch = KernelLaunch(
        sip=1, runner=OneFiberPerProgram(), kernel_fn=kernel, num_programs=2, name="lonely"
    )

    with pytest.raises(Deadlock, match="lonely #0 on sip1 has not happened") as caught:
        engine.wait(engine.submit(launch))

    by_name = {each.who: each for each in caught.value.waiting}
    line = kernel.__code__.co_firstlineno + 1
    assert by_name["program 1"].what == "a message for 1"
    assert by_name["program 1"].where == f"{__file__}:{line} in kernel"
    assert by_name["program 1"].since == 500_000


def test_an_error_in_a_kernel_belongs_to_who_waits_for_the_launch() -> None:
    def kernel(program: int, env: KernelEnvironment) -> None:
        park(10 * (program + 1))
        raise ZeroDivisionError(f"in program {program}")

    engine = GraphEngine("default")
    launch = KernelLaunch(sip=0, runner=OneFiberPerProgram(), kernel_fn=kernel, num_programs=1)
    handle = engine.submit(launch)

    with pytest.raises(ZeroDivisionError, match="in program 0"):
        engine.wait(handle)
    assert handle.is_done


def test_a_limit_of_simulated_time_ends_a_kernel_that_never_ends() -> None:
    def kernel(_program: int, _env: KernelEnvironment) -> None:
        while True:
            park(1_000_000)

    engine = GraphEngine("default", time_limit=10**9)
    launch = KernelLaunch(sip=0, runner=OneFiberPerProgram(), kernel_fn=kernel, num_programs=1)

    with pytest.raises(TimeLimit):
        engine.wait(engine.submit(launch))


def test_only_handles_can_be_waited_for() -> None:
    with pytest.raises(LocalProtocolError, match="takes a handle"):
        GraphEngine("default").wait(cast("CommandHandle", "soon"))


def test_every_command_is_logged_with_its_times_place_and_operands() -> None:
    engine = GraphEngine("default")
    address = mapped(engine, 2, 64)
    engine.wait(engine.submit(MemoryWrite(sip=2, address=address, data=bytes(64), name="weights")))

    mapping, write = engine.op_log

    assert (mapping.kind, mapping.place, mapping.bytes) == ("MmuMap", "sip2", 0)
    assert (write.kind, write.name, write.start, write.bytes) == (
        "MemoryWrite", "weights", 500_000, 64,
    )  # fmt: skip
    assert write.end == engine.now
    assert write.writes == (Operand("hbm", "sip2", address, 64),)


LOGGED = """
import sys
from rankwise.sim import GraphEngine
from rankwise.sim.hardware import *
engine = GraphEngine("torus16")
size = 100_000
at = [engine.space(sip).reserve(size) for sip in range(16)]
for sip in range(16):
    engine.submit(MmuMap(sip=sip, address=at[sip], size=size, cube=sip % 4))
engine.run()
for sip in range(16):
    engine.submit(MemoryWrite(sip=sip, address=at[sip], data=bytes([sip]) * size))
    other = (sip * 7 + 3) % 16
    there = {"destination_sip": other, "destination": at[other]}
    engine.submit(Copy(sip=sip, address=at[sip], size=size, **there))
engine.run()
sys.stdout.buffer.write(engine.op_log.encode())
"""


def test_op_logs_of_two_runs_are_the_same_bytes_under_different_hash_seeds() -> None:
    logs = [
        subprocess.run(
            [sys.executable, "-c", LOGGED],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    ]

    assert logs[0] == logs[1]
    assert logs[0].count(b"\n") == 47


def test_memory_that_nobody_writes_costs_nothing() -> None:
    topology = load_topology("default")
    engine = GraphEngine(topology)
    space: AddressSpace = engine.space(0)
    address = mapped(engine, 0, 512 * MIB)

    assert not space.read(address + 300 * MIB, 64).any()
    assert not space.mapping_at(address).was_written


def test_a_handle_shows_its_command() -> None:
    engine = GraphEngine("default")
    handle: CommandHandle = engine.submit(MmuMap(sip=0, address=4_096, size=64, name="x"))

    assert repr(handle) == "<Handle 0: x on sip0>"


def test_places_that_do_not_add_up_are_refused() -> None:
    engine = GraphEngine("default")
    places = ((10, 0, 0), (20, 1, 0))

    with pytest.raises(BadAddress, match="its places have 30 bytes, not 31"):
        engine.wait(engine.submit(MmuMap(sip=0, address=4_096, size=31, places=places)))
