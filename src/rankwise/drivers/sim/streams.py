"""The generators of the simulated world: one per purpose, made from the run's seed by name."""

from random import Random

from rankwise.base.seeds import derived_seed


def stream(seed: int, *names: str | int) -> Random:
    """The generator for one purpose; equal seeds and names draw equal numbers everywhere."""
    return Random(derived_seed(seed, *names))  # noqa: S311  # chance, not secrecy
