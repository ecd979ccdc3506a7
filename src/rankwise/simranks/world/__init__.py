"""Unmodified programs of many ranks in one process: one thread per rank, in virtual time.

The scheduler passes a run token between the threads (`scheduler`); each rank has its own process
state (`per_rank_state`, `modules`, `process_patches`); groups of ranks meet for their operations
(`collective_groups`). `SimulatedWorld` connects them. What the operations compute is known above:
`rankwise.collectives` for numpy, `rankwise.simranks.torch` for torch.
"""
