"""`rankwise` as a user meets it: a process with arguments, output and an exit code."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

PATIENCE_S = 100
RANKWISE = [sys.executable, "-m", "rankwise"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an environment without anything that rankwise reads."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("PET_", "TORCHELASTIC", "TORCH_ELASTIC")):
            monkeypatch.delenv(name)
    return tmp_path


def write(name: str, source: str) -> None:
    Path(name).write_text(source)


def rankwise(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RANKWISE, *words],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has said its first line."""
    with subprocess.Popen(
        [*RANKWISE, "run", "--no-prefix", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], PATIENCE_S)[0]
            yield process
        finally:
            process.kill()


def test_every_word_after_the_script_is_the_scripts(folder: Path) -> None:
    write("show.py", "import sys; print(sys.argv)")

    done = rankwise("run", "--no-prefix", "show.py", "--help", "--", "-m", "", "--nproc_per_node=2")

    assert done.stdout == "['show.py', '--help', '--', '-m', '', '--nproc_per_node=2']\n"
    assert done.returncode == 0


def test_torchruns_variables_and_abbreviations_work(folder: Path) -> None:
    write("show.py", "import os; print(os.environ['RANK'], os.environ['ROLE_NAME'])")

    done = rankwise("run", "--nproc=2", "--no-pre", "show.py", PET_ROLE="trainer", PET_NNODES="1")

    assert sorted(done.stdout.splitlines()) == ["0 trainer", "1 trainer"]
    assert done.stderr == (
        "rankwise: OMP_NUM_THREADS=1 for each of 2 workers, since it was not set\n"
    )


@pytest.mark.parametrize("options", [[], ["--start-method", "fork"], ["--run-path"]])
def test_scripts_run_by_every_method(folder: Path, options: list[str]) -> None:
    write("show.py", "import sys; print(__name__, sys.argv[1:]); sys.exit(5)")

    done = rankwise("run", "--quiet", "--no-prefix", *options, "show.py", "x")

    assert (done.stdout, done.returncode) == ("__main__ ['x']\n", 5)


def test_modules_and_programs_run(folder: Path) -> None:
    write("hello.py", "print('a module')")

    assert rankwise("run", "--no-prefix", "-m", "hello").stdout == "a module\n"
    assert rankwise("run", "--no-prefix", "--no-python", "echo", "-m").stdout == "-m\n"


@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_the_root_causes(folder: Path, end: str, code: int) -> None:
    write(
        "fail.py",
        f"import os, sys, threading\nif os.environ['RANK'] == '1': {end}\nthreading.Event().wait()",
    )
    done = rankwise("run", "--nproc-per-node", "2", "fail.py")

    assert done.returncode == code


def test_quiet_means_that_rankwise_says_nothing(folder: Path) -> None:
    write("fail.py", "raise SystemExit(3)")

    done = rankwise("run", "--quiet", "--nproc-per-node", "2", "fail.py")

    assert (done.stdout, done.stderr, done.returncode) == ("", "", 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_run_with_its_own_exit_code(folder: Path, number: int) -> None:
    write("wait.py", "import signal; print('here', flush=True); signal.pause()")

    with running("wait.py") as process:
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)

        assert process.returncode == 128 + number


def test_usage_errors_start_nothing(folder: Path) -> None:
    write("mark.py", "open('started', 'w')")

    done = rankwise("run", "--log-dir", "mark.py", "mark.py")

    assert done.returncode == 2
    assert done.stdout == ""
    (told,) = done.stderr.splitlines()
    assert told.startswith("rankwise run: error: --log-dir is mark.py")
    assert not (folder / "started").exists()


def test_a_log_directory_that_cannot_be_made_is_a_usage_error(folder: Path) -> None:
    write("mark.py", "open('started', 'w')")

    done = rankwise("run", "--log-dir", "/proc/logs", "mark.py")

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "started").exists()


def test_a_hang_has_an_exit_code_of_its_own(folder: Path) -> None:
    write("hang.py", "import threading\nthreading.Event().wait()")

    done = rankwise("run", "--nproc-per-node=2", "--hang-timeout=1s", "hang.py")

    assert done.returncode == 124
    assert "no progress for 1 s" in done.stderr


