"""One node's workers: all or nothing, restart budget, root cause."""
