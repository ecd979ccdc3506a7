"""`triton.tools.mxfp`: tensors of the microscaling formats, on the host.

torch is taken from where it is: only its own users have such tensors.
"""

import sys
from abc import ABC, abstractmethod
from typing import Any, Self

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits; the fourth is the sign."""
_BIAS = 127
_NAN = 255


def _torch() -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise ImportError("triton.tools.mxfp works on tensors of torch, which is not imported")
    return torch


class _Coded(ABC):
    """What both have in common.

    Attributes:
        data: the codes, one per byte.
        size: its sizes, where values are still to be drawn.
        device: where it is.
    """

    data: Any

    def __init__(self, data: Any = None, size: Any = None, device: Any = None) -> None:
        self.device = device
        if data is not None:
            self.device = data.device
            self.data = self._coded(data)
        elif size is not None:
            self.size = size if isinstance(size, tuple) else (size,)
        else:
            raise ValueError("either data or size must be given")

    @abstractmethod
    def _coded(self, values: Any) -> Any:
        """The codes of numbers."""

    def _float32(self, dtype: Any) -> Any:
        torch = _torch()
        if dtype != torch.float32:
            raise TypeError(f"{type(self).__name__} becomes torch.float32 only, not {dtype}")
        return torch


class MXFP4Tensor(_Coded):
    """Numbers of four bits, E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign."""

    def random(self) -> Self:
        """Draw all codes with the same chance."""
        torch = _torch()
        self.data = torch.randint(0, 16, self.size, dtype=torch.uint8, device=self.device)
        return self

    def to(self, dtype: Any) -> Any:
        """The values, as `torch.float32`."""
        torch = self._float32(dtype)
        signed = (*_E2M1, *(-value for value in _E2M1))
        return torch.tensor(signed, device=self.data.device)[self.data.long()]

    def _coded(self, values: Any) -> Any:
        """The nearest codes, ties to the even one; what is too large becomes the largest."""
        torch = _torch()
        known = torch.tensor(_E2M1, device=values.device)
        size = torch.nan_to_num(values.float().abs(), nan=_E2M1[-1]).clamp(max=_E2M1[-1])
        above = torch.searchsorted(known, size).clamp(max=len(_E2M1) - 1)
        below = (above - 1).clamp(min=0)
        to_above, to_below = known[above] - size, size - known[below]
        is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
        code = torch.where(is_above, above, below)
        return (code | (torch.signbit(values).long() << 3)).to(torch.uint8)

    def to_packed_tensor(self, dim: int) -> Any:
        """Two codes per byte along an axis, the first in the lower half."""
        torch = _torch()
        data = self.data
        if not 0 <= dim < data.ndim:
            raise IndexError(f"axis {dim} of a tensor that has {data.ndim}")
        if data.shape[dim] % 2:
            last = list(data.shape)
            last[dim] = 1
            data = torch.cat([data, data.new_zeros(last)], dim)
        pairs = data.unflatten(dim, (-1, 2))
        return pairs.select(dim + 1, 0) | (pairs.select(dim + 1, 1) << 4)

    def unpack_packed_tensor(self, packed_tensor: Any, dim: int, original_shape: Any) -> Any:
        """The codes of a packed tensor, one per byte."""
        pairs = _torch().stack((packed_tensor & 15, packed_tensor >> 4), dim + 1)
        return pairs.flatten(dim, dim + 1).narrow(dim, 0, original_shape[dim])


class MXScaleTensor(_Coded):
    """Scales of eight bits, E8M0: powers of two from 2**-127 on; 255 is NaN."""

    def random(self, low: float | None = None, high: float | None = None) -> Self:
        """Draw exponents of two from those of `low` to those of `high`; all but NaN by default."""
        torch = _torch()
        ends = (_exponent(low, 0), _exponent(high, _NAN - 1))
        if ends[0] > ends[1]:
            raise ValueError(f"low is {low}, more than high, which is {high}")
        self.data = torch.randint(
            ends[0], ends[1] + 1, self.size, dtype=torch.uint8, device=self.device
        )
        return self

    def to(self, dtype: Any) -> Any:
        """The values, as `torch.float32`."""
        torch = self._float32(dtype)
        values = torch.exp2(self.data.to(torch.float32) - _BIAS)
        return values.masked_fill(self.data == _NAN, float("nan"))

    def _coded(self, values: Any) -> Any:
        """The largest powers of two that are no larger; NaN for what is not positive and finite."""
        torch = _torch()
        _, exponents = torch.frexp(values)
        is_scale = torch.isfinite(values) & (values > 0)
        codes = (exponents - 1 + _BIAS).clamp(0, _NAN - 1)
        return torch.where(is_scale, codes, _NAN).to(torch.uint8)


def _exponent(value: float | None, default: int) -> int:
    if value is None:
        return default
    torch = _torch()
    return max(0, min(_NAN - 1, int(torch.log2(torch.tensor(value))) + _BIAS))
