"""The names of torch.distributed's launching half, without torch.

Replace `torch.distributed` by `rankwise.compat.torch` in an import and the program goes on working:
`rankwise.compat.torch.elastic.multiprocessing`, `.elastic.events`, `.elastic.metrics`.
docs/compat-torch.md lists what is the same, and what is better on purpose.
"""
