"""A program that rankwise boots behaves as under plain Python, byte for byte.

Each program runs twice, as `python -u program …` and through the boot file, with a report pipe;
what it prints, how it ends and the reports are compared.
"""

import json
import os
import py_compile
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import ANY

import pytest

from rankwise.drivers.real.worker import boot_program, bootstrap
from rankwise.launch.run.compiled_script import compiled_script

pytestmark = pytest.mark.system

SHOW = (
    "import sys\n"
    "print(sorted(globals()), __name__, __file__, __spec__ and __spec__.name, __package__)\n"
    "print(type(__loader__), __doc__, __builtins__, sys.argv, sys.path)\n"
    "print(getattr(sys, 'orig_argv', None), sys.modules['__main__'].__dict__ is globals())\n"
    "import os; print(sorted(n for n in os.environ if n.startswith('RANKWISE')))\n"
)
COUNTING_HOOK = """
import sys, traceback
def hook(kind, error, tb):
    print(len(traceback.extract_tb(tb)), error.__traceback__ is tb, kind)
sys.excepthook = hook
int('x')
"""


py_compile.compile(bootstrap.__file__, doraise=True)
COMPILED = boot_program(sys.executable)
"""What a worker is given as a rule; `boot.py` where nothing can be compiled."""


class Ending(NamedTuple):
    code: int
    stdout: str
    stderr: str


class Booted(NamedTuple):
    ending: Ending
    records: list[dict[str, Any]]
    text: str


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    return tmp_path


