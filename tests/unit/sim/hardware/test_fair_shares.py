"""Max-min fair shares, against their definition."""

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankwise.sim.hardware.fair_shares import Uses, fair_speeds

NEAR = 1e-9


@st.composite
def networks(draw: st.DrawFn) -> tuple[Uses, np.ndarray]:
    """Some flows over some links, with shares and weights."""
    link_count = draw(st.integers(1, 6))
    flow, link, share = [], [], []
    weights = draw(st.lists(st.sampled_from([0.25, 1.0, 3.0, 128.0]), min_size=1, max_size=8))
    for number in range(len(weights)):
        own = draw(st.sets(st.integers(0, link_count - 1), min_size=1))
        for each in sorted(own):
            flow.append(number)
            link.append(each)
            share.append(draw(st.floats(0.01, 1.0)))
    return Uses(np.array(flow), np.array(link), np.array(share), link_count), np.array(weights)


@given(networks())
def test_each_flow_has_a_full_link_on_which_no_level_is_higher(
    network: tuple[Uses, np.ndarray],
) -> None:
    uses, weights = network
    speeds = fair_speeds(uses, weights)

    carried = np.bincount(uses.link, uses.share * speeds[uses.flow], uses.link_count)
    levels = speeds / weights
    assert (speeds > 0).all()
    assert (speeds <= 1).all()
    assert (carried <= 1 + NEAR).all()
    for number in np.flatnonzero(speeds < 1 - NEAR):
        full = [each for each in uses.link[uses.flow == number] if carried[each] > 1 - NEAR]
        assert any(
            levels[uses.flow[uses.link == each]].max() <= levels[number] * (1 + NEAR)
            for each in full
        )


@given(networks(), st.randoms(use_true_random=False))
def test_speeds_do_not_depend_on_the_order_of_links(
    network: tuple[Uses, np.ndarray], random: Random
) -> None:
    uses, weights = network
    names = list(range(uses.link_count))
    random.shuffle(names)
    other = uses._replace(link=np.array(names)[uses.link])

    np.testing.assert_allclose(fair_speeds(uses, weights), fair_speeds(other, weights), rtol=NEAR)


def test_flow_over_many_links_gets_as_much_as_those_over_one() -> None:
    """The parking lot: one flow over three links, and one of its own on each."""
    uses = Uses(np.array([0, 0, 0, 1, 2, 3]), np.array([0, 1, 2, 0, 1, 2]), np.ones(6), 3)

    assert fair_speeds(uses, np.ones(4)).tolist() == [0.5] * 4
