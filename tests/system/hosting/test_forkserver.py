"""The fork server's workers look like fresh interpreters, and it refuses forks that would hang."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from hosted import PATIENCE, Hosted, all_ended, read_line, read_to_end

from rankwise.base import exception_pickle
from rankwise.launch.inside.function_payload import pack_function

pytestmark = pytest.mark.system


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[Hosted]:
    with Hosted("forkserver") as server:
        yield server


def script(folder: Path, text: str) -> tuple[str, str, list[str]]:
    (folder / "program.py").write_text(text)
    return ("script", "program.py", ["a", "-b"])


def call(server: Hosted, function: Any, *args: Any, **how: Any) -> tuple[int, str, Any]:
    """Run a function worker; return its exit code, its output, and what it sent back."""
    environment = {**os.environ, **how.pop("env", {})}
    payload = os.memfd_create("payload")
    os.write(payload, pack_function(function, args, **how))
    result, write_result = os.pipe()
    output, write_output = os.pipe()
    server.order(
        1,
        {
            1: write_output,
            2: write_output,
            "RANKWISE_PAYLOAD_FD": payload,
            "RANKWISE_RESULT_FD": write_result,
        },
        program=("function",),
        env=environment,
    )
    for fd in (payload, write_result, write_output):
        os.close(fd)
    frame = read_to_end(result)
    text = read_to_end(output).decode()
    code = server.wait_for("exited", 1)[2]
    assert len(frame) == 0 or int.from_bytes(frame[:4], "little") == len(frame) - 4
    return code, text, pickle.loads(frame[4:]) if frame else None


COMPARED = [
    "import sys; print(sorted(globals()), __file__, sys.argv, sys.path, sys.orig_argv)",
    "import os; print(os.getcwd(), sorted(os.environ.items()))",
    "from signal import getsignal; print([getsignal(number) for number in (2, 13, 15, 17)])",
    "import sys; sys.exit(3)",
    "import sys; sys.exit('sorry')",
    "import sys; sys.exit(-1)",
    "def f(): 1 / 0\nf()",
    "x = (",
    """
import atexit, threading
atexit.register(print, 'at exit')
body_is_over = threading.Event()
threading.Thread(target=lambda: (body_is_over.wait(), print('thread'))).start()
print('body')
body_is_over.set()
""",
    """
import atexit
class Failing:
    def __call__(self): 1 / 0
    def __repr__(self): return 'failing'
atexit.register(Failing())
""",
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "import sys; sys.stdout.write('out'); sys.stderr.write('err'); print(sys.stdin.read())",
    "import pickle\nclass Point: ...\nprint(pickle.loads(pickle.dumps(Point())).__class__)",
    "import sys; sys.excepthook = lambda *a: print('mine', a[0]); int('x')",
    "import sys; sys.excepthook = lambda *a: 1 / 0; int('x')",
    "import subprocess; print(subprocess.run(['cat'], input=b'x', capture_output=True).stdout)",
    """
import multiprocessing as mp
if __name__ == '__main__':
    with mp.get_context('spawn').Pool(1) as pool: print(pool.map(abs, [-1]))
