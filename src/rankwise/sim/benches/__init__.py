"""The programs that ship with the simulator: each checks its numbers, and measures itself."""

NAMES = (
    "ccl_allreduce",
    "all_collectives",
    "gemm",
    "softmax",
    "attention",
    "tp_mlp",
    "memory_bandwidth",
)
"""What `rankwise sim bench` knows, in the order in which a newcomer meets them."""

__all__ = ["NAMES"]
