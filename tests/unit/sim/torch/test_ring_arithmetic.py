"""gloo's order of additions, computed in two ways; conformance tests ask gloo itself."""

import pytest

torch = pytest.importorskip("torch")

from rankwise.simranks.torch import gloo_arithmetic  # noqa: E402  # only with torch

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("size", [2, 3, 16])
@pytest.mark.parametrize(
    "count", [1, 2, 7, 16, 1000, 4097, gloo_arithmetic._NUMBERS_AT_ONCE // 16 + 1]
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("kind", ["SUM", "PRODUCT", "MAX"])
def test_both_ways_around_the_ring_give_the_same_bits(
    size: int, count: int, dtype: str, kind: str
) -> None:
    op = getattr(torch.distributed.ReduceOp, kind)
    flats = [
        (3 * torch.randn(count, generator=torch.Generator().manual_seed(rank)))
        .clamp(-4, 4)
        .to(getattr(torch, dtype))
        for rank in range(size)
    ]
    length = gloo_arithmetic.block_elements(count, flats[0].element_size(), size)

    at_once = gloo_arithmetic._all_blocks_at_once(flats, length, op)
    one_by_one = gloo_arithmetic._block_by_block(flats, length, gloo_arithmetic._COMBINE[op])

    assert at_once.dtype is one_by_one.dtype
    assert torch.equal(at_once, one_by_one)
    if (kind, dtype) == ("SUM", "float32"):
        assert torch.allclose(at_once, torch.stack(flats).sum(0), atol=1e-4)


def test_the_first_block_begins_at_the_last_rank_and_ends_at_the_first() -> None:
    big = 2.0**24  # with float32, big + 1 is big
    flats = [torch.tensor([value, 0.0, 0.0]) for value in (-big, 1.0, big)]

    total = gloo_arithmetic.ring_reduced(flats, torch.distributed.ReduceOp.SUM)

    assert total[0].item() == 0.0  # (big + 1) - big, and not (-big + 1) + big


def test_a_premultiplied_sum_scales_before_it_adds() -> None:
    op = torch.distributed._make_nccl_premul_sum(0.5)

    result = gloo_arithmetic.ring_reduced([torch.full((3,), 3.0), torch.full((3,), 5.0)], op)

    assert result.tolist() == [4.0, 4.0, 4.0]
