"""`--explore`, `--schedule random`, `--replay`: a race that is rare is found, and found again."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from preloaded import Preloaded
from running import Finished, run, write_program

FAULTY = Path(__file__).parents[2] / "conformance" / "rehearsal" / "faulty"


def simulate(
    program: str | Path,
    folder: Path,
    *options: str,
    nprocs: int = 4,
    run: Callable[..., Finished] = run,
) -> Finished:
    return run(
        "run", "--on", "sim", f"--nproc-per-node={nprocs}", *options, str(program), cwd=folder
    )


def commands(finished: Finished) -> list[str]:
    """The commands that a run says to replay it with."""
    lines = finished.stderr.splitlines()
    return [line.partition("again: ")[2] for line in lines if "again: " in line]


def causes(finished: Finished) -> list[str]:
    return [line for line in finished.stderr.splitlines() if line.startswith("root cause")]


def test_a_race_through_a_file_is_found_and_replayed(tmp_path: Path) -> None:
    program = FAULTY / "file_race.py"

    usual = simulate(program, tmp_path)
    explored = simulate(program, tmp_path, "--explore=300")
    replayed = run(*shlex.split(commands(explored)[0])[1:], cwd=tmp_path)

    assert usual.code == 0, usual.stderr
    assert explored.code == 1, explored.stderr
    assert "the ranks came in the order 3, 2, 1, 0; again: rankwise run" in explored.stderr
    assert "300 schedules, no two of them equal: " in explored.stderr
    assert causes(replayed) == causes(explored) != []


def test_exploring_again_finds_the_same(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first, second = (
        simulate(FAULTY / "file_race.py", folder, "--explore=200", "--seed=5")
        for folder in (tmp_path, tmp_path_factory.mktemp("again"))
    )

    assert commands(first) == commands(second) != []
    assert causes(first) == causes(second)


@pytest.mark.torch
def test_every_way_to_match_a_receive_from_any_source_is_tried_first(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    program = FAULTY / "wildcard_race.py"

    usual = simulate(program, tmp_path, run=preloaded.run)
    few = simulate(program, tmp_path, "--explore=5", run=preloaded.run)
    six = simulate(program, tmp_path, "--explore=6", run=preloaded.run)
    replayed = preloaded.run(*shlex.split(commands(six)[0])[1:], cwd=tmp_path)

    assert (usual.code, few.code, six.code) == (0, 0, 1), six.stderr
    assert "5 schedules, no two of them equal: none failed" in few.stderr
    assert "schedule 6 failed: rank 0: AssertionError: the parts came in the" in six.stderr
    assert causes(replayed) == causes(six)


ORDER = (
    "import rankwise\nfrom rankwise import collectives\n"
    "from pathlib import Path\n"
    "with Path('order').open('a') as file: file.write(str(rankwise.rank()))\n"
    "collectives.barrier()\n"
    "order = Path('order').read_text()\n"
    "collectives.barrier()\n"
    "assert order == '0123', order\n"
)


def test_a_seed_gives_an_order_and_the_command_that_gives_it_again(tmp_path: Path) -> None:
    program = write_program(tmp_path, ORDER)
    found = []
    for seed in range(3):
        (tmp_path / "order").unlink(missing_ok=True)
        finished = simulate(program, tmp_path, "--schedule=random", f"--seed={seed}")
        found.append(causes(finished))
        (tmp_path / "order").unlink()
        if found[-1]:
            again = run(*shlex.split(commands(finished)[0])[1:], cwd=tmp_path)
            assert causes(again) == found[-1]

    assert len({tuple(each) for each in found}) > 1


def test_a_program_with_few_orders_is_told_to_have_no_others(tmp_path: Path) -> None:
    program = write_program(tmp_path, "import rankwise\nrankwise.collectives.barrier()\n")

    finished = simulate(program, tmp_path, "--explore=500", nprocs=2)

    assert finished.code == 0
    assert "rankwise: all " in finished.stderr
    assert "schedules, no two of them equal: none failed" in finished.stderr


def test_a_schedule_of_another_program_is_told(tmp_path: Path) -> None:
    program = write_program(tmp_path, "import rankwise\nrankwise.collectives.barrier()\n")
    (tmp_path / "schedule.json").write_text(json.dumps({"choices": [3, 3, 3, 3, 3, 3]}))

    finished = simulate(program, tmp_path, "--replay=schedule.json", nprocs=2)

    assert finished.code == 0
    assert "the program has changed: it did not follow the schedule to its end" in finished.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on=sim", "--explore=3", "--replay=x"], "--explore and --replay exclude each other"),
        (["--on=sim", "--replay=nothing"], "the schedule nothing cannot be read: No such file"),
        (["--on=sim", "--replay=program.py"], "program.py is not a schedule that --explore has"),
        (["--explore=3"], "--explore is for simulated ranks"),
        (["--on=sim", "--explore=0"], "--explore"),
    ],
)
def test_what_cannot_be_explored_is_refused(
    options: list[str], message: str, tmp_path: Path
) -> None:
    finished = run("run", *options, write_program(tmp_path, ""), cwd=tmp_path)

    assert finished.code == 2
    assert message in finished.stderr


def test_an_exploration_that_is_stopped_says_how_far_it_has_come(tmp_path: Path) -> None:
    program = write_program(tmp_path, "import os\nos.read(os.pipe()[0], 1)")

    stopped = simulate(program, tmp_path, "--explore=300", "--timeout=500ms", nprocs=2)

    assert stopped.code == 124
    assert (
        "rankwise: stopped by its time limit of 500 ms in schedule 1; before that none failed\n"
        in stopped.stderr
    )
