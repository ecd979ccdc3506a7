"""The names of torch.distributed.elastic: `multiprocessing`, `events` and `metrics`."""
