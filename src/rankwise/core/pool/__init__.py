"""A pool of workers that run tasks and return values: its vocabulary and its machine."""
