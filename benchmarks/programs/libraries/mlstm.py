"""mLSTM of xLSTM: chunks, parallel form and single steps, with gradients, against its own in torch.

pip install --target LIBRARIES --no-deps mlstm-kernels==2.0.6
"""

from collections.abc import Iterator
from typing import Any

import torch

from libraries import Operator, found


def of_torch(path: str, **options: Any) -> Any:
    return lambda *args: found(f"mlstm_kernels.torch.{path}")(*args, **options)


def operators() -> Iterator[Operator]:
    torch.manual_seed(5)
    chunks, parallel = "chunkwise.mlstm_chunkwise__", "parallel.mlstm_parallel__"
    shapes = ((1, 2, 128, 32),) * 3 + ((1, 2, 128),) * 2
    reference = of_torch(f"{parallel}native_custbw")
    yield Operator(
        "limit_chunk", of_torch(f"{chunks}limit_chunk", chunk_size=64), reference, shapes, 5e-3
    )
    yield Operator(
        "xl_chunk", of_torch(f"{chunks}xl_chunk", chunk_size=64), reference, shapes, 5e-3
    )
    yield Operator("limit_headdim", of_torch(f"{parallel}limit_headdim"), reference, shapes, 5e-3)
    # One state, one step: memory, its norm and its maximum go in and out.
    state = torch.randn(2, 2, 32, 32), torch.randn(2, 2, 32), torch.randn(2, 2, 1)
    step = (*torch.randn(3, 2, 2, 32), *torch.randn(2, 2, 2, 1), *state)

    def stepped(kind: str) -> Any:
        def call(q: Any, k: Any, v: Any, i: Any, f: Any, c: Any, n: Any, m: Any) -> Any:
            function = found(f"mlstm_kernels.torch.recurrent.mlstm_recurrent_step__{kind}")
            out, new = function(q=q, k=k, v=v, i=i, f=f, c=c.clone(), n=n.clone(), m=m.clone(),
                                dtype_state=torch.float32)  # fmt: skip
            return (out, *new)

        return call

    yield Operator("step", stepped("triton"), stepped("native"), step)
