"""`flex_attention` without data: one kernel in each direction, as torch compiles it for CUDA.

Its own kernels exist for CUDA alone, and on the CPU it has no gradients. So it counts as flash
attention. A mask counts as a causal one, since its blocks are not computed.
"""

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rankwise.simranks.torch.cuda_choices import is_plain
from rankwise.simranks.torch.without_data import remark

_REMARK = "flex_attention is priced as flash attention; a mask of blocks counts as a causal one"


def install() -> Callable[[], None]:
    """Replace the functions of `torch.nn.attention.flex_attention`; returns what undoes it."""
    module: Any = import_module("torch.nn.attention.flex_attention")
    stack = ExitStack()
    for name, make in (("flex_attention", _fused), ("create_block_mask", _uncomputed)):
        original = getattr(module, name)
        setattr(module, name, make(original, module))
        stack.callback(setattr, module, name, original)
    return stack.close


def _fused(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    def flex_attention(  # noqa: PLR0917  # torch's parameters
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,  # the same
        return_lse: bool = False,  # the same
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        if query.dim() != 4 or not is_plain(query, key, value):
            return original(
                query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse,
                kernel_options, return_aux=return_aux,
            )  # fmt: skip
        remark(_REMARK)
        is_causal = block_mask is not None
        if value.shape[-1] == query.shape[-1]:
            out, sums = torch.ops.aten._scaled_dot_product_flash_attention(  # noqa: SLF001  # its name
                query, key, value, 0.0, is_causal, scale=scale
            )[:2]
        else:
            times = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(times, 1) for each in (key, value))
            keeps = True
            out, sums = torch.ops.aten._scaled_dot_product_efficient_attention(  # noqa: SLF001  # its name
                query, key, value, None, keeps, 0.0, is_causal, scale=scale
            )[:2]
            sums = sums[..., : query.shape[2]]  # this kernel pads them
        if return_aux is not None:
            most = sums if return_aux.max_scores else None
            return out, module.AuxOutput(lse=sums if return_aux.lse else None, max_scores=most)
        return (out, sums) if return_lse else out

    return flex_attention


def _uncomputed(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    def create_block_mask(  # noqa: PLR0917  # torch's parameters
        mask_mod: Any,
        B: int | None,  # noqa: N803  # torch's name
        H: int | None,  # noqa: N803  # the same
        Q_LEN: int,  # noqa: N803  # the same
        KV_LEN: int,  # noqa: N803  # the same
        device: Any = None,
        BLOCK_SIZE: Any = 128,  # noqa: N803  # the same
        *others: Any,
        **options: Any,
    ) -> Any:
        sizes = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
        if device is None and torch.get_default_device().type == "meta":
            return original(mask_mod, B, H, Q_LEN, KV_LEN, device, sizes, *others, **options)
        rows, columns = -(-Q_LEN // sizes[0]), -(-KV_LEN // sizes[1])
        shape = (B or 1, H or 1, rows)
        place = device if device is not None else torch.accelerator.current_accelerator() or "cpu"
        counts = torch.zeros(shape, dtype=torch.int32, device=place)
        indices = torch.zeros((*shape, columns), dtype=torch.int32, device=place)
        return module.BlockMask.from_kv_blocks(
            counts, indices, counts.clone(), indices.clone(), BLOCK_SIZE=sizes, mask_mod=mask_mod,
            seq_lengths=(Q_LEN, KV_LEN),
        )  # fmt: skip

    return create_block_mask
