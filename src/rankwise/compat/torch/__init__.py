"""The names of torch.distributed's launching half, without torch.

Replace `torch.distributed` by `rankwise.compat.torch` in an import and the program goes on
working: `rankwise.compat.torch.elastic.multiprocessing`, `.elastic.events`, `.elastic.metrics`.
What is the same, and what is better on purpose, is in docs/compat-torch.md.
"""
