"""Kernels of tritonbench, the benchmark suite of PyTorch.

SOURCES/tritonbench in PYTHONPATH, where SOURCES/tritonbench is a checkout
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, found, named


def bench(path: str) -> Any:
    return found(f"tritonbench.operators.{path}")


def kernel(path: str) -> Any:
    return named(f"tritonbench.operators.{path}")


def blocks(length: int, block: str) -> Any:
    return lambda meta: (-(-length // meta[block]),)


def elementwise(path: str, *inputs: Any) -> Any:
    out = torch.empty_like(inputs[0])
    kernel(path)[blocks(out.numel(), "BLOCK_SIZE")](*inputs, out, out.numel(), BLOCK_SIZE=256)
    return out


def sum_of_all(x: Any) -> Any:
    out = torch.zeros(1)
    kernel("sum.kernels.triton_sum_kernel_scalar_result")[blocks(x.numel(), "BLOCK_SIZE_M")](
        x, out, x.numel(), BLOCK_SIZE_M=64
    )
    return out


def sum_of_rows(name: str, x: Any) -> Any:
    out = torch.empty(x.shape[0])
    kernel(f"sum.kernels.{name}")[blocks(x.shape[0], "BLOCK_SIZE_NON_REDUCE_DIM")](
        x, out, *x.shape, dim=1
    )
    return out


def sum_of_middle(name: str, x: Any) -> Any:
    rows, _, columns = x.shape
    out = torch.empty(rows, columns)
    kernel(f"sum.kernels.{name}")[lambda meta: (rows * -(-columns // meta["BLOCK_SIZE_K"]),)](
        x, out, *x.shape
    )
    return out


OFFSETS = torch.tensor([0, 3, 10, 11, 30])


def jagged(path: str, x: Any, *, rows: bool = False) -> Any:
    """A kernel over rows in groups of 3, 7, 1 and 19."""
    width = x.shape[1]
    out = torch.zeros(len(x) if rows else 4, width)
    longest = {} if "variable" in path else {"MAX_SEQLEN": 19}
    kernel(path)[lambda meta: (4 * -(-width // meta["BLOCK_SIZE_M"]),)](
        x, OFFSETS, out, width, **longest
    )
    return out


def by_groups(function: Any, x: Any) -> list[Any]:
    ends = OFFSETS.tolist()
    return [function(x[a:b], 0) for a, b in pairwise(ends)]


def dropout(x: Any, kept: Any) -> Any:
    out = torch.empty_like(x)
    kernel("low_mem_dropout.kernels._triton_dropout")[blocks(len(x), "BLOCK_SIZE")](
        x, kept, out, len(x), 0.25, BLOCK_SIZE=128
    )
    return out


def operators() -> Iterator[Operator]:
    draw = torch.randn
    yield Operator("vector_add", lambda *a: elementwise("vector_add.kernels.triton_add_kernel", *a),
                   torch.add, (draw(1000), draw(1000)))  # fmt: skip
    yield Operator("vector_exp", lambda x: elementwise("vector_exp.kernels.triton_exp_kernel", x),
                   torch.exp, (draw(1000),))  # fmt: skip
    yield Operator("sum_of_all", sum_of_all, lambda x: x.sum().view(1), (draw(1024),))
    for how in ("sum_then_buffer", "buffer_then_sum"):
        name = f"triton_sum_kernel_1D_result_{how}"
        yield Operator(name, lambda x, name=name: sum_of_rows(name, x), lambda x: x.sum(1),
                       (draw(37, 50),))  # fmt: skip
        name = f"triton_sum_kernel_2D_result_dim_1_{how}"
        yield Operator(name, lambda x, name=name: sum_of_middle(name, x), lambda x: x.sum(1),
                       (draw(5, 37, 20),))  # fmt: skip
        for loop in ("simple_fused", "variable_length_loop"):
            for kind, function in (("sum", torch.sum), ("mean", torch.mean)):
                path = f"jagged_{kind}.kernels.triton_jagged_{kind}_kernel_{loop}_{how}"
                yield Operator(
                    f"jagged_{kind}_{loop}_{how}", lambda x, path=path: jagged(path, x),
                    lambda x, function=function: torch.stack(by_groups(function, x)),
                    (draw(30, 24),),
                )  # fmt: skip
    for loop in ("simple_fused", "variable_length_loop"):
        path = f"jagged_softmax.kernels.triton_jagged_softmax_kernel_{loop}_buffer_then_sum"
        yield Operator(
            f"jagged_softmax_{loop}", lambda x, path=path: jagged(path, x, rows=True),
            lambda x: torch.cat(by_groups(torch.softmax, x)), (draw(30, 24),),
        )  # fmt: skip
    yield Operator(
        "dropout", dropout, lambda x, kept: torch.where(kept > 0, x / 0.75, 0.0),
        (draw(500), torch.randint(0, 2, (500,))),
    )  # fmt: skip
    yield Operator(
        "layer_norm", lambda x, w, b: bench("layer_norm.tutorial.LayerNorm")(x, (64,), w, b, 1e-5),
        lambda x, w, b: functional.layer_norm(x, [64], w, b), ((8, 64), (64,), (64,)),
    )  # fmt: skip
    a, b = draw(64, 128).half(), draw(128, 96).half()
    yield Operator("matmul", bench("gemm.triton_matmul.matmul"), torch.matmul, (a, b), 2e-2)
    yield Operator("matmul_fp8_tutorial", bench("fp8_gemm.tutorial.matmul"),
                   lambda a, b: (a.float() @ b.float()).half(),
                   (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)), 2e-2)  # fmt: skip
    yield Operator(
        "matmul_partition_k",
        lambda a, b: bench("gemm.partition_k.matmul_partition_k")(a, b, triton_reduce=True),
        torch.matmul, (draw(64, 2048).half(), draw(2048, 64).half()), 5e-2,
    )  # fmt: skip
    yield Operator("matmul_stream_k", bench("gemm.stream_k.streamk_amd_matmul"), torch.matmul,
                   (a, b), 2e-2)  # fmt: skip
    brain, whole = a.bfloat16(), torch.randint(-9, 9, (128, 96), dtype=torch.int16)
    yield Operator("matmul_bf16_int16", bench("bf16xint16_gemm.kernel.bf16xint16_matmul"),
                   lambda a, b: a @ b.bfloat16(), (brain, whole), 5e-2)  # fmt: skip
    nibbles = torch.randint(-8, 8, (512, 96))
    yield Operator(
        "matmul_int4",
        lambda a, b: bench("int4_gemm.kernel.matmul")(a, bench("int4_gemm.kernel.pack_2xint4")(b)),
        lambda a, b: a @ b.bfloat16(), (draw(64, 512).bfloat16(), nibbles), 5e-1,
    )  # fmt: skip
    yield Operator(
        "grouped_gemm", lambda a, b, c, d: bench("grouped_gemm.kernels.triton_group_gemm_fn")(
            [a, c], [b, d]
        ),
        lambda a, b, c, d: (a @ b, c @ d),
        tuple(draw(*size).half() for size in ((128, 64), (64, 128), (256, 32), (32, 128))), 2e-2,
    )  # fmt: skip
    levels = torch.randint(-2, 2, (64, 128)).bfloat16()
    yield Operator(
        "int2",
        lambda x: bench("mixed_gemm.quantize.dequantize_int2_to_bf16")(
            bench("mixed_gemm.quantize.quantize_bf16_to_int2")(x)
        ),
        torch.clone, (levels,),
    )  # fmt: skip