def test_a_running_gang_is_listed_and_shows_where_it_stands(folder: Path) -> None:
    write(
        "wait.py",
        "import threading\n"
        "def stand_here(): threading.Event().wait()\n"
        "print(1, flush=True)\n"
        "stand_here()",
    )
    name = f"test-{os.getpid()}-{os.urandom(4).hex()}"

    with running("--rdzv-id", name, "--nproc-per-node", "2", "wait.py") as process:
        (row,) = [
            row
            for row in map(json.loads, rankwise("ps", "--json").stdout.splitlines())
            if row["run_id"] == name
        ]
        assert (row["pid"], row["nproc"], row["program"]) == (process.pid, 2, "wait.py")

        stacks = rankwise("stacks", str(process.pid))
        assert stacks.returncode == 0
        assert len(re.findall(r'wait.py", line 2 in stand_here', stacks.stdout)) in (1, 2)
        assert "bootstrap.py" not in stacks.stdout
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def test_event_handlers_are_told_the_outcome(folder: Path) -> None:
    write("fail.py", "raise SystemExit(3)")

    done = rankwise("run", "--quiet", "--event-log-handler", "console", "fail.py")

    event = json.loads(done.stderr)
    assert event["name"] == "torchelastic.worker.status.FAILED"
    assert event["metadata"]["run_id"]
    assert done.returncode == 3


def test_log_specs_of_a_plug_in_decide_where_logs_go(folder: Path) -> None:
    write(
        "flat_logs.py",
        "import os\n"
        "from rankwise.compat.torch.elastic.multiprocessing import DefaultLogsSpecs, LogsDest\n"
        "class FlatLogs(DefaultLogsSpecs):\n"
        "    def reify(self, envs):\n"
        "        count = envs[0]['TORCHELASTIC_RESTART_COUNT']\n"
        "        none = dict.fromkeys(envs, '')\n"
        "        return LogsDest(\n"
        "            stdouts={r: f'{self.root_log_dir}/{count}-{r}' for r in envs},\n"
        "            stderrs=none, tee_stdouts=none, tee_stderrs=none, error_files=none)\n",
    )
    information = folder / "flat_logs-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: flat-logs\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        "[torchrun.logs_specs]\nflat = flat_logs:FlatLogs\n"
    )
    write("talk.py", "import os; print('rank', os.environ['RANK'])")

    done = rankwise(
        *("run", "--quiet", "--nproc-per-node", "2", "--logs-specs", "flat"),
        *("--log-dir", "logs", "--redirects", "1", "talk.py"),
        PYTHONPATH=str(folder),
    )

    assert (done.returncode, done.stdout) == (0, "")
    assert {path.name: path.read_text() for path in Path("logs").iterdir()} == {
        "0-0": "rank 0\n",
        "0-1": "rank 1\n",
    }


def test_help_takes_no_time_and_imports_nothing_heavy() -> None:
    source = (
        "import sys\n"
        "from rankwise.cli.main import invoke\n"
        "invoke(['--help']); invoke(['run', '--help'])\n"
        "assert sys.modules.keys().isdisjoint({'numpy', 'rich', 'msgspec', 'torch', 'logging'})\n"
    )
    subprocess.run(
        [sys.executable, "-c", source], check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S
    )


INTERRUPT_AT_IMPORT = """
import os, sys
def interrupt(event, details):
    if event == "import" and details[0] == os.environ["INTERRUPT_AT"]:
        os.kill(os.getpid(), 2)
sys.addaudithook(interrupt)
def interrupt_where_exceptions_are_dropped(frame, event, _):
    if frame.f_code.co_qualname == "_get_module_lock.<locals>.cb":  # called by a weak reference
        if os.environ["INTERRUPT_AT"] == "an unlocking" and "rankwise.cli.run_job" in sys.modules:
            sys.setprofile(None)
            os.kill(os.getpid(), 2)
sys.setprofile(interrupt_where_exceptions_are_dropped)
"""


