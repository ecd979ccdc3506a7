"""Simulated worlds: the real machines among virtual processes, in virtual time."""
