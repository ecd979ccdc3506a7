"""Many independent streams of chance from one seed, each found by its name.

A simulation is repeatable if its seed decides everything, and stays comparable if a new use of
chance does not shift the old ones. So no stream is shared: each purpose derives a seed of its own
from the run's seed and the purpose's name, and a part that may own a generator (never a machine)
makes it from that. Derived by hashing, because `hash()` differs from process to process.
"""

from hashlib import blake2b


def derived_seed(seed: int, *names: str | int) -> int:
    """A 64-bit seed for the stream called `names`; other names give unrelated seeds."""
    digest = blake2b(digest_size=8)
    for part in (seed, *names):
        # The kind and the length go in too: ("a", "bc") is not ("ab", "c"), and 1 is not "1".
        text = str(part).encode()
        digest.update(f"{type(part).__name__}{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest(), "big")
