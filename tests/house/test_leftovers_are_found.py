import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
pytest_plugins = ["pytester"]

TESTS = Path(__file__).parents[1]


@pytest.fixture
def inner(request: pytest.FixtureRequest, pytester: pytest.Pytester) -> pytest.Pytester:
    """A test session of its own, with our conftest.

    It looks for shared memory in a folder of its own, or the sessions beside us would be told of
    what is left there on purpose.
    """
    shared_memory = pytester.mkdir("shm")
    pytester.makeconftest(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n"
        + (TESTS / "conftest.py").read_text()
        # An orphan would be waited for as long as is asked for here.
        + f"\nleftovers.PATIENCE_S = {getattr(request, 'param', 60)}\n"
        + f"leftovers.SHARED_MEMORY = Path({str(shared_memory)!r})\n"
    )
    pytester.makeini("[pytest]\nmarkers = system: x\n")
    return pytester


def run_inner(pytester: pytest.Pytester, source: str) -> pytest.RunResult:
    pytester.makepyfile(
        "import pytest\npytestmark = pytest.mark.system\n" + textwrap.dedent(source)
    )
    return pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider")


def test_a_test_that_cleans_up_passes(inner: pytest.Pytester) -> None:
    result = run_inner(
        inner,
        """
        import subprocess, sys, tempfile
        def test_clean():
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            tempfile.TemporaryDirectory(prefix="rankwise_").cleanup()
        """,
    )

    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("inner", [2], indirect=True)
def test_an_orphan_in_its_own_session_is_found_and_killed(inner: pytest.Pytester) -> None:
    result = run_inner(
        inner,
        """
        import subprocess, sys
        ORPHAN = "import signal; signal.pause()  # the orphan"
        PARENT = f'''
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", {ORPHAN!r}], start_new_session=True).pid)
        '''
        import textwrap
        def test_leaves_an_orphan():
            subprocess.run([sys.executable, "-c", textwrap.dedent(PARENT)], check=True)
        """,
    )

    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*the test left behind:*", "*process *the orphan*"])


def test_a_process_that_is_just_ending_is_waited_for(inner: pytest.Pytester) -> None:
    result = run_inner(
        inner,
        """
        import subprocess, sys
        def test_leaves_one_that_ends_by_itself(request):
            child = subprocess.Popen(
                [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
            )
            child.stdin.close()
            request.config.child = child
        """,
    )

    result.assert_outcomes(passed=1)


def test_temporary_directories_and_shared_memory_are_found(inner: pytest.Pytester) -> None:
    result = run_inner(
        inner,
        """
        import leftovers, tempfile
        def test_leaves_files():
            tempfile.mkdtemp(prefix="rankwise_")
            (leftovers.SHARED_MEMORY / "rankwise-test").touch()
        """,
    )

    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*/dev/shm/rankwise-test", "*/rankwise_*"])


def test_processes_of_other_sessions_are_nobodys_business(inner: pytest.Pytester) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        result = run_inner(inner, "def test_nothing():\n    pass\n")
        stranger.kill()

    result.assert_outcomes(passed=1)
