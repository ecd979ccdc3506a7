"""What all tests share: hypothesis profiles, and the proof that a system test cleaned up."""

import gc
import importlib.metadata
import os
import re
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import hypothesis
import leftovers
import preloaded as preloading
import pytest
import warm
from running import Finished

import rankwise

# However slowly a busy machine comes by its examples, that says nothing about what is tested.
hypothesis.settings.register_profile(
    "exploring", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
# The same examples on every run, so that a red build is about the change and can be repeated.
# Others are looked for with --hypothesis-profile=exploring.
hypothesis.settings.register_profile(
    "repeating",
    hypothesis.settings.get_profile("exploring"),
    derandomize=True,
    print_blob=True,
)
hypothesis.settings.load_profile("repeating")


# What a shell, a scheduler or a CI may have set, and what is tested would heed.
FOREIGN_VARIABLES = re.compile(
    "COLUMNS|LINES|NO_COLOR|FORCE_COLOR|TTY_(COMPATIBLE|INTERACTIVE)|OMP_NUM_THREADS"
    "|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    "|(PET|TORCHELASTIC|TORCH_ELASTIC|SLURM|RAY)_.*"
    "|(?i:(http|https|all)_proxy)"
)


HAS_TORCH = any(importlib.metadata.distributions(name="torch"))


# Where tests wait most, for a lease or a grace to end, comes first, what only computes comes last:
# the last minute is then short files on all workers, not one long file on one of them.
FOLDERS_IN_ORDER = ("tests/system/cluster", "tests/system", "tests/conformance", "docs", "tests")


def place_in_order(item: pytest.Item) -> int:
    folder = item.path.parent.relative_to(item.config.rootpath)
    return next(
        (place for place, first in enumerate(FOLDERS_IN_ORDER) if folder.is_relative_to(first)),
        len(FOLDERS_IN_ORDER),
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that wait longest first; skip what needs PyTorch where it is not installed."""
    items.sort(key=place_in_order)
    if not HAS_TORCH:
        reason = "needs PyTorch: make test, without PYTEST_ARGS, installs it"
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over the thousands of tests, which nobody will drop."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Begin in the same environment everywhere."""
    for name in filter(FOREIGN_VARIABLES.fullmatch, list(os.environ)):
        del os.environ[name]
    if not HAS_TORCH:
        # Or a folder of tests that bears its name would be taken for it.
        sys.modules["torch"] = None  # type: ignore[assignment]
    _receive_signals()


def _receive_signals() -> None:
    """Hear the signals that a shell makes its background jobs ignore: tests send them.

    Under nohup that is SIGHUP, which shall not end this process though what it starts shall hear
    it: a handler of our own is not inherited, while being ignored is.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture
def no_leftovers(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Fail the test if processes, shared memory or `rankwise_*` directories outlive it.

    The test gets a directory of its own for temporary files, in this process and (TMPDIR) in
    those that it starts. Its path is short, so that sockets fit in.
    """
    # Decided now, or pytest would put its own directories into the test's.
    tmp_path_factory.getbasetemp()
    directory = Path(tempfile.mkdtemp(prefix="rwt-"))
    mark = uuid.uuid4().hex
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv(leftovers.MARK_VARIABLE, mark)
    processes_before = frozenset(leftovers.marked_processes(mark))
    names_before = leftovers.shared_memory_names()

    yield

    found = [str(process) for process in leftovers.wait_until_gone(mark, processes_before)]
    found += [f"/dev/shm/{name}" for name in leftovers.new_shared_memory(names_before)]
    found += [str(path) for path in sorted(directory.glob("rankwise_*"))]
    shutil.rmtree(directory, ignore_errors=True)
    if found:
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(scope="module")
def preloaded() -> Iterator[preloading.Preloaded]:
    """`rankwise` with torch imported."""
    with preloading.Preloaded(*preloading.TORCH) as process:
        yield process


@pytest.fixture(scope="module")
def torch_server() -> Iterator[rankwise.ForkServer]:
    """A fork server with torch imported, which has served once."""
    with rankwise.ForkServer(preloading.TORCH) as server:
        assert rankwise.run(rankwise.rank, nprocs=1, server=server) == [0]
        yield server


@pytest.fixture
def run_on_torch(
    torch_server: rankwise.ForkServer, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Finished]:
    """`rankwise run` on a fork server with torch imported."""
    return partial(warm.run_on, torch_server, capfd)


@pytest.fixture(autouse=True)
def _system_tests_leave_nothing_behind(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("system"):
        request.getfixturevalue("no_leftovers")
