"""`rankwise.run` returns what functions return, whoever calls it and however they came about."""

import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from leftovers import open_files
from running import run_program

import rankwise
from rankwise.launch.run.job import StartMethodName

pytestmark = pytest.mark.system

METHODS = ("spawn", "forkserver")


@pytest.mark.parametrize("method", METHODS)
def test_results_come_by_rank(method: StartMethodName) -> None:
    results = rankwise.run(
        lambda base: (base + rankwise.rank(), rankwise.world_size()),
        (10,),
        nprocs=3,
        start_method=method,
    )

    assert results == [(10, 3), (11, 3), (12, 3)]


def test_an_importable_function_travels_by_name() -> None:
    assert rankwise.run(math.sqrt, (9.0,), nprocs=2) == [3.0, 3.0]


def test_a_closure_takes_along_what_it_closes_over(server: rankwise.ForkServer) -> None:
    def make(factor: int) -> Callable[[int], int]:
        return lambda number: factor * number + rankwise.local_rank()

    assert rankwise.run(make(3), (5,), nprocs=2, server=server) == [15, 16]


@pytest.mark.parametrize("names", [{}, {"__name__": "__main__"}, {"__name__": "notebook"}])
def test_a_function_of_a_notebook_works(names: dict[str, Any], server: rankwise.ForkServer) -> None:
    namespace = dict(names)
    exec(
        "import math\n"
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "def helper(x): return math.floor(x)\n"
        "def cell(x): return helper(x) + Point(1).x\n",
        namespace,
    )

    assert rankwise.run(namespace["cell"], (4.5,), nprocs=2, server=server) == [5, 5]


def test_functions_and_classes_of_a_script_work(tmp_path: Path) -> None:
    done = run_program(
        """
import dataclasses
import rankwise

@dataclasses.dataclass
class Answer:
    number: int

def helper():
    return rankwise.rank()

def work(factor):
    return Answer(factor * helper())

for method in ("spawn", "forkserver"):
    print(rankwise.run(work, (2,), nprocs=2, start_method=method))
""",
        tmp_path,
    )

    assert done.lines == ["[Answer(number=0), Answer(number=2)]"] * 2, done.stderr
    assert done.code == 0