""",
    "import __main__, sys; print(__main__ is sys.modules['__main__'], __name__)",
    "import sys; sys.stdout.close(); sys.stderr = None",
]


@pytest.mark.parametrize("text", COMPARED)
def test_a_forked_script_behaves_as_under_plain_python(
    server: Hosted, folder: Path, text: str
) -> None:
    program = script(folder, text)
    plain = subprocess.run(
        [sys.executable, "-u", "program.py", "a", "-b"],
        env=dict(os.environ),  # C code of pytest's has added more to the inherited one
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    with Path(os.devnull).open() as nothing:
        read_fd, write_fd = os.pipe()
        server.order(
            1, {0: nothing.fileno(), 1: write_fd, 2: write_fd}, program=program, cwd=str(folder)
        )
        os.close(write_fd)
    output = read_to_end(read_fd).decode()

    assert (server.wait_for("exited", 1)[2], output) == (plain.returncode, plain.stdout)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_fork_whose_last_output_is_lost_fails_as_plain_python_does(
    server: Hosted, folder: Path, name: str
) -> None:
    # What Python says about it is different in each of its versions.
    text = f"import sys; sys.{name} = open('/dev/full', 'w'); sys.{name}.write('lost'); sys.exit(7)"
    program = script(folder, text)
    plain = subprocess.run([sys.executable, "program.py"], stderr=subprocess.DEVNULL, check=False)
    with Path(os.devnull).open("r+") as nothing:
        fd = nothing.fileno()
        server.order(1, {0: fd, 1: fd, 2: fd}, program=program, cwd=str(folder))

    assert server.wait_for("exited", 1)[2] == plain.returncode == 120


def test_a_forked_module_behaves_as_with_m(server: Hosted, folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "tool.py").write_text(
        "from . import __name__ as p\nimport sys\n"
        "print(p, __spec__.name, sys.argv, sys.path[0], sys.orig_argv)\n1 / 0\n"
    )
    plain = subprocess.run(
        [sys.executable, "-u", "-m", "package.tool", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    code, text = server.output_of(1, program=("module", "package.tool", ["x"]), cwd=str(folder))

    assert (code, text) == (plain.returncode, plain.stdout)


def test_exceptions_are_reported_and_faulthandler_stands_by(server: Hosted, folder: Path) -> None:
    program = script(folder, "import os; print('RANKWISE_REPORT_FD' in os.environ); int('x')")
    read_fd, write_fd = os.pipe()
    with Path(os.devnull).open("w") as nothing:
        fds = {1: nothing.fileno(), 2: nothing.fileno(), "RANKWISE_REPORT_FD": write_fd}
        server.order(1, fds, program=program)
    os.close(write_fd)
    ready, error = [json.loads(line[1:]) for line in read_to_end(read_fd).decode().split("\n")[:2]]

    assert ready == {"kind": "ready", "pid": ANY}
    assert error["type"] == "ValueError"
    assert error["traceback"].startswith("Traceback (most recent call last):\n  File")
    assert "rankwise" not in error["traceback"]
    assert server.wait_for("exited", 1)[2] == 1


def test_a_worker_inherits_none_of_the_servers_descriptors(server: Hosted, folder: Path) -> None:
    program = script(folder, "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")

    code, text = server.output_of(1, program=program)

    assert (code, text) == (0, "[0, 1, 2, 3]\n"), "3 is the folder being listed"


def test_a_worker_may_differ_in_variables_from_the_others(server: Hosted, folder: Path) -> None:
    seen = "import os; print(*(os.environ.get(name) for name in ('COLOUR', 'TASTE', 'SIZE')))"
    program = script(folder, seen)
    server.send("environment", {**os.environ, "COLOUR": "blue", "TASTE": "sweet"})

    outputs = []
    for worker, changes in enumerate(
        [{}, {"TASTE": None, "SIZE": "L"}, {"COLOUR": "red"}], start=1
    ):
        read_fd, write_fd = os.pipe()
        order = {"program": program, "cwd": str(folder), "env": changes, "fds": [1]}
        server.send("spawn", worker, order, fds=[write_fd])
        os.close(write_fd)
        outputs.append(read_to_end(read_fd).decode().strip())

    assert outputs == ["blue sweet None", "blue None L", "red sweet None"]


def test_workers_differ_in_random_numbers_and_environment(folder: Path) -> None:
    with Hosted("forkserver", "random", "numpy.random") as server:
        program = script(
            folder,
            "import os, random, numpy\n"
            "print(random.random(), numpy.random.random())\n"
            "print(os.environ['RANK'], 'HOME' in os.environ)",
        )

        outputs = [
            server.output_of(rank, program=program, env={"RANK": str(rank)})[1].split()
            for rank in range(2)
        ]

    assert outputs[0][0] != outputs[1][0]
    assert outputs[0][1] != outputs[1][1]
    assert [output[2:] for output in outputs] == [["0", "False"], ["1", "False"]]


def test_preloaded_modules_are_there_and_failures_are_told(folder: Path) -> None:
    (folder / "exits.py").write_text("raise SystemExit(3)")
    (folder / "counted.py").write_text("print('imported', flush=True)")
    path = os.pathsep.join(sys.path)
    environment = {"RANKWISE_SYS_PATH": path}
    with Hosted(
        "forkserver", "json", "nowhere", "exits", "counted", environment=environment
    ) as server:
        assert server.details["failed"] == {
            "nowhere": "ModuleNotFoundError: No module named 'nowhere'",
            "exits": "SystemExit: 3",
        }
        program = script(
            folder,
            "import os, sys\nprint('json' in sys.modules, 'RANKWISE_SYS_PATH' in os.environ)\n"
            "import counted\nprint(counted.__file__)",
        )
        for worker in range(2):
            code, text = server.output_of(worker, program=program, cwd=str(folder))
            assert (code, text) == (0, f"True False\n{folder}/counted.py\n"), "not imported again"


def test_processes_that_an_import_starts_can_be_terminated(folder: Path) -> None:
    (folder / "helped.py").write_text(
        "import os, signal, subprocess\n"
        "helper = subprocess.Popen(['sleep', '1000'])\n"
        "helper.terminate()\n"
        "fork = os.fork()\n"
        "if not fork:\n"
        "    signal.pause()\n"
        "os.kill(fork, signal.SIGHUP)\n"
        "ends = [helper.wait(), os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])]\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]  # as the guardian does
    try:
        with Hosted("forkserver", "helped", environment={"PYTHONPATH": str(folder)}) as server:
            assert server.details["failed"] == {}
            code, text, ends = call(server, lambda: __import__("helped").ends)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

    assert (code, ends) == (0, ("ok", [-signal.SIGTERM, -signal.SIGHUP])), text


def test_functions_return_their_values(server: Hosted, folder: Path) -> None:
    (folder / "mine.py").write_text("def double(x): return [x] * 2\n")
    import mine  # type: ignore[import-not-found]  # noqa: PLC0415

    assert call(server, mine.double, 4) == (0, "", ("ok", [4, 4]))
    assert call(server, lambda: {"large": "x" * 1_000_000})[2] == ("ok", {"large": "x" * 1_000_000})
    assert call(server, lambda: None)[2] == ("ok", None)
    del sys.modules["mine"]


def test_functions_may_be_given_their_rank_and_arguments_of_their_own(server: Hosted) -> None:
    environment = {"RANKWISE_LOCAL_RANK": "1", "LOCAL_RANK": "0"}

    assert call(server, lambda *args: args, 7, env=environment, pass_rank=True)[2] == ("ok", (1, 7))
    payload = {0: ("zero",), 1: ("one",)}
    memfd = os.memfd_create("payload")
    os.write(memfd, pack_function(lambda *args: args, payload, arguments_by_rank=True))
    read_fd, write_fd = os.pipe()
    fds = {"RANKWISE_PAYLOAD_FD": memfd, "RANKWISE_RESULT_FD": write_fd}
    server.order(2, fds, program=("function",), env={**os.environ, **environment})
    os.close(write_fd)
    os.close(memfd)
    assert pickle.loads(read_to_end(read_fd)[4:]) == ("ok", ("one",))
    server.wait_for("exited", 2)


def test_functions_that_raise_send_their_exception(server: Hosted) -> None:
    def fail() -> None:
        raise KeyError("really", 3)

    code, text, (kind, load) = call(server, fail)

    assert (code, kind) == (1, "error")
    error = exception_pickle.loads(load)
    assert isinstance(error, KeyError)
    assert error.args == ("really", 3)
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("KeyError: ('really', 3)\n")
    assert "rankwise" not in text.replace(str(Path(__file__).parents[3]), "")


def test_exceptions_whose_class_cannot_be_called_again_arrive_all_the_same(server: Hosted) -> None:
    def fail() -> None:
        class Picky(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__(f"{one} and {two}")

        raise Picky(1, 2)

    code, text, (kind, load) = call(server, fail)

    assert (code, kind) == (1, "error")
    error = exception_pickle.loads(load)
    assert (type(error).__name__, str(error)) == ("Picky", "1 and 2")
    assert "Picky: 1 and 2" in text


def test_values_that_do_not_pickle_are_an_error_that_names_them(server: Hosted) -> None:
    def leak() -> object:
        import threading  # noqa: PLC0415

        return threading.Lock()

    code, text, (kind, load) = call(server, leak)

    assert (code, kind) == (1, "error")
    assert "leak returned a _thread.lock, which cannot be sent to the caller" in str(
        exception_pickle.loads(load)
    )
    assert "cannot pickle '_thread.lock' object" in text


def test_functions_may_exit(server: Hosted) -> None:
    assert call(server, sys.exit, 5) == (5, "", None)
    assert call(server, sys.exit) == (0, "", None)


def test_a_function_that_cannot_be_unpickled_says_so(server: Hosted, folder: Path) -> None:
    (folder / "fleeting.py").write_text("def f(): ...\n")
    import fleeting  # type: ignore[import-not-found]  # noqa: PLC0415

    (folder / "fleeting.py").unlink()
    code, text, (kind, load) = call(server, fleeting.f)
    del sys.modules["fleeting"]

    assert (code, kind) == (1, "error")
    assert isinstance(exception_pickle.loads(load), ModuleNotFoundError)
    assert "The worker could not unpickle f." in text


def test_python_threads_started_by_an_import_are_named_and_refused(folder: Path) -> None:
    (folder / "threaded.py").write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, name='busy-bee', daemon=True).start()\n"
    )
    environment = {"RANKWISE_SYS_PATH": os.pathsep.join(sys.path)}
    with Hosted("forkserver", "threaded", environment=environment) as server:
        assert server.details["threads"] == ["busy-bee"]

        server.order(1, program=("module", "this", []))
        kind, worker, message = server.next()

    assert (kind, worker) == ("refused", 1)
    assert "(busy-bee)" in message
    assert "preloaded: threaded" in message


def test_native_threads_that_came_later_are_refused(folder: Path) -> None:
    """A thread that starts another one after the imports, where Python does not see it."""
    (folder / "late.py").write_text(
        "import _thread, os, signal\n"
        "def late(*_):\n"
        "    import ctypes\n"
        "    libc = ctypes.CDLL(None)\n"
        "    thread = ctypes.c_ulong()\n"
        "    libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)\n"
        f"    open({str(folder / 'made')!r}, 'w').close()\n"
        "signal.signal(signal.SIGWINCH, late)\n"
    )
    os.mkfifo(folder / "made")
    environment = {"RANKWISE_SYS_PATH": os.pathsep.join(sys.path)}
    with Hosted("forkserver", "late", environment=environment) as server:
        assert server.run(1, program=("module", "late", []), cwd=str(folder)) == 0

        os.kill(server.pid, signal.SIGWINCH)
        assert (folder / "made").read_bytes() == b""  # comes to its end when the thread is there
        server.order(2, program=("module", "late", []), cwd=str(folder))
        kind, worker, message = server.next()

    assert (kind, worker) == ("refused", 2)
    assert "2 threads run in it, but 1 did right after its imports (preloaded: late)" in message


def test_impossible_orders_are_refused_and_it_goes_on(server: Hosted, folder: Path) -> None:
    program = script(folder, "print('fine')")
    server.order(1, program=program, cwd="/no/where")

    assert server.next() == (
        "refused",
        1,
        "working directory '/no/where': No such file or directory",
    )
    assert server.output_of(2, program=program) == (0, "fine\n")


def test_signals_reach_forked_workers_and_their_groups(server: Hosted, folder: Path) -> None:
    program = script(
        folder,
        "import subprocess, sys\n"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\nsys.stdin.read()",
    )
    gate, write_gate = os.pipe()
    read_fd, write_fd = os.pipe()
    server.order(1, {0: gate, 1: write_fd}, program=program)
    os.close(write_fd)
    child = os.pidfd_open(int(read_line(read_fd)))
    server.signal(1, signal.SIGTERM, group=True)

    assert server.wait_for("exited", 1)[2] == -signal.SIGTERM
    assert all_ended([child], PATIENCE)
    for fd in (gate, write_gate, read_fd):
        os.close(fd)


def test_workers_die_with_the_server_and_the_server_with_the_agent(folder: Path) -> None:
    sleeper = script(folder, "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()")
    for kill_it in (True, False):
        with Hosted("forkserver") as server:
            server.order(1, program=sleeper)
            worker = os.pidfd_open(server.wait_for("spawned", 1)[2])
            itself = os.pidfd_open(server.pid)
            if kill_it:
                os.kill(server.pid, signal.SIGKILL)
            else:
                server.socket.close()

            assert all_ended([worker, itself], PATIENCE)


@pytest.mark.torch
def test_workers_forked_from_an_imported_torch_compute(folder: Path) -> None:
    pytest.importorskip("torch")
    program = script(
        folder,
        "import sys, torch\n"
        "x = torch.ones(200, 200, requires_grad=True)\n"
        "(x @ x).sum().backward()\n"
        # One write, since the other worker writes to the same pipe.
        "sys.stdout.write(f'{int((x @ x).sum())} {int(x.grad.sum())}\\n')\n",
    )
    environment = {"OMP_NUM_THREADS": "1"}
    with Hosted("forkserver", "torch", environment=environment) as server:
        read_fd, write_fd = os.pipe()
        for worker in range(2):
            server.order(worker, {1: write_fd, 2: write_fd}, program=program, cwd=str(folder))
        os.close(write_fd)
        codes = [server.wait_for("exited")[2] for _ in range(2)]

    assert read_to_end(read_fd).decode() == "8000000 16000000\n" * 2
    assert codes == [0, 0]


@pytest.mark.torch
def test_workers_compute_though_an_import_has_computed_with_several_threads(folder: Path) -> None:
    pytest.importorskip("torch")
    (folder / "computes.py").write_text(
        "import torch\ntorch.set_num_threads(4)\ntotal = torch.ones(1 << 20).exp().sum()\n"
    )
    program = script(folder, "import computes\nprint(computes.torch.ones(1 << 20).exp().numel())")
    environment = {"RANKWISE_SYS_PATH": os.pathsep.join([str(folder), *sys.path])}
    with Hosted("forkserver", "computes", environment=environment) as server:
        code, text = server.output_of(1, program=program, cwd=str(folder))

    assert (code, text) == (0, f"{1 << 20}\n")