@pytest.mark.parametrize(
    "module", ["rankwise.cli.main", "click", "msgspec", "rankwise.launch.run.job", "an unlocking"]
)
def test_interrupt_while_the_command_is_imported_prints_one_line(module: str, folder: Path) -> None:
    write("sitecustomize.py", INTERRUPT_AT_IMPORT)

    done = rankwise("run", "--no-python", "true", PYTHONPATH=str(folder), INTERRUPT_AT=module)

    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == "rankwise: stopped by SIGINT\n"


INTERRUPT_AT_CALL = """
import os, sys
def interrupt(frame, event, _):
    if frame.f_code.co_qualname == os.environ["INTERRUPT_AT"]:
        sys.setprofile(None)
        os.kill(os.getpid(), 2)
sys.setprofile(interrupt)
"""


@pytest.mark.parametrize(
    "function",
    ["simulate", "read_faults_of_run", "Rehearsal.__init__", "SimulatedRunHost.__init__"],
)
def test_an_interrupt_at_the_start_of_simulated_ranks_is_told_in_one_line(
    function: str, folder: Path
) -> None:
    write("sitecustomize.py", INTERRUPT_AT_CALL)
    write("train.py", "print('ran')")

    done = rankwise("run", "--on", "sim", "train.py", PYTHONPATH=str(folder), INTERRUPT_AT=function)

    assert done.returncode == 128 + signal.SIGINT
    assert (done.stdout, done.stderr) == ("", "rankwise: stopped by SIGINT\n")


def test_an_interrupt_that_comes_when_all_is_over_changes_nothing() -> None:
    source = (
        "import atexit, os, signal\n"
        "from rankwise.cli.main import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "main(['--version'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_beside_the_script_is_preloaded(folder: Path) -> None:
    Path("deep").mkdir()
    write("deep/beside.py", "import os\npid = os.getpid()")
    write("deep/train.py", "import beside, os\nassert beside.pid != os.getpid()")

    done = rankwise("run", "--start-method=fork", "--preload=beside", "deep/train.py")

    assert (done.returncode, done.stderr) == (0, "")


def test_a_limit_of_cpu_time_is_named_when_it_may_have_killed(folder: Path) -> None:
    write("busy.py", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    limited = [*RANKWISE, "run", "busy.py"]

    done = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -t 600 && exec "$@"', "sh", *limited],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert done.returncode == 137
    assert "ulimit -t" in done.stderr
    assert "colleague" not in done.stderr


# Python drops the one kind of output at once, and finds out about the other when it ends.
either_buffering = pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])


@either_buffering
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_a_closed_stream_changes_nothing_about_the_exit_code(
    folder: Path, closed: str, unbuffered: str
) -> None:
    write("seven.py", "import sys\nprint(sys.stdin.read())\nsys.exit(7)")

    assert under_shell(f"run --nproc-per-node 2 seven.py {closed}", unbuffered).returncode == 7
    assert under_shell(f"--version {closed}", unbuffered).returncode == 0
    assert under_shell(f"no-such-command {closed}", unbuffered).returncode == 2


@either_buffering
@pytest.mark.parametrize("words", ["--help", "--version", "ps", "run --help"])
def test_a_full_disk_behind_stdout_is_one_line(folder: Path, words: str, unbuffered: str) -> None:
    done = under_shell(f"{words} > /dev/full", unbuffered)

    assert done.returncode == 1
    assert done.stderr.endswith("the output cannot be written: No space left on device\n")
    assert done.stderr.count("\n") == 1
    assert under_shell(f"{words} > /dev/full 2>&1", unbuffered).returncode == 1


@either_buffering
@pytest.mark.parametrize("words", ["--version", "run --help", "ps", "completion bash"])
def test_a_reader_that_has_seen_enough_is_no_error(words: str, unbuffered: str) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)

    done = under_shell(words, unbuffered, stdout=write_fd)

    os.close(write_fd)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def under_shell(
    words: str, unbuffered: str, *, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """`rankwise` with redirections."""
    return subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -m rankwise {words}"],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
