"""Carries out what a pool of workers orders: processes, sockets, pickles and shared memory."""
