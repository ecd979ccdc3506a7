"""bitsandbytes' quantisation and optimisers in Triton.

pip install --target LIBRARIES --no-deps bitsandbytes==0.50.2
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, named


def kernels(path: str) -> Any:
    return named(f"bitsandbytes.backends.triton.kernels_{path}")


def nearest(x: Any, code: Any) -> tuple[Any, Any]:
    """The places in the code that are nearest to the values, by blocks of 64."""
    blocks = x.view(-1, 64)
    largest = blocks.abs().amax(1)
    return ((blocks / largest[:, None])[..., None] - code).abs().argmin(-1), largest


def rounded(x: Any, code: Any) -> Any:
    """What is left of values that were quantised."""
    places, largest = nearest(x, code)
    return (code[places] * largest[:, None]).view(x.shape)


def four_bits(x: Any, kind: str) -> Any:
    packed, largest = (
        torch.empty(x.numel() // 2, 1, dtype=torch.uint8),
        torch.empty(x.numel() // 64),
    )
    kernels("4bit.quantize_4bit_blockwise_triton")(
        x, 64, kind, x.numel() // 128, largest, num_elements=x.numel(), quantized_out=packed
    )
    back = torch.empty_like(x)
    kernels("4bit.dequantize_4bit_impl")(packed, largest, 64, kind, x.dtype, out=back)
    return back


def eight_bits(x: Any, code: Any) -> Any:
    packed, largest = kernels("8bit_quant.quantize_blockwise_triton")(x, code, 64)
    return kernels("8bit_quant.dequant_8bit_blockwise")(packed, largest, code, 64, x.dtype)


def product_of_4_bits(x: Any, weight: Any, code: Any) -> Any:
    places, largest = nearest(weight, code)
    pairs = places.reshape(-1, 2).to(torch.uint8)
    packed, back = pairs[:, 0] << 4 | pairs[:, 1], torch.empty_like(weight)
    kernels("4bit.dequantize_4bit_impl_passing_code")(packed, largest, 64, code, x.dtype, out=back)
    return functional.linear(x, back)


LR, BETA1, BETA2, EPS = 0.01, 0.9, 0.99, 1e-8


def step_of(name: str) -> Any:
    def step(gradient: Any, p: Any, first: Any, second: Any) -> Any:
        kernels("optim.optimizer_update_32bit_impl")(
            name,
            gradient,
            p,
            first,
            second,
            None,
            0.0,
            0.0,
            BETA1,
            BETA2,
            0.0,
            0.0,
            EPS,
            0.0,
            3,
            LR,
        )
        return p

    return step


def adam(g: Any, p: Any, first: Any, second: Any) -> Any:
    first, second = BETA1 * first + (1 - BETA1) * g, BETA2 * second + (1 - BETA2) * g * g
    return p - LR * (first / (1 - BETA1**3)) / ((second / (1 - BETA2**3)).sqrt() + EPS)


def adam_of_8_bits(g: Any, p: Any, first: Any, second: Any, signed: Any, unsigned: Any) -> Any:
    (a, largest), (b, largest2) = nearest(first, signed), nearest(second, unsigned)
    # Its blocks are of 256: all have the same scale here.
    kernels("optim.optimizer_update_8bit_blockwise_impl")(
        "adam", g, p, a.to(torch.uint8).view(-1), b.to(torch.uint8).view(-1), BETA1, BETA2, 0.0, 0.0,
        EPS, 3, LR, signed, unsigned, largest[::4].clone(), largest2[::4].clone(),
    )  # fmt: skip
    return p


def operators() -> Iterator[Operator]:
    code_of = named("bitsandbytes.functional.get_4bit_type")
    maps = named("bitsandbytes.functional.create_dynamic_map")
    signed, unsigned = maps(signed=True), maps(signed=False)
    x, weight = torch.randn(1024), torch.randn(32, 64)
    for kind in ("nf4", "fp4"):
        code = code_of(kind, device="cpu")
        yield Operator(kind, lambda x, kind=kind: four_bits(x, kind),
                       lambda x, code=code: rounded(x, code), (x,))  # fmt: skip
        yield Operator(
            f"linear_{kind}", lambda x, w, code=code: product_of_4_bits(x, w, code),
            lambda x, w, code=code: functional.linear(x, rounded(w, code)),
            (torch.randn(3, 64), weight),
        )  # fmt: skip
    yield Operator("blockwise_8bit", eight_bits, rounded, (x, signed))
    state = torch.randn(1024), torch.randn(1024), torch.randn(1024), torch.rand(1024)
    yield Operator("adam", step_of("adam"), adam, state)
    yield Operator("momentum", step_of("momentum"),
                   lambda g, p, m, _: p - LR * (m * BETA1 + g), state)  # fmt: skip
    yield Operator("lion", step_of("lion"),
                   lambda g, p, m, _: p - LR * (m * BETA1 + (1 - BETA1) * g).sign(), state)  # fmt: skip
    yield Operator("adagrad", step_of("adagrad"),
                   lambda g, p, m, _: p - LR * g / ((m + g * g).sqrt() + EPS),
                   (*state[:2], torch.rand(1024), None))  # fmt: skip
    yield Operator("rmsprop", step_of("rmsprop"),
                   lambda g, p, m, _: p - LR * g / ((BETA1 * m + (1 - BETA1) * g * g).sqrt() + EPS),
                   (*state[:2], torch.rand(1024), None))  # fmt: skip
    first, second = torch.randn(1024).clamp(-1, 1), torch.rand(1024)
    first[::64] = second[::64] = 1.0
    yield Operator(
        "adam_8bit", adam_of_8_bits,
        lambda g, p, a, b, s, u: adam(g, p, rounded(a, s), rounded(b, u)),
        (*state[:2], first, second, signed, unsigned),
    )  # fmt: skip
