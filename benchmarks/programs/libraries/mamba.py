"""mamba's operators; where it has a reference in torch itself, that one.

SOURCES/mamba in PYTHONPATH, where SOURCES/mamba is a checkout
pip install --target LIBRARIES --no-deps einops packaging
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from libraries import Operator, first_of, found, without_start


def mamba(path: str) -> Any:
    return found(f"mamba_ssm.ops.triton.{path}")


def sums_within_chunks(steps: Any) -> Any:
    return steps.view(2, 2, 32, 4).permute(0, 3, 1, 2).cumsum(-1)


def operators() -> Iterator[Operator]:
    without_start("mamba_ssm")
    flat, wide = (8, 64), (64,)
    normed = functional.layer_norm
    yield Operator(
        "layer_norm", mamba("layer_norm.layer_norm_fn"),
        lambda x, w, b: normed(x, [64], w, b), (flat, wide, wide),
    )  # fmt: skip
    yield Operator(
        "rms_norm_gated",
        lambda x, w, z: mamba("layernorm_gated.rmsnorm_fn")(x, w, None, z, 1e-5, None, False),
        lambda x, w, z: functional.rms_norm(x * functional.silu(z), [64], w, 1e-5),
        (flat, wide, flat),
    )  # fmt: skip
    yield Operator(
        "swiglu", mamba("k_activations.SwiGLU"),
        lambda x: functional.silu(x[:, :32]) * x[:, 32:], (flat,),
    )  # fmt: skip
    draw = torch.randn
    state = draw(2, 32, 16)
    inputs = draw(2, 32), torch.rand(2, 32), -torch.rand(32, 16), draw(2, 16), draw(2, 16), draw(32)
    gate, bias = draw(2, 32), torch.rand(32)

    def with_state(path: str) -> Any:
        return lambda state, *a: (mamba(path)(state, *a, dt_softplus=True), state)

    yield Operator(
        "selective_state_update", with_state("selective_state_update.selective_state_update"),
        with_state("selective_state_update.selective_state_update_ref"), (state, *inputs, gate, bias),
    )  # fmt: skip
    yield Operator(
        "bmm_chunk", lambda a, b: mamba("ssd_bmm._bmm_chunk_fwd")(a, b, 32),
        lambda a, b: torch.einsum("bcld,bcsd->bcls", a.view(2, 2, 32, 32), b.view(2, 2, 32, 32)),
        (draw(2, 64, 32), draw(2, 64, 32)), 5e-3,
    )  # fmt: skip
    yield Operator(
        "chunk_cumsum", lambda *a: first_of(mamba("ssd_chunk_state._chunk_cumsum_fwd"), *a, 32),
        lambda dt, a: sums_within_chunks(dt * a), (torch.rand(2, 64, 4), -torch.rand(4)),
    )  # fmt: skip
    b, x, dt = draw(1, 64, 2, 16), draw(1, 64, 4, 16), torch.rand(1, 4, 2, 32)
    decays = -(torch.rand(1, 4, 2, 32) * 0.1).cumsum(-1)
    yield Operator(
        "chunk_state", mamba("ssd_chunk_state.chunk_state"),
        mamba("ssd_chunk_state.chunk_state_ref"), (b, x, dt, decays), 5e-3,
    )  # fmt: skip
    yield Operator(
        "state_passing", mamba("ssd_state_passing.state_passing"),
        mamba("ssd_state_passing.state_passing_ref"), (draw(2, 4, 3, 40), -torch.rand(2, 3, 4)),
    )  # fmt: skip
    yield Operator(
        "chunk_scan", mamba("ssd_chunk_scan.chunk_scan"), mamba("ssd_chunk_scan.chunk_scan_ref"),
        (b, draw(1, 64, 2, 16), x, dt, decays, draw(1, 2, 4, 16, 16)), 5e-3,
    )  # fmt: skip

    def combined(path: str) -> Any:
        return lambda x, dt, a, b, c: mamba(f"ssd_combined.{path}")(
            x, functional.softplus(dt), -a.abs() / 4, b, c, 32
        )

    yield Operator(
        "chunk_scan_combined", combined("mamba_chunk_scan_combined"),
        combined("ssd_chunk_scan_combined_ref"),
        ((1, 64, 4, 16), (1, 64, 4), (4,), (1, 64, 2, 16), (1, 64, 2, 16)), 5e-3,
    )  # fmt: skip
    yield Operator(
        "segment_sums", lambda a: first_of(
            mamba("mamba3.mamba3_mimo_utils.compute_dacs_segsum_triton"), a, 16
        ),
        lambda a: a.view(2, 3, 4, 16).cumsum(-1).view(2, 3, 64), (-torch.rand(2, 3, 64),),
    )  # fmt: skip
    yield Operator(
        "angle_dt", lambda *a: mamba("mamba3.angle_dt.angle_dt_fwd")(*a, chunk_size=16),
        lambda angle, dt: (torch.tanh(angle) * torch.pi * dt.transpose(1, 2)[..., None]).cumsum(1),
        (draw(2, 64, 3, 8), torch.rand(2, 3, 64)),
    )  # fmt: skip
