"""Unmodified programs of torch on simulated ranks; needs the extra `torch`.

`install` follows the import of `torch.distributed` in a simulated world: with any backend that a
program names, it gets process groups whose operations meet in that world (`process_group`), through
a store in memory (`store`). All that is private in torch is touched in `hooks`.
"""

from rankwise.simranks.torch.compiled_cuda import compile_for_cpu
from rankwise.simranks.torch.cuda import shard_on_cpu
from rankwise.simranks.torch.hooks import install, share_memory, stay_out_of_graphs

__all__ = ["compile_for_cpu", "install", "shard_on_cpu", "share_memory", "stay_out_of_graphs"]
