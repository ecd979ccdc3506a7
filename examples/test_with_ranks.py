"""Tests of a function that needs many ranks, on 16 simulated ones: no processes, no time-outs."""

import numpy as np
import pytest

import rankwise
from rankwise import collectives


def normalised(share: np.ndarray) -> np.ndarray:
    """What is tested: this rank's share of an array, divided by the sum of the whole."""
    return share / collectives.all_reduce(float(share.sum()))


def test_all_shares_together_sum_up_to_one() -> None:
    def total() -> float:
        return float(normalised(np.full(3, 1.0 + rankwise.rank())).sum())

    assert sum(rankwise.run(total, nprocs=16, on="sim")) == pytest.approx(1.0)


def test_a_rank_that_leaves_early_is_found_at_once() -> None:
    def early() -> None:
        if rankwise.rank() != 5:
            normalised(np.ones(3))

    with pytest.raises(rankwise.WorkersFailed, match="rank 5 has ended"):
        rankwise.run(early, nprocs=16, on="sim")
