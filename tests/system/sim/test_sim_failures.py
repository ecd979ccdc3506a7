"""`rankwise sim` when things go wrong around it: one clear report, the right code, nothing left."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from running import Deaths

pytestmark = pytest.mark.system

PATIENCE_S = 100

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `rankwise sim` as a shell would, in a process group of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str, **options: object) -> "subprocess.Popen[str]":
        process = subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, "-m", "rankwise", "sim", *words],
            cwd=tmp_path,
            text=True,
            start_new_session=True,
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                **options,
            },
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with process:
            process.kill()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def program(folder: Path, source: str) -> str:
    (folder / "mine.py").write_text(source)
    return "mine.py"


ENDED_BY_SIGTERM = "rankwise sim: ended by SIGTERM before the run was over"


def fifo(folder: Path) -> Path:
    path = folder / "begun"
    os.mkfifo(path)
    return path


LOOPS = (
    "import os\n"
    "def run(torch, *, n=1):\n"
    "    with open('begun', 'w') as begun:\n"
    "        begun.write(f'{os.getpid()}\\n')\n"
    "    while True:\n"
    "        pass\n"
)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("whom", [os.kill, os.killpg])
def test_a_sweep_that_is_stopped_leaves_no_process(
    stop: signal.Signals, whom: Callable[[int, int], None], start: Start, tmp_path: Path
) -> None:
    begun = fifo(tmp_path)
    process = start("run", program(tmp_path, LOOPS), "--sweep", "n=1,2,3,4,5,6")
    with begun.open() as news:  # the first worker is in the program now
        worker = Deaths([int(news.readline())])

    whom(process.pid, stop)
    code, out, err = ended(process)

    assert worker.survivors(PATIENCE_S) == []
    assert code == (130 if stop == signal.SIGINT else -stop)
    assert out == ""
    told = "rankwise: interrupted: 0 of 6 cases are done"
    says = {signal.SIGTERM: ENDED_BY_SIGTERM, signal.SIGINT: told}
    assert err.strip() == says.get(stop, "")


def test_a_run_that_is_terminated_says_so(start: Start, tmp_path: Path) -> None:
    begun = fifo(tmp_path)
    process = start("run", program(tmp_path, LOOPS))
    begun.read_text()

    process.send_signal(signal.SIGTERM)

    assert ended(process) == (-signal.SIGTERM, "", f"{ENDED_BY_SIGTERM}\n")


def test_a_run_that_is_interrupted_ends_its_ranks(start: Start, tmp_path: Path) -> None:
    begun = fifo(tmp_path)
    source = (
        "def worker(rank, world_size, torch):\n"
        "    try:\n"
        "        torch.distributed.barrier()\n"  # now all have begun
        "        if rank == 1:\n"
        "            open('begun', 'w').close()\n"
        "        while True:\n"
        "            torch.distributed.barrier()\n"
        "    finally:\n"
        "        print('ended', rank, flush=True)\n"
    )
    process = start("run", program(tmp_path, source))
    begun.read_text()

    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)

    assert code == 130
    assert sorted(out.splitlines()) == [f"ended {rank}" for rank in range(4)]
    assert err.strip() == ""


def test_a_point_whose_process_dies_is_told_and_the_others_are_shown(
    start: Start, tmp_path: Path
) -> None:
    source = (
        "import os, signal, sys\n"
        "def run(torch, *, n=1):\n"
        "    torch.ones(n)\n"
        "    if n == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if n == 3: os._exit(7)\n"
        "    if n == 4: sys.exit(9)\n"
        "    if n == 5: raise ValueError('no luck')\n"
    )

    code, out, err = ended(start("run", program(tmp_path, source), "--sweep", "n=1,2,3,4,5,6"))

    assert code == 1
    assert [line.split()[0] for line in out.splitlines()] == ["n=1", "n=6"]
    told = dict(
        line.removeprefix("rankwise sim run: error: at ").split(": ", 1)
        for line in err.splitlines()
    )
    assert told["n=2"] == "its process was killed by SIGKILL, perhaps because memory ran out"
    assert told["n=3"] == "its process ended with exit code 7"
    assert told["n=4"].startswith("SystemExit: 9, at ")
    assert told["n=5"].startswith("ValueError: no luck, at ")
    assert told["n=5"].endswith("mine.py:7 in run")


def test_a_key_that_no_bench_has_is_refused_before_any_point_runs(start: Start) -> None:
    code, out, err = ended(start("bench", "ccl_allreduce", "--sweep", "elemnts=1,2,3"))

    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "has no parameter 'elemnts' (did you mean elements?)" in err


def test_what_many_points_fail_with_is_told_once(start: Start) -> None:
    words = ("--set", "n_slots=4096", "--sweep", "elements=1,2,3")

    code, _, err = ended(start("bench", "ccl_allreduce", *words))

    assert code == 1
    assert err.count("\n") == 1
    assert "at elements=1 and 2 more points: the defaults of collectives with " in err


def test_a_hundred_points_come_in_their_order(start: Start) -> None:
    sizes = list(range(1, 101))
    words = ("--sweep", f"elements={','.join(map(str, sizes))}", "--format", "json")

    code, out, err = ended(start("bench", "ccl_allreduce", "--set", "system.sips.count=2", *words))

    assert code == 0, err
    assert [int(row["elements"]) for row in json.loads(out)] == sizes


@pytest.mark.parametrize("option", ["--trace", "--report"])
def test_a_full_disk_leaves_what_was_there_and_nothing_else(
    option: str, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("before")
    # What happens when no byte more can be written, without having to fill a disk.
    limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (4_096, 4_096))
    # Python would leave the first 4,096 bytes of what it compiles, and take that for the whole.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}

    code, out, err = ended(
        start(
            "bench", "ccl_allreduce", option, "out",
            preexec_fn=limited, stderr=subprocess.PIPE, env=environment,
        )
    )  # fmt: skip

    assert code == 1
    assert "\nnumbers: equal to numpy's\n" in out
    assert err == "rankwise sim bench: error: 'out' cannot be written: File too large\n"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"out": "before"}


@pytest.mark.parametrize("style", ["table", "csv", "json"])
@pytest.mark.parametrize("more", [(), ("--sweep", "elements=1,2")])
def test_results_that_cannot_be_written_are_told(
    style: str, more: tuple[str, ...], start: Start
) -> None:
    with Path("/dev/full").open("w") as full:
        code, _, err = ended(start("bench", "ccl_allreduce", "--format", style, *more, stdout=full))

    assert code == 1
    assert (
        err == "rankwise sim bench: error: the output cannot be written: No space left on device\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trace", ""], "'' is the name of no file to write"),
        (["--trace", "."], "'.' is a directory"),
        (["--trace", "x", "--report", "x"], "are both 'x', and would overwrite each other"),
        (["--sweep", "elements=1", "--trace", ""], "--sweep makes several"),
    ],
)
def test_outputs_that_cannot_be_meant_are_refused_before_the_run(
    words: list[str], message: str, start: Start
) -> None:
    code, out, err = ended(start("bench", "ccl_allreduce", *words))

    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_two_runs_at_once_in_one_folder_do_not_meet(start: Start, tmp_path: Path) -> None:
    words = ("bench", "ccl_allreduce", "--trace", "t.json", "--report", "r.html")
    both = [start(*words), start(*words)]

    results = [ended(process) for process in both]

    assert results[0] == results[1]
    assert results[0][0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "t.json"]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_failure_is_told_as_of_ranks_that_are_processes(start: Start, tmp_path: Path) -> None:
    fails = "if rank == 1:\n        raise ValueError('bad shape')\n    "
    simulated = f"def worker(rank, world_size, torch):\n    {fails}torch.distributed.barrier()\n"
    real = f"def worker(rank):\n    {fails}time.sleep(60)\n"
    real = f"import os, time\n{real}worker(int(os.environ['RANK']))\n"

    code, _, err = ended(start("run", program(tmp_path, simulated)))
    done = subprocess.run(
        [sys.executable, "-m", "rankwise", "run", "--nproc-per-node=4", program(tmp_path, real)],
        capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_S, check=False,
    )  # fmt: skip

    assert code == done.returncode == 1
    assert _report(err) == _report(done.stderr)
    assert 'File "mine.py", line 3, in worker' in err


def _report(err: str) -> str:
    """A failure report to its traceback, without what belongs to one run, or to processes."""
    shown = err[err.index("mine.py failed after ") : err.index("    Traceback (")]
    return re.sub(
        r"after \S+ \w+( of virtual time)?| \(run .*\)|  (host|pid|time): .*\n", "", shown
    )


def test_a_deadlock_of_the_machine_is_told_with_all_that_waits_and_has_its_files(
    start: Start, tmp_path: Path
) -> None:
    source = (
        "import rankwise.sim.triton.language as tl\n"
        "def take(lock):\n"
        "    while tl.atomic_cas(lock, 0, 1) == 1: pass\n"
        "def worker(rank, world_size, torch):\n"
        "    torch.launch(take, 1, torch.ones(1, dtype='i32'))\n"
    )
    words = ("--trace", "t.json", "--report", "r.html")

    code, _, err = ended(start("run", program(tmp_path, source), *words))

    assert code == 124
    assert "root cause: the gang hung: deadlock at instant " in err
    assert "waits for memory to change: tensor0[0] at 0x10000000 holds 1" in err
    assert "  ranks 0-3, innermost call first:\n" in err
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "root cause: the gang hung" in (tmp_path / "r.html").read_text()


def test_ranks_that_fail_in_different_ways_have_a_line_each(start: Start, tmp_path: Path) -> None:
    source = (
        "def worker(rank, world_size, torch):\n"
        "    torch.zeros(-rank - 1 if rank < 2 else 1)\n"
        "    torch.distributed.barrier()\n"
    )

    code, _, err = ended(start("run", program(tmp_path, source)))

    assert code == 1
    told = "failed: LocalProtocolError: a tensor's shape is"
    summary, other, stopped, root, *_ = err.splitlines()
    assert summary == "mine.py failed after 0 us of virtual time: 2 of 4 ranks failed"
    assert other == f"  rank 1 {told} (-2,), expected no negative length"
    assert stopped == "  ranks 2-3 ended after the request to stop (SIGTERM)"
    assert root == f"root cause: rank 0 {told} (-1,), expected no negative length"
    assert err.count("Traceback") == 1


def test_the_rank_that_left_is_told_before_the_rank_that_lost_it(
    start: Start, tmp_path: Path
) -> None:
    source = (
        "import sys\n"
        "def worker(rank, world_size, torch):\n"
        "    if rank == 0:\n"
        "        raise ConnectionResetError('connection reset by peer')\n"
        "    if rank == 2:\n"
        "        sys.exit(3)\n"
        "    torch.distributed.barrier()\n"
    )

    code, _, err = ended(start("run", program(tmp_path, source)))

    consequence = "(a consequence: its peer was gone)"
    assert code == 3
    assert err.splitlines()[1:4] == [
        f"  rank 0 failed: ConnectionResetError: connection reset by peer {consequence}",
        "  ranks 1, 3 ended after the request to stop (SIGTERM)",
        "root cause: rank 2 exited with code 3",
    ]


KERNEL = (
    "import rankwise.sim.triton.language as tl\n"
    "def kernel(x, n: tl.constexpr):\n"
    "    {body}\n"
    "def run(torch):\n"
    "    torch.launch(kernel, 2, torch.ones(8), 16)\n"
)
RANKS = "def worker(rank, world_size, torch):\n    x = torch.ones(4)\n    {body}\n"
DIFFERING = (
    "torch.distributed.all_reduce("
    "x, torch.distributed.ReduceOp.MAX if rank else torch.distributed.ReduceOp.SUM)"
)
MISTAKES = {
    "memory": (
        "def run(torch):\n    torch.empty(1 << 40)\n",
        r"hbm0 is full: 137,438,953,472 bytes wanted, .* at mine\.py:2 in run",
    ),
    "out of bounds": (
        KERNEL.format(body="tl.load(x + tl.arange(0, n))"),
        r'kernel "kernel" \(mine\.py:3\), program \(0, 0, 0\): load of element 8, at \[8\] of',
    ),
    "a kernel without end": (
        KERNEL.format(body="while True: pass"),
        r"still ran after 3 s of real time, at mine\.py:3 in kernel",
    ),
    "what tensors lack": (
        "def run(torch):\n    torch.ones(4).cumsum()\n",
        r"a simulated tensor has no 'cumsum': launch a kernel",
    ),
    "a shape": ("def run(torch):\n    torch.zeros(1.5)\n", r"a shape is whole numbers, not"),
    "no tensor": (
        RANKS.format(body="torch.distributed.all_reduce([1])"),
        r"on ranks 1-3\nroot cause: .* all_reduce takes tensors, not \[1\]\n(.*\n)+.*py., line 3",
    ),
    "reductions that differ": (
        RANKS.format(body=DIFFERING),
        r"cause: call #1: rank 0 called all_reduce of .*, ranks 1-3 called all_reduce \(max\) of",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_its_line_and_code_one(
    mistake: str, start: Start, tmp_path: Path
) -> None:
    source, message = MISTAKES[mistake]
    limit = "real:3s" if mistake == "a kernel without end" else "real:90s"

    code, _, err = ended(start("run", program(tmp_path, source), "--max-time", limit))

    assert code == (124 if mistake == "a kernel without end" else 1)
    assert re.search(message, err), err
    assert "/rankwise/" not in err


@pytest.mark.parametrize(
    "begin", ["async def run(torch):\n    pass\n", "def run(torch):\n    yield\n"]
)
def test_an_entry_that_nobody_would_carry_out_is_refused(
    begin: str, start: Start, tmp_path: Path
) -> None:
    code, _, err = ended(start("run", program(tmp_path, begin)))

    assert code == 2
    assert "run is a coroutine or a generator" in err


def test_code_at_the_top_of_a_program_is_limited_too(start: Start, tmp_path: Path) -> None:
    source = "while True:\n    pass\ndef run(torch): pass\n"

    code, _, err = ended(start("run", program(tmp_path, source), "--max-time", "real:3s"))

    assert code == 124
    assert "still ran after 3 s of real time, at mine.py:" in err
    assert "needs a larger --max-time real:" in err
