"""Pickles of calls and of results.

Code that the worker can import travels by name, with the standard pickler. Other code, such as that
of `__main__`, of a notebook, a lambda or a function inside another, travels by value. Pickling by
name succeeds for classes and functions of `__main__`, too, so its name is looked for in the result.

Large buffers are collected, and copied only when the message is sent. A tensor of torch is made to
travel as a buffer; torch itself would copy it into the pickle.
"""

import copyreg
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pickle import PickleBuffer
from typing import Any

from rankwise.drivers.real.pool.array_memory import SHARE_BYTES_MIN, Buffers

_NOT_BY_NAME = (pickle.PicklingError, AttributeError, TypeError)
"""What `pickle` raises when a value cannot travel by name."""


def dumps_result(value: object) -> tuple[bytes, Buffers]:
    """Pickle what a task returned; also its large buffers."""
    buffers = Buffers()
    try:
        return _dumps_by_name(value, buffers), buffers
    except _NOT_BY_NAME:
        buffers = Buffers()
        return _dumps_by_value(value, buffers)[0], buffers


def dumps_call(value: object) -> tuple[bytes, Buffers, dict[str, Any]]:
    """Pickle what a worker is given; also the buffers, and sources of code that is in no file."""
    buffers = Buffers()
    try:
        data = _dumps_by_name(value, buffers)
    except _NOT_BY_NAME:
        data = None
    if data is None or b"__main__" in data or b"__mp_main__" in data:
        buffers = Buffers()
        data, sources = _dumps_by_value(value, buffers)
        return data, buffers, sources
    return data, buffers, {}


def _dumps_by_name(value: object, buffers: Buffers) -> bytes:
    if "torch" not in sys.modules:
        return pickle.dumps(value, 5, buffer_callback=buffers)
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5, buffer_callback=buffers)
    tables: Any = _reducers(buffers), copyreg.dispatch_table
    pickler.dispatch_table = ChainMap(*tables)
    pickler.dump(value)
    return file.getvalue()


def _dumps_by_value(value: object, buffers: Buffers) -> tuple[bytes, dict[str, Any]]:
    from rankwise.base.value_pickle import ValuePickler  # noqa: PLC0415  # takes 20 ms to import

    file = io.BytesIO()
    pickler = ValuePickler(file, 5, buffers)
    if "torch" in sys.modules:
        pickler.dispatch_table = pickler.dispatch_table.new_child(_reducers(buffers))
    pickler.dump(value)
    return file.getvalue(), pickler.sources_in_memory()


def _reducers(buffers: Buffers) -> dict[Any, Callable[[Any], Any]]:
    tensor = getattr(sys.modules["torch"], "Tensor", None)  # None while it is being imported
    return {} if tensor is None else {tensor: partial(_reduce_tensor, buffers)}


def _reduce_tensor(buffers: Buffers, tensor: Any) -> Any:
    is_plain = (
        tensor.device.type == "cpu"
        and str(tensor.layout) == "torch.strided"
        and tensor.is_leaf
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() * tensor.element_size() >= SHARE_BYTES_MIN
    )
    if not is_plain:
        return tensor.__reduce_ex__(5)
    torch = sys.modules["torch"]
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    buffer = PickleBuffer(flat)
    buffers.mark_private(buffer)
    return _rebuilt_tensor, (buffer, tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _rebuilt_tensor(buffer: Any, dtype: Any, shape: Any, requires_grad: Any) -> Any:
    torch = import_module("torch")
    tensor = torch.frombuffer(buffer, dtype=dtype).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor
