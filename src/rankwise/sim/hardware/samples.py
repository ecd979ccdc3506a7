"""How much links have carried, sampled while a run goes on: bandwidth over time.

Samples are taken when something else happens anyway (a message arrives, an operation ends), so they
add nothing to the agenda and change no instant. The bytes of a link are exact at any instant;
between two samples a bandwidth is an average. Where there are more samples than wanted, every other
one is dropped and they are taken half as often.
"""

from typing import NamedTuple

from rankwise.sim.hardware.links import Link

SAMPLES_MOST = 1_000


class LinkSample(NamedTuple):
    """What all links had carried at an instant, by their place in `Machine.links`."""

    at: int
    carried: tuple[int, ...]


class LinkSamples:
    """Samples of what links have carried."""

    def __init__(self, links: list[Link]) -> None:
        self._links = links
        self._samples: list[LinkSample] = []
        self._gap = 1

    def names(self) -> list[str]:
        """The names of the links, in the order of what they have carried."""
        return [link.name for link in self._links]

    def take(self, now: int) -> None:
        """Take a sample, unless the last one is too near."""
        if self._samples and now < self._samples[-1].at + self._gap:
            return
        self._add(now)
        if len(self._samples) > SAMPLES_MOST:
            self._samples = self._samples[::2]
            self._gap = max(2 * self._gap, now // SAMPLES_MOST)

    def _add(self, now: int) -> None:
        self._samples.append(LinkSample(now, tuple(link.bytes_carried for link in self._links)))

    def until(self, now: int) -> list[LinkSample]:
        """All samples, with one of the end."""
        if not self._samples or self._samples[-1].at < now:
            self._add(now)
        return list(self._samples)