def plain(*arguments: str, python: str = sys.executable) -> Ending:
    run = subprocess.run(
        [python, "-u", *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Ending(run.returncode, run.stdout, run.stderr)


def booted(
    *arguments: str,
    python: str = sys.executable,
    error_file: Path | None = None,
    boot: str = COMPILED,
) -> Booted:
    with (
        tempfile.TemporaryFile() as reports,  # unlike a pipe, it takes any amount
        tempfile.TemporaryFile() as code,
    ):
        code.write(compiled_script(arguments[0]))
        code.flush()
        environment = {
            **os.environ,
            "RANKWISE_REPORT_FD": str(reports.fileno()),
            "RANKWISE_PAYLOAD_FD": str(code.fileno()),
        }
        if error_file is not None:
            environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        run = subprocess.run(
            [python, "-u", boot if python == sys.executable else boot_program(), *arguments],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[reports.fileno(), code.fileno()],
        )
        reports.seek(0)
        lines = reports.read().decode().split("\n")
    records = [json.loads(line[1:]) for line in lines if line.startswith("\x1e")]
    text = "\n".join(line for line in lines if not line.startswith("\x1e"))
    return Booted(Ending(run.returncode, run.stdout, run.stderr), records, text)


def assert_same(*arguments: str, boot: str = COMPILED) -> Booted:
    run = booted(*arguments, boot=boot)
    assert run.ending == plain(*arguments)
    return run


@pytest.mark.parametrize("boot", [COMPILED, boot_program()])
@pytest.mark.parametrize(
    "path", ["show.py", "./show.py", "sub/../show.py", "sub/link.py", "ABSOLUTE", ".//show.py"]
)
def test_a_script_finds_the_names_paths_and_arguments_of_plain_python(
    folder: Path, path: str, boot: str
) -> None:
    (folder / "show.py").write_text(SHOW)
    (folder / "sub").mkdir()
    (folder / "sub" / "link.py").symlink_to("../show.py")
    path = path.replace("ABSOLUTE", str(folder / "show.py"))

    run = assert_same(path, "--flag", "-m", "value", boot=boot)

    assert run.ending.code == 0
    assert run.records == [{"kind": "ready", "pid": ANY}]


def test_what_is_compiled_is_given_to_our_own_interpreter_as_long_as_it_is_fresh(
    folder: Path,
) -> None:
    worker = shutil.copytree(Path(bootstrap.__file__).parent, folder / "worker")
    names = runpy.run_path(str(worker / "__init__.py"))
    py_compile.compile(str(worker / "bootstrap.py"), doraise=True)

    assert names["boot_program"](sys.executable).endswith(".pyc")
    assert names["boot_program"]("/usr/bin/another-python") == str(worker / "boot.py")
    with (worker / "bootstrap.py").open("a") as source:
        source.write("# changed\n")
    assert names["boot_program"](sys.executable) == str(worker / "boot.py")
    shutil.rmtree(worker / "__pycache__")
    assert names["boot_program"](sys.executable) == str(worker / "boot.py")


def test_our_frames_do_not_show_where_the_code_was_compiled_at_another_place(folder: Path) -> None:
    worker = shutil.copytree(Path(bootstrap.__file__).parent, folder / "built" / "worker")
    py_compile.compile(str(worker / "bootstrap.py"), doraise=True)
    (folder / "built").rename(folder / "installed")
    compiled = runpy.run_path(str(folder / "installed" / "worker" / "__init__.py"))["boot_program"]
    (folder / "program.py").write_text("1 / 0\n")

    run = assert_same("program.py", boot=compiled(sys.executable))

    assert run.records[-1]["traceback"].count("File ") == 1


def test_a_module_of_a_package_runs_as_with_m(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("import sys; print('package', sys.argv)\n")
    (folder / "package" / "tool.py").write_text(f"from . import sibling\n{SHOW}")
    (folder / "package" / "sibling.py").write_text("print(__name__)\n")
    (folder / "package" / "__main__.py").write_text(SHOW)

    assert_same("-m", "package.tool", "a", "b")
    assert_same("-m", "package", "a")


def test_folders_and_archives_with_a_main_file_are_run(folder: Path) -> None:
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text(f"import helper\n{SHOW}")
    (folder / "app" / "helper.py").write_text("print(__file__)\n")
    with zipfile.ZipFile(folder / "app.zip", "w") as archive:
        archive.write(folder / "app" / "__main__.py", "__main__.py")
        archive.write(folder / "app" / "helper.py", "helper.py")

    assert assert_same("app", "x").ending.code == 0
    assert assert_same("app.zip", "x").ending.code == 0
    assert assert_same(str(folder / "app")).ending.code == 0


def test_a_compiled_file_is_run(folder: Path) -> None:
    (folder / "show.py").write_text(SHOW)
    compile_it = "import py_compile; py_compile.compile('show.py', 'show.pyc')"
    subprocess.run([sys.executable, "-c", compile_it], check=True)

    assert assert_same("show.pyc").ending.code == 0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit()",
        "import sys; sys.exit(3)",
        "import sys; sys.exit(-1)",
        "import sys; sys.exit(True)",
        "import sys; sys.exit('sorry')",
        "import sys; sys.exit(['odd'])",
        "raise SystemExit(2.5)",
        "import os; os._exit(9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.abort()",
        "import atexit; atexit.register(print, 'at exit'); print('body')",
        "import threading, sys; threading.Thread(target=lambda: print('thread')).start()",
        """
import threading
threading.excepthook = lambda args: print(args.exc_type)
t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); print('on')
""",
        "import sys; sys.stdout.write('no newline')",
        "import pickle\nclass Point: pass\nprint(pickle.loads(pickle.dumps(Point())).__class__)",
        """
def f(): f()
try: f()
except RecursionError: print('deep')
""",
        "print('caf\\xe9'.encode())",
        "import warnings; warnings.warn('careful')",
        "print('\\d')",
        "import __main__; x = 1; print(__main__.x, vars() is vars(__main__))",
        "from __future__ import annotations\ndef f(x: Nope): ...\nprint(f.__annotations__)",
        "def f(x: 'Nope'): ...\nx: int = 1\nprint(__annotations__)",
        "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))",
        "import atexit\natexit.register(lambda: print('__file__' in globals()))",
        """
import os
class Named:
    def __init__(self, name): self.name = name
    def __del__(self): os.write(1, self.name)
def cycle(): a = Named(b'cycle '); a.itself = a
cycle()
kept = Named(b'kept ')
def reader(): return kept
""",
    ],
)
def test_ordinary_programs_end_as_under_plain_python(folder: Path, program: str) -> None:
    (folder / "program.py").write_text(program)

    run = assert_same("program.py")

    assert not [record for record in run.records if record["kind"] == "error"]


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        ("def f():\n    1 / 0\nf()\n", "ZeroDivisionError", "division by zero"),
        ("raise ValueError('a\\nb \\u00e9 \\U0001f600 \"q\" \\\\ \\x00')", "ValueError", None),
        ("try:\n    {}[1]\nexcept KeyError as e:\n    raise OSError('later') from e", "OSError",
         "later"),
        ("class Odd(Exception):\n    def __str__(self): raise TypeError\nraise Odd", "Odd", None),
        ("import nowhere", "ModuleNotFoundError", "No module named 'nowhere'"),
        ("x = (\n", "SyntaxError", None),
        ("if 1:\nx", "IndentationError", None),
        ("import broken", "SyntaxError", None),
        ("import json; json.loads('{')", "json.decoder.JSONDecodeError", None),
        ("class E(BaseException): ...\nraise E('base')", "E", "base"),
        ("import sys; sys.excepthook = lambda *a: print('mine', a[0], a[2].tb_lineno)\nint('x')",
         "ValueError", "invalid literal for int() with base 10: 'x'"),
        ("import sys; del sys.excepthook\nint('x')", "ValueError", None),
        ("import atexit; atexit.register(print, 'end')\nraise MemoryError", "MemoryError", ""),
        ("exec('def g(): 1/0'); g()", "ZeroDivisionError", None),
        (COUNTING_HOOK, "ValueError", None),
    ],
)  # fmt: skip
def test_uncaught_exceptions_show_as_under_plain_python_and_are_reported(
    folder: Path, program: str, kind: str, message: str | None
) -> None:
    (folder / "program.py").write_text(program)
    (folder / "broken.py").write_text("def (\n")

    run = assert_same("program.py")

    assert run.ending.code == 1
    ready, error = run.records
    assert ready == {"kind": "ready", "pid": ANY}
    assert (error["kind"], error["type"]) == ("error", kind)
    assert message is None or error["message"] == message
    assert "boot" not in error["traceback"]
    if run.ending.stderr.startswith("Traceback") and "repeated" not in run.ending.stderr:
        assert error["traceback"] in run.ending.stderr


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("import sys\nsys.stderr.close()\nint('x')", "ValueError"),
        ("import sys\nsys.excepthook = None\nint('x')", "ValueError"),
        ("def f(): f()\nf()", "RecursionError"),
        (
            "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\nint('x')",
            "ValueError",
        ),
        ("import sys\nsys.path.clear(); sys.meta_path.clear()\nint('x')", "ValueError"),
    ],
)
def test_exceptions_are_reported_from_programs_that_have_wrecked_their_interpreter(
    folder: Path, program: str, kind: str
) -> None:
    """Python's own words about these are not stable enough to compare."""
    (folder / "program.py").write_text(program)

    run = booted("program.py")

    assert run.ending.code == 1
    assert run.records[1]["type"] == kind


