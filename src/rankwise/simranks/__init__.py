"""Unmodified programs on simulated ranks: one thread for each, in virtual time."""
