"""`rankwise.run(…, on="sim")` with orders and faults: as `rankwise run --on sim` has them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankwise
from rankwise import collectives


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def append_in_turn() -> str:
    """Fail if rank 3 comes to a file before the others; else tell in which order they came."""
    if rankwise.rank() == 0:
        Path("lines").write_text("")
    collectives.barrier()
    with Path("lines").open("a") as file:
        file.write(str(rankwise.rank()))
    collectives.barrier()
    order = Path("lines").read_text()
    assert order[0] != "3", "rank 3 came first"
    return order


def reduce_thrice() -> float:
    return [float(collectives.all_reduce(np.ones(1))[0]) for _ in range(3)][-1]


def divide_by_rank() -> float:
    return 1 / rankwise.rank()


def notes_of(raised: "pytest.ExceptionInfo[rankwise.WorkersFailed]") -> list[str]:
    return getattr(raised.value, "__notes__", [])


def test_a_race_is_found_among_many_orders_and_its_order_runs_again() -> None:
    with pytest.raises(rankwise.WorkersFailed, match="rank 3 came first") as found:
        rankwise.run(append_in_turn, on="sim", explore=40)
    with pytest.raises(rankwise.WorkersFailed, match="rank 3 came first") as replayed:
        rankwise.run(append_in_turn, on="sim", replay=Path("rankwise-schedule-1.json"))

    again = "rankwise.run(…, replay='rankwise-schedule-1.json')"
    assert notes_of(found) == [f"the same order again: {again}"]
    assert notes_of(replayed) == []


def test_a_failure_that_does_not_come_again_is_a_failure(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def make_a_file() -> None:
        if not Path("made").exists():
            Path("made").open("x").close()

    with pytest.raises(rankwise.WorkersFailed, match="FileExistsError"):
        rankwise.run(make_a_file, on="sim", explore=20)

    assert "the failure did not repeat under the same schedule" in capfd.readouterr().err


def test_each_exploration_has_files_of_its_own() -> None:
    for _ in range(2):
        with pytest.raises(rankwise.WorkersFailed):
            rankwise.run(append_in_turn, on="sim", explore=25)

    files = sorted(path.name for path in Path().glob("rankwise-schedule-*.json"))
    assert files == [f"rankwise-schedule-{number}.json" for number in range(1, len(files) + 1)]
    assert len(files) > 1
    with pytest.raises(rankwise.ConfigError, match=r"append_in_turn on 4 ranks, and there are 3"):
        rankwise.run(append_in_turn, nprocs=3, on="sim", replay=files[0])


def test_results_are_those_of_the_last_order(capfd: pytest.CaptureFixture[str]) -> None:
    assert rankwise.run(reduce_thrice, nprocs=3, on="sim", explore=4) == [3.0] * 3
    assert "4 schedules, no two of them equal: none failed" in capfd.readouterr().err


def order_of(seed: int) -> str:
    try:
        return str(rankwise.run(append_in_turn, on="sim", schedule="random", seed=seed)[0])
    except rankwise.WorkersFailed as failed:
        return failed.__notes__[0]


def test_a_seed_draws_an_order_and_equal_seeds_equal_ones() -> None:
    orders = [order_of(seed) for seed in range(12)]

    assert orders == [order_of(seed) for seed in range(12)]
    assert len(set(orders)) > 1


def test_the_seed_of_a_run_that_fails_is_told() -> None:
    with pytest.raises(rankwise.WorkersFailed) as failed:
        rankwise.run(divide_by_rank, on="sim", schedule="random", seed=7)

    assert notes_of(failed)[0].endswith("rankwise.run(…, schedule='random', seed=7)")


def test_faults_strike_by_rank_and_operation() -> None:
    with pytest.raises(rankwise.WorkersFailed) as killed:
        rankwise.run(reduce_thrice, nprocs=3, on="sim", faults="kill:rank=1@collective=2")
    with pytest.raises(rankwise.WorkersFailed) as raised:
        rankwise.run(
            reduce_thrice,
            nprocs=3,
            on="sim",
            faults=["late:rank=0,by=5s", "raise:rank=2,error=OSError@collective=3"],
        )

    root = killed.value.failures[0]
    assert (root.rank, root.exit and root.exit.code) == (1, -9)
    assert isinstance(raised.value.exceptions[2], OSError)


@pytest.mark.torch
def test_a_function_for_cuda_runs_on_modelled_devices() -> None:
    def uses_a_device() -> bool:
        import torch  # noqa: PLC0415  # in the rank

        return torch.cuda.is_available() and torch.cuda.current_device() == 0

    assert rankwise.run(uses_a_device, nprocs=2, on="sim", device="cuda") == [True, True]
    assert rankwise.run(uses_a_device, nprocs=2, on="sim") == [False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed is -1, expected an integer of at least 0"),
        ({"seed": True}, "seed is True, expected"),
        ({"explore": 0}, "explore is 0, expected an integer of at least 1"),
        ({"schedule": "fifo"}, "schedule is 'fifo', expected queue or random"),
        ({"device": "gpu"}, "device is 'gpu', expected cpu or cuda"),
        ({"faults": 3}, "faults is 3, expected a string, or a list of them"),
        ({"faults": [b"kill"]}, "expected a string, or a list of them"),
        ({"faults": "kill:rank=4"}, "faults: names rank 4, and there are ranks 0 to 3"),
        ({"explore": 2, "replay": "a"}, "explore and replay exclude each other"),
        ({"replay": "absent.json"}, "absent.json cannot be read: No such file"),
    ],
)
def test_what_cannot_be_used_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(rankwise.ConfigError, match=message):
        rankwise.run(os.getpid, on="sim", **options)


@pytest.mark.parametrize(
    "options",
    [{"virtual_clock": True}, {"seed": 3}, {"faults": "kill:rank=1"}, {"device": "cuda"}],
)
def test_processes_have_none_of_it(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(rankwise.ConfigError, match=f"^{name} is .*only simulated ranks have one"):
        rankwise.run(os.getpid, **options)
