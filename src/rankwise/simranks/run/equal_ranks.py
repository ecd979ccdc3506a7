"""Runs of ranks that do the same: a few of them first, then more, or all if they differ."""

from collections.abc import Callable, Mapping
from functools import partial

from rankwise.simranks.run.exploration import Ordered, WantedOrder, run_in_order
from rankwise.simranks.run.rehearsal import Rehearsal


def run_equals_once(
    make: Callable[..., Rehearsal],
    order: WantedOrder,
    again: Callable[[Mapping[str, str | int]], str],
    say: Callable[[str], None],
) -> Ordered:
    """Run a job in its order, with as many ranks as are needed to stand for all.

    The arguments are those of `run_in_order`.
    """
    done = run_in_order(make, order, again, say)
    while (choice := done.run.following(done.outcome)) is not None:
        count, size = len(choice.simulated), done.run.size
        if count == size:
            say(f"{choice.why}; all {size:,} are run")
            make = partial(make, simulates_all=True, repeats=choice.repeats)
            done = run_in_order(make, order, again, say)
            again_for = done.run.following(done.outcome)
            if again_for is None:
                return done
            say(f"{again_for.why}: all are run, from the start")
            return run_in_order(partial(make, repeats=False), order, again, say)
        say(f"{choice.why}: {count:,} of {size:,} are run, from the start")
        done = run_in_order(partial(make, choice=choice), order, again, say)
    return done
