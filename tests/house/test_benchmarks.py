"""`make bench` tries every script, and a script that is told to end cleans up behind itself."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running import Running, run_program

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
MAIN = '\nif __name__ == "__main__":\n    main()\n'


def test_every_benchmark_takes_quick() -> None:
    scripts = [path for path in BENCHMARKS.glob("*.py") if MAIN in path.read_text()]

    assert len(scripts) > 20
    assert [
        path.name
        for path in scripts
        if "arguments(__doc__" not in path.read_text() and '"--quick"' not in path.read_text()
    ] == []


@pytest.mark.system
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_bench_goes_on_after_a_script_that_fails_and_names_it(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("tools", ".venv/bin", "benchmarks"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tools" / "setup").symlink_to(shutil.which("true") or "")
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for name, body in {
        "fails": 'raise SystemExit("no peer")',
        "goes_on": "import sys\n    print(sys.argv[1:])",
        "also_fails": "raise SystemExit(3)",
    }.items():
        script = tmp_path / "benchmarks" / f"{name}.py"
        script.write_text(f'if __name__ == "__main__":\n    {body}\n')
    (tmp_path / "benchmarks" / "is_shared.py").write_text('raise SystemExit("nobody runs it")\n')

    done = subprocess.run(
        ["make", "bench", "BENCH_ARGS=--quick"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode != 0
    assert "+ benchmarks/goes_on.py --quick\n['--quick']\n" in done.stdout
    assert "is_shared" not in done.stdout + done.stderr
    assert "\nfailed: benchmarks/also_fails.py benchmarks/fails.py\n" in done.stderr


@pytest.mark.system
def test_a_benchmark_that_is_told_to_end_ends_what_it_has_started(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
from contextlib import contextmanager
sys.path.insert(0, {str(BENCHMARKS)!r})
from measuring import arguments

@contextmanager
def started():
    try:
        yield
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # it comes again meanwhile
        print("cleaned up", flush=True)

arguments(None, repetitions=1)
with started():
    print("up", flush=True)
    signal.pause()
"""
    (tmp_path / "program.py").write_text(program)
    with Running(sys.executable, str(tmp_path / "program.py")) as benchmark:
        benchmark.wait_for("up\n")
        benchmark.signal(signal.SIGTERM)
        done = benchmark.finish()

    assert done.stdout == "up\ncleaned up\n"
    assert done.code == 128 + signal.SIGTERM


@pytest.mark.system
def test_quick_plays_its_own_parts_and_an_unknown_part_is_refused(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from measuring import arguments
for words in [], ["--quick"], ["--quick", "--only=long"], ["--only=long,strange"]:
    sys.argv[1:] = words
    print(arguments(None, repetitions=3, parts=("short", "long"), quick_parts=("short",)).only)
"""

    done = run_program(program, tmp_path)

    assert done.lines == ["('short', 'long')", "('short',)", "['long']"]
    assert done.code == 2
    assert done.stderr.endswith("--only is strange, expected some of short,long\n")
