# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code=arg-type
"""The kernels behind the host's calls on symmetric memory; program i deals with one peer.

A signal pad has a word for each channel and peer: 1 if a signal has come that was not waited for.
"""

import rankwise.sim.triton.language as tl
from rankwise.sim.triton import distributed as dl
from rankwise.sim.triton import jit, next_power_of_2


@jit
def put_kernel(buffer, source, elements, pad, channel, rank, size, peer):
    """Copy elements to a peer, and signal it."""
    dl.put(buffer, source, elements, peer)
    _put_signal(pad, channel, rank, size, peer)


@jit
def put_signal_kernel(pad, channel, rank, size, peer):
    """Signal a peer, as soon as it has waited for the signal before."""
    _put_signal(pad, channel, rank, size, peer)


@jit
def wait_signal_kernel(pad, channel, size, peer):
    """Wait for the signal of a peer, and take it."""
    _wait_signal(pad, channel, size, peer)


@jit
def barrier_kernel(pad, channel, rank, size):
    """Signal every peer, and wait for the signal of each."""
    peer = tl.program_id(0)
    if peer != rank:
        _put_signal(pad, channel, rank, size, peer)
        _wait_signal(pad, channel, size, peer)


@jit
def one_shot_kernel(x, out, n, pad, me, SIZE: tl.constexpr, B: tl.constexpr, SUM: tl.constexpr):
    """Add up the parts of all ranks; every rank does it for itself."""
    part = tl.program_id(0)
    _meet(pad + 2 * part * SIZE, me, SIZE)
    places = part * B + tl.arange(0, B)
    tl.store(out + places, _sum(x, places, n, me, SIZE, B, SUM), mask=places < n)
    _meet(pad + (2 * part + 1) * SIZE, me, SIZE)


@jit
def two_shot_kernel(x, n, share, pad, me, SIZE: tl.constexpr, B: tl.constexpr, SUM: tl.constexpr):
    """Add up one rank's share of the elements, and store the sums to all, in place."""
    part = tl.program_id(0)
    _meet(pad + 2 * part * SIZE, me, SIZE)
    end = tl.minimum((me + 1) * share, n)
    places = me * share + part * B + tl.arange(0, B)
    total = _sum(x, places, end, me, SIZE, B, SUM)
    for step in range(SIZE):
        tl.store(dl.symm_at(x, (me + step) % SIZE) + places, total, mask=places < end)
    _meet(pad + (2 * part + 1) * SIZE, me, SIZE)


@jit
def _sum(x, places, end, me, SIZE: tl.constexpr, B: tl.constexpr, SUM: tl.constexpr):
    total = tl.zeros((B,), SUM)
    for step in range(SIZE):
        there = dl.symm_at(x, (me + step) % SIZE)
        total += tl.load(there + places, mask=places < end, other=0).to(SUM)
    return total


@jit
def _meet(words, me, SIZE: tl.constexpr):
    """Signal all ranks, and wait for all.

    Two such words in turn are never set before their time:
    who sets the first one again knows that all have taken the second, and so the first before.
    """
    for peer in range(SIZE):
        dl.notify(words + me, peer, signal=1)
    dl.wait(words, SIZE, scope="sys", semantic="acquire", waitValue=1)
    peers = tl.arange(0, next_power_of_2(SIZE))
    tl.store(words + peers, 0, mask=peers < SIZE)


@jit
def _put_signal(pad, channel, rank, size, peer):
    there = dl.symm_at(pad, peer) + channel * size + rank
    dl.quiet()
    while tl.atomic_cas(there, 0, 1, sem="release", scope="sys") != 0:
        pass


@jit
def _wait_signal(pad, channel, size, peer):
    here = pad + channel * size + peer
    dl.wait(here, 1, scope="sys", semantic="acquire", waitValue=1)
    tl.atomic_xchg(here, 0, sem="acq_rel", scope="sys")
