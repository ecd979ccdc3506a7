"""Unmodified programs of many ranks in one process: one thread per rank, in virtual time.

The scheduler passes a run token between the threads (`scheduler`); each rank has its own process
state (`own_state`, `modules`, `process_patches`); groups of ranks meet for their operations
(`meetings`). `SimulatedWorld` puts them together. What the operations compute is known above:
`rankwise.collectives` for numpy, `rankwise.simranks.torch` for torch.
"""
