"""Every kind of program runs under every start method, and finds what torchrun would give it."""

import stat
import sys
from pathlib import Path

import pytest
from running import plain, run, write_program

pytestmark = pytest.mark.system

START_METHODS = ("subprocess", "spawn", "forkserver")

PROGRAM = """
import os, sys
print(os.environ["RANK"], os.environ["WORLD_SIZE"], __name__, *sys.argv[1:])
"""


@pytest.mark.parametrize("method", START_METHODS)
def test_a_script_runs_as_main_on_every_rank(method: str, tmp_path: Path) -> None:
    script = write_program(tmp_path, PROGRAM)

    done = run("run", "--nproc-per-node=2", "--start-method", method, script, "a", "-x")

    assert plain(done.lines) == ["0 2 __main__ a -x", "1 2 __main__ a -x"]
    assert done.code == 0


@pytest.mark.parametrize("method", START_METHODS)
def test_a_module_runs_as_main_on_every_rank(method: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    write_program(tmp_path / "package", "", "__init__.py")
    write_program(tmp_path / "package", PROGRAM, "__main__.py")

    done = run(
        "run", "--nproc-per-node=2", "--start-method", method, "-m", "package", "a", cwd=tmp_path
    )

    assert plain(done.lines) == ["0 2 __main__ a", "1 2 __main__ a"]
    assert done.code == 0


@pytest.mark.parametrize("method", START_METHODS)
def test_an_executable_runs_on_every_rank(method: str, tmp_path: Path) -> None:
    program = write_program(tmp_path, '#!/bin/sh\necho "$RANK $WORLD_SIZE $*"\n', "program")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)

    done = run("run", "--nproc-per-node=2", "--start-method", method, "--no-python", program, "a b")

    assert plain(done.lines) == ["0 2 a b", "1 2 a b"]
    assert done.code == 0


@pytest.mark.parametrize("method", START_METHODS)
def test_a_script_runs_by_path(method: str, tmp_path: Path) -> None:
    script = write_program(tmp_path, PROGRAM)

    done = run("run", "--nproc-per-node=2", "--start-method", method, "--run-path", script, "a")

    assert plain(done.lines) == ["0 2 __main__ a", "1 2 __main__ a"]
    assert done.code == 0


@pytest.mark.parametrize("method", START_METHODS)
def test_every_rank_can_be_given_its_own_arguments(method: str, tmp_path: Path) -> None:
    script = write_program(tmp_path, "import sys\nprint(sys.argv[1])")

    done = run(
        "run", "--nproc-per-node=2", "--start-method", method, script, "part-${local_rank}-$x"
    )

    assert plain(done.lines) == ["part-0-$x", "part-1-$x"]


def test_workers_read_the_input_of_the_command(tmp_path: Path) -> None:
    script = write_program(tmp_path, "import sys\nprint(len(sys.stdin.read()))")

    done = run("run", "--nproc-per-node=1", script)

    assert plain(done.lines) == ["0"]


