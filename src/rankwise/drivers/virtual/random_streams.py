"""The generators of the simulated world: one per purpose, made from the run's seed by name."""

from random import Random

from rankwise.base.seeds import derived_seed
from rankwise.base.units import Duration


def stream(seed: int, *names: str | int) -> Random:
    """The generator for one purpose; equal seeds and names draw equal numbers everywhere."""
    return Random(derived_seed(seed, *names))  # noqa: S311  # chance, not secrecy


def happens(chance: Random, percent: int) -> bool:
    """Whether what happens so many times of 100 happens now."""
    return chance.randrange(100) < percent


def between(chance: Random, least: int, most: int) -> Duration:
    """A duration from `least` to `most`, both included."""
    return Duration(chance.randint(least, most))
