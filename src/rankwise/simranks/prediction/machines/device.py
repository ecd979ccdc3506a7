"""What an operation takes on a device that exists, in picoseconds.

- **Matrix products**: the result is cut into tiles, which the SMs carry out in waves; a last wave
  that is not full takes as long as a full one. Several sizes of tiles are tried, and the inner
  dimension may be split, as libraries do; the best counts. A tile takes what the fitted share of
  the peak gives; smaller tiles reach less of it, since they read more per operation.
  A CPU first copies the factors into the order in which it computes: their bytes, at a rate of
  their own, and those of the result are added.
- **Attention**: the products of the kernel at a fitted share of the peak, forward and backward.
  A causal mask halves them; blocks on the diagonal are computed whole.
- **All else** takes its bytes at a fitted share of the memory's bandwidth. Operations that read
  less than their arguments (a lookup) or more than once (a softmax over long rows) are listed.

Each kernel takes at least what an empty one does. How long its host needs to hand it over is no
part of this: see `clocks_of_machines`.
"""

import math
from functools import lru_cache
from math import prod

from rankwise.sim.hardware.cost_models import PluggedCosts
from rankwise.sim.hardware.quantities import WIDTH_BYTES
from rankwise.simranks.prediction.costs import DeviceOperation
from rankwise.simranks.prediction.machines.description import DeviceSpec

_PER_SECOND = 1e12
_TILES = ((1, 1, 1.0), (1, 2, 0.93), (2, 2, 0.85), (2, 4, 0.65), (4, 4, 0.5))
"""By what the rows and columns of the largest tile are divided, and the share of its rate."""
_SPLITS = (1, 2, 4, 8)
_SPLIT_INNER_MIN = 1_024
"""Libraries split no inner dimension into parts that are shorter."""
_BLOCK = 128
"""Rows of a block of attention: on the diagonal, a causal mask saves nothing of one."""
_WIDTH, _EXPONENTS = 128, 16
"""The width of a head for which the share holds, and so many flops that an exponent costs per
column of the scores: a narrow head has as many exponents for fewer products."""
_LOOKUPS = frozenset({"embedding", "index_select", "gather", "index"})
_SCATTERS = frozenset({"embedding_dense_backward", "index_add", "scatter", "index_put"})
_PASSES = {
    # By operation: bytes that pass, divided by those of the arguments and the result.
    "_log_softmax": 1.5, "_softmax": 1.5, "_log_softmax_backward_data": 5 / 3,
    "nll_loss_forward": 0.0, "nll_loss_backward": 0.5,
}  # fmt: skip
"""A softmax over rows that no cache holds reads them twice; a loss looks at one element per row."""
_FUNCTIONS = frozenset({
    "gelu", "gelu_backward", "silu", "silu_backward", "exp", "log", "tanh", "sigmoid", "erf", "sin",
    "cos", "pow", "_softmax", "_log_softmax", "_softmax_backward_data",
    "_log_softmax_backward_data",
})  # fmt: skip
_ATTENTION = ("attention", "scaled_dot_product", "sdpa")
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_scaled_mm": (0, 1)}
"""Which of the shapes of an operation are the factors."""