LEAVES_A_FILE_OPEN = """
import sys, site, encodings.utf_8, json, {place}
def reader(): return log
{place}.{name} = open('log.txt', 'w')
{place}.{name}.write('written')
"""


@pytest.mark.parametrize("place", ["__main__", "site", "encodings.utf_8", "sys", "json"])
@pytest.mark.parametrize("name", ["log", "main"])  # `site` has the second one before
def test_what_was_written_to_a_file_left_open_is_not_lost(
    folder: Path, place: str, name: str
) -> None:
    (folder / "program.py").write_text(LEAVES_A_FILE_OPEN.format(place=place, name=name))

    run = booted("program.py")

    assert run.ending == Ending(0, "", "")
    assert (folder / "log.txt").read_text() == "written"


def test_a_file_that_sitecustomize_has_left_open_is_not_lost_either(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    (folder / "sitecustomize.py").write_text("log = open('log.txt', 'w')\ndef f(): return log\n")
    (folder / "program.py").write_text("import sitecustomize; sitecustomize.log.write('written')")

    run = booted("program.py")

    assert run.ending == Ending(0, "", "")
    assert (folder / "log.txt").read_text() == "written"


def test_what_python_has_loaded_itself_is_set_aside_also_beside_an_empty_sitecustomize(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    (folder / "sitecustomize.py").write_text(  # as Debian's own
        "try: import no_such_hook\nexcept ImportError: pass\n"
    )
    (folder / "program.py").write_text(
        "import gc, sys; print('sitecustomize' in sys.modules, gc.get_freeze_count() > 0)"
    )

    assert booted("program.py").ending == Ending(0, "True True\n", "")


def test_what_is_no_source_is_refused_by_its_name(folder: Path) -> None:
    (folder / "program.py").write_bytes(b"print(1)\n\x7fELF\x02\0\0")

    run = booted("program.py")

    assert run.ending.code == 1
    assert run.records[1]["type"] == "SyntaxError"
    assert run.records[1]["message"] == "source code cannot contain null bytes (program.py, line 2)"
    assert f'File "{folder}/program.py", line 2' in run.records[1]["traceback"]


def test_a_traceback_is_had_without_opening_a_file(folder: Path) -> None:
    (folder / "program.py").write_text(
        "import resource\n"
        "def fail():\n"
        "    raise ValueError('no more')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "fail()\n"
    )

    run = booted("program.py")

    assert run.records[1]["traceback"] == (
        "Traceback (most recent call last):\n"
        f'  File "{folder}/program.py", line 5, in <module>\n'
        f'  File "{folder}/program.py", line 3, in fail\n'
        "ValueError: no more\n"
    )


def test_an_exception_in_a_module_shows_pythons_own_frames_only(folder: Path) -> None:
    (folder / "failing.py").write_text("1 / 0\n")

    run = assert_same("-m", "failing")

    assert run.records[1]["type"] == "ZeroDivisionError"
    assert run.records[1]["traceback"] == run.ending.stderr


@pytest.mark.parametrize("arguments", [["nowhere.py"], ["-m", "nowhere"], ["-m", "json"], ["."]])
def test_programs_that_do_not_exist_are_missed_in_pythons_words(arguments: list[str]) -> None:
    assert assert_same(*arguments).ending.code in (1, 2)


@pytest.mark.parametrize(
    "source",
    [
        b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n",
        b"\xef\xbb\xbfprint(ascii('\xc3\xa9'))\n",
        b"#!/usr/bin/env python\r\n# coding: cp1252\r\nprint(ascii('\x80'))\r\n",
    ],
)
def test_the_encoding_of_a_script_is_honoured(folder: Path, source: bytes) -> None:
    (folder / "program.py").write_bytes(source)

    assert_same("program.py")


def test_an_interrupt_that_python_drops_is_heard_all_the_same(folder: Path) -> None:
    (folder / "program.py").write_text(
        "import os, signal\n"
        "class Held:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "Held()\n"
        "signal.pause()\n"
    )
    run = booted("program.py")

    assert run.ending.code == -signal.SIGINT
    assert "Exception ignored" not in run.ending.stderr
    assert [record["kind"] for record in run.records] == ["ready", "error"]


def test_other_exceptions_that_python_drops_are_told_as_ever(folder: Path) -> None:
    (folder / "program.py").write_text(
        "class Held:\n"
        "    def __init__(self, kind): self.kind = kind\n"
        "    def __del__(self): raise self.kind('dropped')\n"
        "Held(ValueError)\n"
        "at_the_end = Held(OSError), Held(KeyboardInterrupt)\n"
    )
    expected, told = (
        re.sub("0x[0-9a-f]+", "", ending.stderr)
        for ending in (plain("program.py"), booted("program.py").ending)
    )

    assert told == expected
    assert all(f"{kind}: dropped" in told for kind in ("ValueError", "OSError", "Interrupt"))


def test_an_unhandled_interrupt_kills_as_it_does_under_plain_python(folder: Path) -> None:
    (folder / "program.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('not here')\n"
    )

    run = assert_same("program.py")

    assert run.ending.code == -signal.SIGINT
    assert run.records[1]["type"] == "KeyboardInterrupt"


def test_children_of_multiprocessing_find_main(folder: Path) -> None:
    (folder / "program.py").write_text(
        "import multiprocessing as mp\n"
        "print(__name__, flush=True)\n"  # a pool ends its workers by a signal
        "def work(x): return x * 2\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'fork'):\n"
        "        with mp.get_context(method).Pool(1) as pool:\n"
        "            print(pool.map(work, [1, 2]))\n"
    )

    assert "[2, 4]" in assert_same("program.py").ending.stdout
    assert "[2, 4]" in assert_same("-m", "program").ending.stdout


def test_a_fork_of_the_worker_reports_nothing_in_its_name(folder: Path) -> None:
    (folder / "program.py").write_text(
        "import os\nif os.fork() == 0:\n    raise ValueError('child')\nos.wait()\nprint('fine')\n"
    )

    run = assert_same("program.py")

    assert run.ending.code == 0
    assert run.records == [{"kind": "ready", "pid": ANY}]


def test_the_report_pipe_is_not_inherited_by_the_programs_children(folder: Path) -> None:
    (folder / "program.py").write_text(
        "import os, subprocess, sys\n"
        'pipes = \'sum(os.readlink(f"/proc/self/fd/{n}").startswith("pipe") for n in range(3, 20)'
        ' if os.path.islink(f"/proc/self/fd/{n}"))\'\n'
        "subprocess.run([sys.executable, '-c', f'import os; print({pipes})'], close_fds=False)\n"
    )

    assert booted("program.py").ending.stdout == "0\n"


def test_without_a_report_pipe_the_program_runs_all_the_same(folder: Path) -> None:
    (folder / "program.py").write_text(f"{SHOW}1 / 0\n")

    assert plain(boot_program(), "program.py", "x") == plain("program.py", "x")


def test_safe_path_is_honoured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (folder / "show.py").write_text(SHOW)

    assert_same("show.py")


def test_the_stacks_of_all_threads_come_on_demand_and_the_program_goes_on(folder: Path) -> None:
    (folder / "program.py").write_text(
        "import os, signal, threading\n"
        "def waits_in_a_thread(): gate.wait()\n"
        "gate = threading.Event()\n"
        "thread = threading.Thread(target=waits_in_a_thread); thread.start()\n"
        "os.kill(os.getpid(), signal.SIGRTMIN + 6)\n"
        "gate.set(); thread.join(); print('on')\n"
    )

    run = booted("program.py")

    assert run.ending == Ending(0, "on\n", "")
    assert "waits_in_a_thread" in run.text
    assert "Current thread" in run.text


def test_a_crash_leaves_its_stack_on_the_report_pipe(folder: Path) -> None:
    (folder / "program.py").write_text(
        "import ctypes\ndef crashes(): ctypes.string_at(0)\ncrashes()\n"
    )

    run = booted("program.py")

    assert run.ending.code == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in run.text
    assert "in crashes" in run.text


def test_the_error_file_is_torchs(folder: Path) -> None:
    (folder / "program.py").write_text("raise KeyError('caf\\xe9')\n")
    error_file = folder / "error.json"

    run = booted("program.py", error_file=error_file)

    message = json.loads(error_file.read_text())["message"]
    assert message["message"] == "KeyError: 'caf\xe9'"
    assert message["extraInfo"]["py_callstack"] == run.records[1]["traceback"]
    assert message["extraInfo"]["timestamp"] == str(run.records[1]["wall_ns"] // 10**9)
    assert list(folder.glob("error.json*")) == [error_file]


def test_what_record_has_written_about_the_same_exception_stays(folder: Path) -> None:
    written = {"message": {"message": "ValueError: no", "extraInfo": {"by": "record"}}}
    (folder / "program.py").write_text(
        f"import json\njson.dump({written!r}, open('error.json', 'w'))\nraise ValueError('no')\n"
    )
    booted("program.py", error_file=folder / "error.json")

    assert json.loads((folder / "error.json").read_text()) == written


def test_what_was_written_about_another_exception_is_replaced(folder: Path) -> None:
    (folder / "error.json").write_text('{"message": {"message": "ValueError: earlier"}}')
    (folder / "program.py").write_text("raise ValueError('no')\n")

    booted("program.py", error_file=folder / "error.json")

    assert "ValueError: no" in (folder / "error.json").read_text()


def test_a_launchers_copy_of_its_workers_error_stays(folder: Path) -> None:
    (folder / "error.json").write_text('{"message": {"message": "RuntimeError: root cause"}}')
    (folder / "program.py").write_text(
        "class ChildFailedError(Exception): ...\nraise ChildFailedError\n"
    )

    booted("program.py", error_file=folder / "error.json")

    assert "root cause" in (folder / "error.json").read_text()


def test_an_error_file_that_cannot_be_written_hides_nothing(folder: Path) -> None:
    (folder / "program.py").write_text("raise ValueError('no')\n")

    run = booted("program.py", error_file=folder / "nowhere" / "error.json")

    assert run.ending == plain("program.py")
    assert run.records[1]["message"] == "no"


def test_a_giant_message_is_cut_in_its_middle(folder: Path) -> None:
    (folder / "program.py").write_text("raise ValueError('a' * 10_000_000 + 'z')\n")

    error = booted("program.py").records[1]

    assert error["message"].startswith("aaa")
    assert error["message"].endswith("az")
    assert len(error["message"]) < 70_000
    assert len(error["traceback"]) < 1_100_000


OTHER_PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3.?*[0-9]"))


@pytest.mark.parametrize("python", OTHER_PYTHONS, ids=lambda path: path.name)
def test_other_interpreters_without_rankwise_boot_as_well(folder: Path, python: Path) -> None:
    version = tuple(map(int, python.name.removeprefix("python").split(".")))
    if version < (3, 9):
        pytest.skip("the boot code supports Python 3.9 and later")
    (folder / "show.py").write_text(f"{SHOW}1 / 0\n")

    run = booted("show.py", "x", python=str(python))

    assert run.ending == plain("show.py", "x", python=str(python))
    assert run.records[1]["traceback"] == run.ending.stderr
