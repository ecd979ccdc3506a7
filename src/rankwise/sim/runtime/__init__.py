"""The torch-like runtime: contexts, tensors, collectives, and ranks that are spawned."""
