"""Processes, pipes, signals and shared memory of this machine."""