def test_a_worker_finds_torchruns_variables(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import os
for name in sorted(os.environ):
    if name.startswith(("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_")):
        print(f"{name}={os.environ[name]}")
""",
    )

    done = run(
        "run", "--nproc-per-node=1", "--role=trainer", "--rdzv-id=mine", "--max-restarts=2", script
    )

    found = dict(line.split("=", 1) for line in plain(done.lines))
    assert int(found.pop("MASTER_PORT")) > 0
    assert Path(found.pop("TORCHELASTIC_ERROR_FILE")).name.endswith("error.json")
    assert found == {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "0",
        "ROLE_WORLD_SIZE": "1",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "mine",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def test_rank_0_can_listen_on_the_reserved_port_and_a_restart_has_another(tmp_path: Path) -> None:
    script = write_program(
        tmp_path,
        """
import os, socket, sys
port = int(os.environ["MASTER_PORT"])
with socket.create_server(("", port)) as server:
    with socket.create_connection((os.environ["MASTER_ADDR"], port)):
        print("port", port)
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
""",
    )

    done = run("run", "--nproc-per-node=1", "--max-restarts=1", script)

    first, second = plain(done.lines)
    assert first != second
    assert done.code == 0


def test_two_runs_at_once_have_ports_of_their_own(tmp_path: Path) -> None:
    script = write_program(tmp_path, "import os\nprint(os.environ['MASTER_PORT'])")
    nested = write_program(
        tmp_path,
        f"""
import os, subprocess, sys
print(os.environ["MASTER_PORT"], flush=True)
inner = [sys.executable, "-m", "rankwise", "run", "--no-prefix", {str(script)!r}]
subprocess.run(inner, check=True)
""",
        "nested.py",
    )

    done = run("run", "--no-prefix", nested)

    outer, inner = done.lines
    assert outer != inner
    assert done.code == 0


USAGE_ERRORS = {
    "script 'absent.py' does not exist": ["absent.py"],
    "--nnodes is '1:2', but the static rendezvous has a fixed": ["--nnodes=1:2", "script.py"],
    "--log-dir is file, but": ["--log-dir=file", "script.py"],
    "may not be executed": ["--no-python", "./script.py"],
    "no such option": ["--no-such-flag", "script.py"],
}


@pytest.mark.parametrize("told", USAGE_ERRORS)
def test_a_wrong_command_line_is_told_in_one_line_and_nothing_is_started(
    told: str, tmp_path: Path
) -> None:
    write_program(tmp_path, "open('started', 'w')", "script.py")
    (tmp_path / "file").touch()

    done = run("run", *USAGE_ERRORS[told], cwd=tmp_path)

    assert done.code == 2
    assert done.stdout == ""
    (error,) = done.stderr.splitlines()
    assert error.startswith("rankwise run: error: ")
    assert told in error
    assert not (tmp_path / "started").exists()


TORCH_SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.full((2, 3), float(rank))).sum().backward()
gradient = model.module.weight.grad[0, 0].item()
assert dist.is_torchelastic_launched()
print(rank, size, total.item(), gradient, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    "options", [["--start-method=subprocess"], ["--start-method=forkserver", "--preload=torch"]]
)
def test_an_unmodified_pytorch_program_trains(options: list[str], tmp_path: Path) -> None:
    script = write_program(tmp_path, TORCH_SCRIPT)

    done = run("run", "--standalone", "--nproc-per-node=2", *options, script)

    assert plain(done.lines) == ["0 2 3.0 1.0", "1 2 3.0 1.0"], done.stderr
    assert done.code == 0


OLDER = """
import sys
sys.version_info = ({version})
class Flags:
    def __getattr__(self, name, flags=sys.flags):
        if name == "safe_path":
            raise AttributeError(name)
        return getattr(flags, name)
sys.flags = Flags()
"""


def python_that_says_it_is(version: str, directory: Path) -> Path:
    """An interpreter for `PYTHON_EXEC`: this one, under another name for its version."""
    (directory / "site").mkdir()
    write_program(directory / "site", OLDER.format(version=version), "sitecustomize.py")
    python = write_program(
        directory,
        f'#!/bin/sh\nPYTHONPATH={directory}/site exec {sys.executable} "$@"\n',
        "another-python",
    )
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("method", "who"),
    [("spawn", "a rank needs Python 3.9"), ("forkserver", "the fork server needs Python 3.10")],
)
def test_a_python_that_is_too_old_is_told_in_one_line(
    method: str, who: str, tmp_path: Path
) -> None:
    python = python_that_says_it_is("3, 8, 18", tmp_path)
    script = write_program(tmp_path, "print('never')")

    done = run(
        *("run", "--no-prefix", f"--start-method={method}", script),
        environment={"PYTHON_EXEC": str(python)},
    )

    assert done.code == 1
    assert "Traceback" not in done.stderr
    said, _, report = done.stderr.partition("\n")
    assert said == f"rankwise: {who} or later, not {sys.executable}"
    assert "rankwise: the fork server" not in report


def test_a_fork_server_may_be_of_an_older_python(tmp_path: Path) -> None:
    python = python_that_says_it_is("3, 10, 13", tmp_path)
    script = write_program(tmp_path, "print('ran')")

    done = run(
        *("run", "--no-prefix", "--start-method=forkserver", script),
        environment={"PYTHON_EXEC": str(python)},
    )

    assert (done.code, done.lines) == (0, ["ran"]), done.stderr
