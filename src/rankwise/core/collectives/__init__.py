"""Collective algorithms as data, and the machines that carry them out; no I/O, no numpy."""
