"""`--start-method auto` and `subprocess`: equal output, exit codes, reports and files.

Heavier programs, and those of libraries that are not installed for tests, are in `heavy.py`.
"""

import os
import shutil
import sys
import zipapp
from pathlib import Path

import pytest
from agreement import HERE, Seen, differences, seen

pytestmark = pytest.mark.system

PROGRAMS = HERE / "programs"
OPTIONS = {
    "hangs": ["--timeout=2s"],
    "restarts": ["--max-restarts=1"],
    "process": ["a", "-b", "${local_rank}"],
}
NUMPY = (
    "asynchronous", "crash", "endings", "exits", "hooks", "inspection", "leaves", "multi",
    "process", "raises", "recursion", "restarts", "signals", "silent_crash",
)  # fmt: skip
TORCH = ("ddp", "torch_state")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(PROGRAMS / "in_step.py", folder)
    return folder


def both(folder: Path, *words: str, options: tuple[str, ...] = (), stdin: bytes = b"") -> Seen:
    """What `auto` shows, which is what `subprocess` shows."""
    automatic, plain = (
        seen(words, folder, method, options=options, stdin=stdin)
        for method in ("auto", "subprocess")
    )
    assert not differences(automatic, plain)
    return automatic


def words_for(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    given = OPTIONS.get(name, [])
    options = tuple(word for word in given if word.startswith("--"))
    return options, (f"{name}.py", *(word for word in given if word not in options))


@pytest.mark.parametrize("name", NUMPY)
def test_program_of_forked_ranks_behaves_as_in_interpreters(name: str, folder: Path) -> None:
    shutil.copy(PROGRAMS / f"{name}.py", folder)
    options, words = words_for(name)

    assert both(folder, *words, options=options).is_forked


@pytest.mark.torch
@pytest.mark.parametrize("name", TORCH)
def test_torch_program_of_forked_ranks_behaves_as_in_interpreters(name: str, folder: Path) -> None:
    shutil.copy(PROGRAMS / f"{name}.py", folder)

    assert both(folder, f"{name}.py").is_forked


@pytest.mark.torch
def test_forked_ranks_that_seed_nothing_differ_in_all_random_numbers(folder: Path) -> None:
    shutil.copy(PROGRAMS / "randomness.py", folder)

    forked = seen(["randomness.py"], folder, "auto")

    assert forked.is_forked
    one, other = (text.splitlines() for _, text in forked.files)
    assert len(one) == len(other) == 7
    assert [mine for mine, theirs in zip(one, other, strict=True) if mine == theirs] == []


def test_module_run_with_m_is_forked_and_behaves_equally(folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text('"""A package."""\n\nVERSION = 1\n')
    text = (
        "import numpy as np\nimport sys\nfrom . import VERSION\n"
        "from in_step import go_on_as_rank_1\n"
        "print(VERSION, sys.argv, np.ones(1), flush=True)\ngo_on_as_rank_1()\n1 / 0\n"
    )
    (package / "tool.py").write_text(text)

    assert both(folder, "-m", "package.tool", "x").is_forked


def test_module_whose_package_does_something_first_is_not_forked(folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'\n")
    (package / "__main__.py").write_text("import numpy as np\nprint(np.ones(2))\n")

    assert "line 2 does something" in both(folder, "-m", "package").how


def test_program_on_standard_input_is_forked_and_behaves_equally(folder: Path) -> None:
    assert both(folder, "-", stdin=b"import numpy as np\nprint(np.ones(2))\n").is_forked


def test_archive_is_run_by_interpreters(folder: Path) -> None:
    source = folder.parent / "source"
    source.mkdir()
    (source / "__main__.py").write_text("import numpy as np\nprint(np.ones(2), __file__)\n")
    zipapp.create_archive(source, folder / "tool.pyz")

    assert not both(folder, "tool.pyz").is_forked


def test_entry_point_is_run_by_interpreters(folder: Path) -> None:
    (folder / "tool.py").write_text("import numpy as np\ndef main(): print(np.ones(2))\n")
    (folder / "tool").write_text("import sys\nfrom tool import main\nsys.exit(main())\n")

    assert "imports tool" in both(folder, "tool").how


@pytest.mark.parametrize("words", [["cProfile", "-o", os.devnull], ["pdb", "-c", "continue"]])
def test_program_under_a_tool_is_run_by_interpreters(words: list[str], folder: Path) -> None:
    (folder / "tool.py").write_text("import numpy as np\nprint(np.ones(2))\n")

    assert not both(folder, "-m", words[0], *words[1:], "tool.py").is_forked


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os\nRANK = os.environ.get('RANK')", "read RANK, which differs by rank"),
        ("import sys\nsys.path.append('/nowhere')", "changed sys.path"),
        ("import subprocess\nP = subprocess.Popen(['sleep', '30'])", "started a process"),
        (
            "import os\nif not os.environ.get('TORCHELASTIC_' + 'RUN_ID'): os._exit(3)",
            "exit code 3",
        ),
    ],
)
def test_import_that_forks_would_notice_gives_each_rank_an_interpreter(
    text: str, reason: str, folder: Path
) -> None:
    packages = folder / "site-packages"
    packages.mkdir()
    (packages / "einops.py").write_text(text)
    (folder / "train.py").write_text(
        "import einops\nimport numpy as np\nprint(np.ones(2), flush=True)\n"
    )
    environment = {"PYTHONPATH": str(packages)}

    first, second = (seen(["train.py"], folder, "auto", environment=environment) for _ in range(2))

    assert reason in first.how
    assert first.how.startswith("ranks are forked")
    assert second.how.startswith("each rank starts an interpreter"), "it was remembered"
    assert reason in second.how
    assert first.code == 0
    assert not differences(first, second)


def test_fork_server_that_others_kill_is_used_again_by_the_next_run(folder: Path) -> None:
    packages = folder / "site-packages"
    packages.mkdir()
    (packages / "einops.py").write_text(
        "import os\nif not os.environ.get('TORCHELASTIC_' + 'RUN_ID'): os.kill(os.getpid(), 9)"
    )
    (folder / "train.py").write_text("import einops\nimport numpy as np\n")
    environment = {"PYTHONPATH": str(packages)}

    first, second = (seen(["train.py"], folder, "auto", environment=environment) for _ in range(2))

    told = "the import of einops, numpy failed: the fork server has ended with signal 9"
    for each in (first, second):
        assert each.code == 0
        assert each.how.startswith("ranks are forked")
        assert told in each.how


def test_variables_that_imports_set_are_there_in_forked_ranks(folder: Path) -> None:
    packages = folder / "site-packages"
    packages.mkdir()
    (packages / "einops.py").write_text(
        "import os\nos.environ['MADE'] = 'by einops'\nos.environ.pop('GONE', None)\n"
    )
    (folder / "train.py").write_text(
        "import os\nimport einops\nimport numpy\nprint(os.environ['MADE'], 'GONE' in os.environ)\n"
    )
    environment = {"PYTHONPATH": str(packages), "GONE": "not yet"}

    forked = seen(["train.py"], folder, "auto", environment=environment)

    assert forked.is_forked
    assert [line.partition("]:")[2] for line in forked.lines] == ["by einops False"] * 2


def test_restart_reuses_the_imports_of_the_first_attempt(folder: Path) -> None:
    packages = folder / "site-packages"
    packages.mkdir()
    imported = folder / "imported"
    (packages / "einops.py").write_text(
        f"import os\nwith open({str(imported)!r}, 'a') as file: file.write(f'{{os.getpid()}}\\n')\n"
    )
    text = (
        (PROGRAMS / "restarts.py")
        .read_text()
        .replace("import numpy", "import einops\nimport numpy")
    )
    (folder / "train.py").write_text(text)

    forked = seen(
        ["train.py"], folder, "auto",
        options=["--max-restarts=1"], environment={"PYTHONPATH": str(packages)},
    )  # fmt: skip

    assert forked.code == 0
    assert [line.partition("]:")[2].split()[1] for line in forked.lines] == ["0", "1"] * 2
    assert len(dict(forked.files)["imported"].splitlines()) == 1


@pytest.mark.parametrize("cache", ["/proc/none", "relative"])
def test_place_that_cannot_be_written_remembers_nothing(cache: str, folder: Path) -> None:
    packages = folder / "site-packages"
    packages.mkdir()
    (packages / "einops.py").write_text("print('loud')")
    (folder / "train.py").write_text("import einops\nimport numpy as np\n")
    environment = {"PYTHONPATH": str(packages), "XDG_CACHE_HOME": cache, "HOME": "/proc/none"}

    for _ in range(2):
        shown = seen(["train.py"], folder, "auto", environment=environment)

        assert shown.how.startswith("ranks are forked")
        assert "wrote 'loud'" in shown.how
        assert shown.code == 0


@pytest.mark.parametrize(
    ("options", "environment", "reason"),
    [
        (["--nproc-per-node=1"], {}, "there is one rank"),
        (["--numa-binding=node"], {}, "each is bound to CPUs of its own"),
        (["--virtual-local-rank"], {}, "CUDA_VISIBLE_DEVICES"),
        ([], {"PYTHON_EXEC": sys.executable, "PYTHONTRACEMALLOC": "1"}, "PYTHON_EXEC names"),
    ],
)
def test_ranks_that_differ_from_the_start_are_not_forked(
    options: list[str], environment: dict[str, str], reason: str, folder: Path
) -> None:
    (folder / "train.py").write_text("import numpy as np\nprint(np.ones(2))\n")

    shown = seen(["train.py"], folder, "auto", options=options, environment=environment)

    assert reason in shown.how
    assert shown.code == 0
