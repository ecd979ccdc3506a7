"""Binding workers to CPUs: what `torch.numa` is beside `torch.distributed`."""