class DevicePrices:
    """The prices of operations on one device.

    Args:
        device: it.
        plugged: a cost model of a plug-in, which is asked first.
    """

    def __init__(self, device: DeviceSpec, plugged: PluggedCosts | None = None) -> None:
        self._device = device
        self._plugged = plugged
        fitted = device.fitted
        self._peak = {
            name: figure.value * _PER_SECOND for name, figure in device.peak_tflops.items()
        }
        self._bandwidth = device.bandwidth.value * 1e9 * fitted.memory.value
        operands = device.operands or {}
        self._operands = {name: figure.value * 1e9 for name, figure in operands.items()}
        self._functions = 0.0 if device.functions is None else device.functions.value * 1e9
        self._vector = device.vector_tflops.value * _PER_SECOND / 2
        self._least = fitted.kernel_us.value * 1e6
        self._matrix, self._attention = fitted.matrix.value, fitted.attention.value
        self._backward = fitted.attention_backward.value
        self._tile_seconds = lru_cache(maxsize=None)(self._product_seconds)

    def times(self, device: int) -> int:
        """No device is slower than another."""
        del device
        return 1

    def bound(self, work: DeviceOperation) -> tuple[str, int]:
        """What limits it, `compute` or `memory`, and how long it takes at the full peak."""
        compute = work.flops / self._peak_of(work.dtype)
        if work.engine == "math":
            compute = work.flops / self._vector
        elif work.is_causal:
            compute /= 2
        memory = bytes_moved(work) / (self._device.bandwidth.value * 1e9)
        name = "compute" if compute > memory else "memory"
        return name, round(max(compute, memory) * _PER_SECOND)

    def at_peak(self, work: DeviceOperation) -> int:
        """How long its products take at the full peak of their type, all of them."""
        if work.engine != "gemm":
            return 0
        return round(work.flops / self._peak_of(work.dtype) * _PER_SECOND)

    def time(self, work: DeviceOperation) -> int:
        """How long its kernels take."""
        if not work.size and not work.flops:
            return 0
        answer = self._answer_of_plugin(work)
        if answer is not None:
            return answer
        return round(max(self._seconds(work) * _PER_SECOND, 0) + self._least)

    def launch(self, work: DeviceOperation, duration: int) -> int:
        """The host has a clock of its own: no launch is part of a duration."""
        del work, duration
        return 0

    def is_plugged(self, work: DeviceOperation) -> bool:
        """Whether a cost model of a plug-in says what it takes."""
        return self._answer_of_plugin(work) is not None

    def _answer_of_plugin(self, work: DeviceOperation) -> int | None:
        if self._plugged is None:
            return None
        return self._plugged.operation(work.name, work.flops, work.size, work.dtype)

    def _seconds(self, work: DeviceOperation) -> float:
        moved = bytes_moved(work) / self._bandwidth
        if work.engine == "math":
            slow = self._functions and operation_of(work.name) in _FUNCTIONS
            return max(moved, work.flops / (self._functions if slow else self._vector))
        if not work.flops:
            return moved
        if is_attention(work.name):
            return max(moved, self._attention_seconds(work))
        product = product_of(work)
        if product is None:
            return max(moved, work.flops / (self._peak_of(work.dtype) * self._matrix))
        computing = self._tile_seconds(*product, work.dtype)
        if self._operands:
            batch, rows, columns, inner = product
            read = batch * inner * (rows + columns) * WIDTH_BYTES.get(work.dtype, 4)
            written = max(0, work.size - read)
            rate = self._operands.get(work.dtype) or min(self._operands.values())
            return computing + read / rate + written / self._bandwidth
        return max(moved, computing)

    def _attention_seconds(self, work: DeviceOperation) -> float:
        is_backward = "backward" in work.name
        rate = self._peak_of(work.dtype) * (self._backward if is_backward else self._attention)
        share = 1.0
        tensors = [shape for shape in work.shapes[:3] if len(shape) > 1]
        if tensors:
            width = max(1, tensors[0][-1])
            share = (1 + _EXPONENTS / width) / (1 + _EXPONENTS / _WIDTH)
        if work.is_causal:
            rows = max((shape[-2] for shape in tensors), default=1)
            blocks = max(1, math.ceil(rows / _BLOCK))
            share *= (blocks + 1) / (2 * blocks)
        return work.flops * share / rate

    def _product_seconds(
        self, batch: int, rows: int, columns: int, inner: int, dtype: str
    ) -> float:
        """The least of all ways to cut a product, in seconds."""
        sms = self._device.sms
        per_sm = self._peak_of(dtype) * self._matrix / sms
        best = math.inf
        for over_rows, over_columns, reached in _TILES:
            height, width = self._device.tile[0] // over_rows, self._device.tile[1] // over_columns
            for tall, wide in ((height, width), (width, height)):
                tiles = batch * math.ceil(rows / tall) * math.ceil(columns / wide)
                for split in _SPLITS:
                    if split > 1 and inner / split < _SPLIT_INNER_MIN:
                        break
                    waves = math.ceil(tiles * split / sms)
                    flops = 2 * tall * wide * math.ceil(inner / split)
                    seconds = waves * flops / (per_sm * reached)
                    if split > 1:  # the parts are added
                        seconds += 4 * split * batch * rows * columns * 2 / self._bandwidth
                    best = min(best, seconds)
        return best

    def _peak_of(self, dtype: str) -> float:
        return self._peak.get(dtype, self._peak["f32"])


def is_attention(name: str) -> bool:
    """Whether an operation is attention, forward or backward."""
    return any(word in name for word in _ATTENTION)


def product_of(work: DeviceOperation) -> tuple[int, int, int, int] | None:
    """Batch, rows, columns and inner dimension of a matrix product; None for what is none."""
    places = _PRODUCTS.get(operation_of(work.name))
    if places is None or len(work.shapes) <= places[1]:
        return None
    left, right = (work.shapes[place] for place in places)
    if len(left) < 2 or len(left) != len(right):
        return None
    return prod(left[:-2]), left[-2], right[-1], left[-1]


def bytes_moved(work: DeviceOperation) -> float:
    """What passes between the device's memory and its SMs."""
    name = operation_of(work.name)
    passes = _PASSES.get(name)
    if passes is not None:
        return passes * work.size
    width = WIDTH_BYTES.get(work.dtype, 4)
    if name in _LOOKUPS and work.shapes:
        table = prod(work.shapes[0]) * width
        return float(max(0, work.size - table)) * 2
    if name in _SCATTERS and work.shapes:
        return work.size + prod(work.shapes[0]) * width
    return float(work.size)


def operation_of(name: str) -> str:
    """`mm` of `aten.mm` or `aten.mm_`."""
    operation = name.rpartition(".")[2]
    return operation.rstrip("_") if len(operation) > 1 else operation