def test_a_function_of_a_module_beside_the_script_works(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def work():\n    return __name__\n")

    done = run_program(
        "import beside, rankwise\nprint(rankwise.run(beside.work, nprocs=1))", tmp_path
    )

    assert done.lines == ["['beside']"], done.stderr


def test_huge_results_arrive_whole(server: rankwise.ForkServer) -> None:
    size = 50_000_000

    results = rankwise.run(lambda: bytes([rankwise.rank()]) * size, nprocs=2, server=server)

    assert [len(result) for result in results] == [size, size]
    assert all(result.count(rank) == size for rank, result in enumerate(results))


def test_huge_arguments_arrive_whole(server: rankwise.ForkServer) -> None:
    data = b"x" * 20_000_000

    assert rankwise.run(len, (data,), nprocs=2, server=server) == [len(data)] * 2


def test_a_rank_that_exits_as_a_success_has_no_result(server: rankwise.ForkServer) -> None:
    def leave() -> str:
        if rankwise.rank() == 1:
            sys.exit()
        if rankwise.rank() == 2:
            os._exit(0)
        return "stayed"

    assert rankwise.run(leave, nprocs=3, server=server) == ["stayed", None, None]


def test_environment_directory_and_arguments_are_the_callers(
    server: rankwise.ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_BEFORE", "yes")

    def look() -> tuple[str, str | None, str | None]:
        return str(Path.cwd()), os.environ.get("SET_BEFORE"), os.environ.get("ADDED")

    results = rankwise.run(look, nprocs=1, server=server, env={"ADDED": "too"})

    assert results == [(str(tmp_path), "yes", "too")]


def test_a_preload_that_fails_in_a_warm_server_is_told_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with rankwise.ForkServer(preload=["not_to_be_found", "json"]) as server:
        assert rankwise.run(rankwise.rank, nprocs=1, server=server) == [0]
        told = capfd.readouterr().err
        assert rankwise.run(rankwise.rank, nprocs=1, server=server) == [0]

    assert told == (
        "rankwise: the fork server could not import not_to_be_found: ModuleNotFoundError: No "
        "module named 'not_to_be_found'\n"
    )
    assert capfd.readouterr().err == ""


def test_it_works_in_a_thread(server: rankwise.ForkServer) -> None:
    results: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: results.append(rankwise.run(rankwise.rank, nprocs=2, server=server))
    )
    thread.start()
    thread.join()

    assert results == [[0, 1]]


def test_two_threads_run_gangs_at_once(tmp_path: Path) -> None:
    for rank in range(2):
        os.mkfifo(tmp_path / str(rank))
    directory = str(tmp_path)
    results: dict[str, list[str]] = {}

    def meet(mode: str) -> str:
        # Opens as soon as the other gang's worker opens it the other way.
        with Path(directory, str(rankwise.rank())).open(mode):
            return f"{mode}{rankwise.rank()}"

    def work(mode: str) -> None:
        results[mode] = rankwise.run(meet, (mode,), nprocs=2)

    threads = [threading.Thread(target=work, args=(mode,)) for mode in "rw"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == {"r": ["r0", "r1"], "w": ["w0", "w1"]}


def test_a_warm_server_serves_one_gang_at_a_time(
    server: rankwise.ForkServer, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def wait_for_the_other() -> str:
        return fifo.read_text()

    results: list[list[str]] = []
    thread = threading.Thread(
        target=lambda: results.append(rankwise.run(wait_for_the_other, nprocs=1, server=server))
    )
    thread.start()
    with fifo.open("w") as file:  # opens when the worker reads: the gang is running
        with pytest.raises(rankwise.RankwiseError, match="is running another gang"):
            rankwise.run(rankwise.rank, nprocs=1, server=server)
        file.write("done")
    thread.join()

    assert results == [["done"]]


def test_signal_handlers_are_as_before_after_a_success(server: rankwise.ForkServer) -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    own: list[Any] = [lambda *_: None, signal.SIG_DFL, signal.SIG_IGN, signal.SIG_DFL]
    before = [signal.signal(*pair) for pair in zip(signals, own, strict=True)]
    try:
        rankwise.run(rankwise.rank, nprocs=1, server=server)
        after = [signal.getsignal(number) for number in signals]
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)

    assert after == own
    assert signal.set_wakeup_fd(-1) == -1


def test_a_worker_may_itself_run_gangs(tmp_path: Path) -> None:
    def outer() -> list[tuple[int, int]]:
        inner = rankwise.run(rankwise.world_size, nprocs=2)
        return [(rankwise.rank(), number) for number in inner]

    assert rankwise.run(outer, nprocs=2) == [[(0, 2), (0, 2)], [(1, 2), (1, 2)]]


def test_nothing_stays_open(server: rankwise.ForkServer) -> None:
    rankwise.run(rankwise.rank, nprocs=2, server=server)
    before = open_files()

    rankwise.run(rankwise.rank, nprocs=2, server=server)
    rankwise.run(rankwise.rank, nprocs=2)

    assert open_files() <= before


def test_no_child_stays_behind(tmp_path: Path) -> None:
    done = run_program(
        """
import os, rankwise
rankwise.run(rankwise.rank, nprocs=2)
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no children")
""",
        tmp_path,
    )

    assert done.lines == ["no children"], done.stderr


def test_output_of_ranks_is_shown_with_their_numbers(
    server: rankwise.ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    rankwise.run(lambda: print("hello"), nprocs=2, server=server)

    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank0]:hello", "[rank1]:hello"]


WRONG_ARGUMENTS: dict[str, dict[str, Any]] = {
    "nprocs is 0, expected 1 or more workers": {"nprocs": 0},
    "start_method is 'thread', expected": {"start_method": "thread"},
    "max_restarts is -1, expected 0 or more": {"max_restarts": -1},
    "hang_timeout is 0, expected more than 0 seconds": {"hang_timeout": 0},
    "tee is '7'": {"tee": "7"},
}


@pytest.mark.parametrize("told", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_told(told: str) -> None:
    with pytest.raises(rankwise.ConfigError) as caught:
        rankwise.run(rankwise.rank, **WRONG_ARGUMENTS[told])

    assert told in str(caught.value)


def test_arguments_may_be_given_by_name(server: rankwise.ForkServer) -> None:
    def told(one: int, *, two: str) -> tuple[int, str, int]:
        return one, two, rankwise.rank()

    assert rankwise.run(told, (1,), nprocs=2, kwargs={"two": "2"}, server=server) == [
        (1, "2", 0),
        (1, "2", 1),
    ]


@pytest.mark.parametrize("kwargs", [[("two", 2)], {2: "two"}, "two"])
def test_what_is_no_mapping_of_names_is_refused(kwargs: Any) -> None:
    with pytest.raises(rankwise.ConfigError, match=r"kwargs is .*, expected a mapping"):
        rankwise.run(rankwise.rank, kwargs=kwargs, nprocs=1)


def test_async_functions_are_refused_before_anything_starts() -> None:
    async def work() -> None: ...

    with pytest.raises(rankwise.ConfigError, match=r"work is an async function.*asyncio\.run"):
        rankwise.run(work, nprocs=1)
    with pytest.raises(rankwise.ConfigError, match="is an async function"):
        rankwise.spawn(work, nprocs=1)  # type: ignore[arg-type]


def test_an_argument_that_cannot_travel_is_named() -> None:
    with pytest.raises(rankwise.ConfigError, match=r"argument 1 of rank .*lock"):
        rankwise.run(rankwise.rank, (1, threading.Lock()), nprocs=1)  # type: ignore[arg-type]


def test_large_results_come_whole(server: rankwise.ForkServer) -> None:
    size = 20_000_001

    results = rankwise.run(lambda: bytes([int(os.environ["RANK"])]) * size, nprocs=2, server=server)

    assert results == [b"\0" * size, b"\1" * size]
