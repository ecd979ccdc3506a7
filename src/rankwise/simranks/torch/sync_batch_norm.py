"""`torch.nn.SyncBatchNorm` on modelled devices: what CUDA has kernels for, computed by the CPU.

The exchange among ranks is torch's own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules._functions import SyncBatchNorm as SyncBatchNormFunction


def _of_channels(values: Tensor, like: Tensor) -> Tensor:
    """One number for each channel, to be combined with the whole."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _others(tensor: Tensor) -> list[int]:
    return [each for each in range(tensor.dim()) if each != 1]


def batch_norm_stats(batch: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean, and 1 / deviation, of each channel."""
    exact = batch.to(torch.promote_types(batch.dtype, torch.float32))
    variance, mean = torch.var_mean(exact, _others(batch), correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats_with_counts(  # noqa: PLR0917  # torch's signature
    _batch: Tensor, means: Tensor, invstds: Tensor, running_mean: Tensor | None,
    running_var: Tensor | None, momentum: float, eps: float, counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Those of all ranks together; running ones are moved towards them."""
    weights, total = counts.view(-1, 1).to(means.dtype), counts.sum()
    mean = (weights * means).sum(0) / total
    spread = invstds.pow(-2) - eps + (means - mean).square()
    variance = (weights * spread).sum(0) / total
    for running, new in (
        (running_mean, mean),
        (running_var, variance * total / (total - 1).clamp(min=1)),
    ):
        if running is not None:
            running.lerp_(new.to(running.dtype), momentum)
    return mean, (variance + eps).rsqrt()


def batch_norm_elemt(
    batch: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor,
    _eps: float,
) -> Tensor:  # fmt: skip
    """The normalised batch."""
    result = (batch - _of_channels(mean, batch)) * _of_channels(invstd, batch)
    if weight is not None:
        result = result * _of_channels(weight, batch)
    if bias is not None:
        result = result + _of_channels(bias, batch)
    return result.to(batch.dtype)


def batch_norm_backward_reduce(
    gradient: Tensor, batch: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None,
    _of_batch: bool, _of_weight: bool, _of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sums of this rank, and the gradients of weight and bias."""
    dtype = mean.dtype if weight is None else weight.dtype
    sum_dy = gradient.to(mean.dtype).sum(_others(batch))
    sum_dy_xmu = (gradient * (batch - _of_channels(mean, batch))).sum(_others(batch))
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


def batch_norm_backward_elemt(  # noqa: PLR0917  # the same
    gradient: Tensor, batch: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None,
    sum_dy: Tensor, sum_dy_xmu: Tensor, counts: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of the batch, from the sums of all ranks."""
    total = counts.sum()
    distance = batch - _of_channels(mean, batch)
    slope = _of_channels(invstd.square() * sum_dy_xmu / total, batch)
    factor = invstd if weight is None else invstd * weight
    result = gradient - _of_channels(sum_dy / total, batch) - distance * slope
    return (result * _of_channels(factor, batch)).to(batch.dtype)


KERNELS: tuple[Callable[..., Any], ...] = (
    batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt,
    batch_norm_backward_reduce, batch_norm_backward_elemt,
)  # fmt: skip


def synchronising(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """`SyncBatchNorm.forward`, which synchronises what lies on the CPU as well."""

    def synchronise(self: Any, batch: Tensor) -> Tensor:
        is_alone = not (self.training and torch.distributed.is_initialized())
        group = self.process_group or torch.distributed.group.WORLD
        size = 1 if is_alone else torch.distributed.get_world_size(group)
        if size == 1:
            return forward(self, batch)
        self._check_input_dim(batch)
        self._check_non_zero_input_channels(batch)
        momentum, is_tracked = self.momentum, self.track_running_stats
        if is_tracked:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / self.num_batches_tracked.item() if momentum is None else momentum
        running = (self.running_mean, self.running_var) if is_tracked else (None, None)
        result: Tensor = SyncBatchNormFunction.apply(
            batch, self.weight, self.bias, *running, self.eps, momentum or 0.0, group, size
        )
        return result

    return synchronise
