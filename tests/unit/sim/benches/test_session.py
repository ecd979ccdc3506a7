"""Settings: where fields go, what is refused before anything runs, limits."""

import os
from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError, TimeLimit
from rankwise.sim import SpawnException
from rankwise.sim.benches.session import BenchSession, BenchSettings, measure_or_tell, simulate


def program(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return str(path)


def test_fields_find_their_place_by_their_names() -> None:
    fields = {"system.sips.count": "2", "n_slots": "8", "elements": "512"}

    session = BenchSession(BenchSettings(program="ccl_allreduce", fields=fields))
    (result,) = session.run().results

    assert session.engine.topology.sip_count == 2
    assert "2 ranks x 512" in result.case


def test_fields_of_an_algorithm_are_set_under_ccl() -> None:
    fields = {"ccl.algorithms.ring_allreduce_tcm.n_elem": "16", "algorithm": "ring_allreduce_tcm"}

    (result,) = simulate(BenchSettings(program="ccl_allreduce", fields=fields)).results

    assert f"x {16 * 32}" in result.case


def test_a_file_of_collectives_and_single_fields_go_together() -> None:
    read, write = os.pipe()  # which can be read once
    os.write(write, b"defaults: {world_size: 2, algorithm: tree_allreduce}\n")
    os.close(write)
    settings = BenchSettings(program="ccl_allreduce", ccl=f"/dev/fd/{read}", fields={"n_elem": "4"})

    (result,) = simulate(settings).results
    os.close(read)

    assert result.case == "tree_allreduce, 2 ranks x 128 f16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"system.sips.cont": "3"}, "system.sips.cont: there is no such field; did you mean count"),
        ({"slot_size": "1000"}, "is not a multiple of vc_chunk_size"),
        ({"algorithm": "nope"}, "no algorithm is called 'nope'"),
        ({"system.name.x": "1"}, "name is a value and has no fields"),
        ({"n_slots": "[1"}, "is not YAML"),
        (
            {"n_slots": "x"},
            r"the defaults of collectives with defaults.n_slots=x: defaults.n_slots",
        ),
        (
            {"system.sips.count": "x"},
            r"^default with system.sips.count=x: system.sips.count: expec",
        ),
    ],
)
def test_a_field_that_cannot_be_used_is_refused_before_anything_runs(
    fields: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchSession(BenchSettings(program="ccl_allreduce", fields=fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"mm": "3"}, "did you mean m"), ({"m": "large"}, "parameter m of gemm is 'large'")],
)
def test_a_parameter_that_cannot_be_used_is_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(BenchSettings(program="gemm", fields=fields))


def test_a_program_of_ranks_is_run_once_per_sip_with_its_parameters(tmp_path: Path) -> None:
    path = program(
        tmp_path,
        "seen = []\n"
        "def worker(rank, world_size, torch, *, size=1, loud=False):\n"
        "    seen.append((rank, world_size, torch.ones(size).numel(), loud))\n"
        "    if rank == world_size - 1:\n"
        "        raise RuntimeError(repr(seen))\n",
    )
    settings = BenchSettings(program=path, is_file=True, fields={"size": "5", "loud": "yes"})

    with pytest.raises(SpawnException) as failed:
        simulate(settings)

    seen = [(rank, 4, 5, True) for rank in range(4)]
    assert str(failed.value.errors[3]) == repr(seen)


def test_a_program_without_an_entry_is_refused(tmp_path: Path) -> None:
    path = program(tmp_path, "x = 1\n")

    with pytest.raises(ConfigError, match="neither run"):
        BenchSession(BenchSettings(program=path, is_file=True))


def test_a_rank_that_loops_for_ever_is_interrupted_where_it_is(tmp_path: Path) -> None:
    path = program(
        tmp_path,
        "def worker(rank, world_size, torch):\n    while True:\n        pass\n",
    )

    with pytest.raises(TimeLimit, match=r"rank 0 still ran .*mine\.py:[23] .*--max-time"):
        simulate(BenchSettings(program=path, is_file=True, real_limit_s=0.2))


def test_simulated_time_can_be_limited() -> None:
    with pytest.raises(
        TimeLimit, match=r"exceeds its limit of 5 us: the next event is at [0-9.]+ us"
    ):
        simulate(BenchSettings(program="ccl_allreduce", virtual_limit_ps=5_000_000))


def test_a_failure_of_one_point_of_a_sweep_is_a_value() -> None:
    outcome = measure_or_tell(BenchSettings(program="gemm", fields={"m": "large"}))

    assert outcome.results == []
    assert "parameter m" in outcome.failure


def test_the_seed_decides_the_values_and_nothing_else() -> None:
    first, second = (
        simulate(BenchSettings(program="softmax", fields={"rows": "4"}, seed=seed))
        for seed in (1, 2)
    )

    assert first.results == second.results
    assert first.engine.op_log.encode() == second.engine.op_log.encode()
