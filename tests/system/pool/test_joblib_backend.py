"""joblib and scikit-learn in a pool, as their users call them."""

import multiprocessing
import operator
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pool_tasks
import pytest
from running import run_program

joblib = pytest.importorskip("joblib", reason="needs joblib")

from rankwise.compat import joblib as backend  # noqa: E402  # it registers itself with joblib

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def _pool_ends_with_the_test(no_leftovers: None) -> Iterator[None]:
    yield
    if backend._kept is not None:
        backend._kept[2].shutdown()


def test_parallel_gives_results_in_order_from_workers() -> None:
    with joblib.parallel_config("rankwise", n_jobs=2):
        values = joblib.Parallel()(joblib.delayed(operator.mul)(n, 2) for n in range(50))
        pids = set(joblib.Parallel()(joblib.delayed(pool_tasks.pid_of_worker)(n) for n in range(9)))

    assert values == [2 * n for n in range(50)]
    assert os.getpid() not in pids
    assert len(pids) <= 2


def test_parallel_raises_what_a_call_raises_and_works_again() -> None:
    with joblib.parallel_config("rankwise", n_jobs=2):
        with pytest.raises(pool_tasks.TwoArguments, match="failed badly"):
            joblib.Parallel()(joblib.delayed(pool_tasks.fail)("badly") for _ in range(4))
        assert joblib.Parallel()(joblib.delayed(abs)(n) for n in (-1, -2)) == [1, 2]


def test_parallel_returns_a_generator_and_lambdas_travel() -> None:
    parallel = joblib.Parallel(n_jobs=2, backend="rankwise", return_as="generator")

    values = parallel(joblib.delayed(lambda x: x + 1)(n) for n in range(20))

    assert list(values) == list(range(1, 21))


def test_timeout_of_parallel_ends_the_tasks() -> None:
    with pytest.raises(multiprocessing.TimeoutError):
        joblib.Parallel(n_jobs=2, backend="rankwise", timeout=1)(
            joblib.delayed(pool_tasks.sleep)(500) for _ in range(2)
        )


# A process of its own: older versions warn of newer ones of scipy, and scipy looks for torch.
SCIKIT_LEARN = """
import joblib
import rankwise.compat.joblib
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

if __name__ == "__main__":
    data, target = make_classification(2000, 80, random_state=0)  # 1.2 MiB: memory of its own
    search = GridSearchCV(LogisticRegression(max_iter=50), {"C": [0.1, 1.0]}, cv=2)
    print(*search.fit(data, target).cv_results_["mean_test_score"])
    with joblib.parallel_config("rankwise", n_jobs=2):
        print(*search.fit(data, target).cv_results_["mean_test_score"])
"""


@pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")
def test_scikit_learn_uses_it_unchanged(tmp_path: Path) -> None:
    done = run_program(SCIKIT_LEARN, tmp_path)

    assert done.code == 0, done.stderr
    alone, together = done.lines
    assert alone == together
