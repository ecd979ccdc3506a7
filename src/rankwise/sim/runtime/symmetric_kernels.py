# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code=arg-type
"""The kernels behind the host's calls on symmetric memory; program i deals with one peer.

A signal pad has a word for each channel and peer: 1 where a signal has come and nobody has waited.
"""

import rankwise.sim.triton.language as tl
from rankwise.sim.triton import distributed as dl
from rankwise.sim.triton import jit


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
