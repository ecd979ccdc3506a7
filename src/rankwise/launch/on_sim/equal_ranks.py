"""Runs of ranks that do the same: a few of them first, then more, or all if they differ."""

from collections.abc import Callable, Mapping
from functools import partial

from rankwise.launch.on_sim.exploration import Order, Ordered, run_in_order
from rankwise.launch.on_sim.rehearsal import Rehearsal


def run_equals_once(
    make: Callable[..., Rehearsal],
    order: Order,
    again: Callable[[Mapping[str, str | int]], str],
    say: Callable[[str], None],
) -> Ordered:
    """Run a job in its order, with as many ranks as are needed to stand for all.

    The arguments are those of `run_in_order`.
    """
    done = run_in_order(make, order, again, say)
    while (equals := done.run.equals) is not None and equals.wanted:
        count = len(equals.wanted)
        say(f"ranks have positions in groups: {count} of {done.run.size:,} are run, from the start")
        done = run_in_order(partial(make, simulated=equals.wanted), order, again, say)
    if difference := done.run.difference(done.outcome):
        say(f"ranks are not equal: {difference}; all {done.run.size:,} are run")
        done = run_in_order(partial(make, every_rank=True), order, again, say)
    return done
