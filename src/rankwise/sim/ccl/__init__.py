"""Collective algorithms, their configuration, and how they are planned and played."""
