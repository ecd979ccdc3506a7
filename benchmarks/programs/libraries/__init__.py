"""Operators of public libraries of Triton kernels, and what each should be by torch on the CPU.

One module per library, with `operators()`. What a library imports is found in `sys.path`.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn import functional

attention: Any = functional.scaled_dot_product_attention


class Operator(NamedTuple):
    """An operator, what it should be, its operands, and how near it has to come.

    Operands that are shapes are drawn, and the gradients with respect to them are compared, too.
    """

    name: str
    ours: Callable[..., Any]
    reference: Callable[..., Any]
    operands: tuple[Any, ...]
    tolerance: float = 1e-3


def found(path: str) -> Any:
    """Something of a library, which is imported when it is called."""

    def call(*args: Any, **options: Any) -> Any:
        function = named(path)
        return getattr(function, "apply", function)(*args, **options)

    return call


def named(path: str) -> Any:
    """What a library has by that name."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def first_of(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The first of several results."""
    return call(*args, **options)[0]


def without_start(package: str) -> None:
    """Let modules of a package be imported without its `__init__`, which looks for a GPU."""
    parent, _, last = package.rpartition(".")
    roots = sys.modules[parent].__path__ if parent else sys.path
    module = ModuleType(package)
    module.__path__ = [str(Path(root) / last) for root in roots if (Path(root) / last).is_dir()]
    sys.modules[package] = module
    if parent:
        setattr(sys.modules[parent], last, module)


def compare(operator: Operator) -> None:
    """Compare results and gradients; raises what is wrong."""
    drawn = [torch.randn(each).requires_grad_() if isinstance(each, tuple) else each
             for each in operator.operands]  # fmt: skip
    ours, gradients = _results_of(operator.ours, drawn)
    wanted, wanted_gradients = _results_of(operator.reference, drawn)
    near = operator.tolerance
    torch.testing.assert_close(ours, wanted, atol=near, rtol=near, equal_nan=True)
    torch.testing.assert_close(gradients, wanted_gradients, atol=5 * near, rtol=5 * near)


def _results_of(function: Callable[..., Any], drawn: list[Any]) -> tuple[list[Any], list[Any]]:
    operands = [
        each.detach().clone().requires_grad_(each.requires_grad)
        if isinstance(each, torch.Tensor)
        else each
        for each in drawn
    ]
    results = function(*operands)
    results = list(results) if isinstance(results, tuple | list) else [results]
    leaves = [each for each in operands if isinstance(each, torch.Tensor) and each.requires_grad]
    if leaves:
        torch.manual_seed(1)
        torch.autograd.backward(results, [torch.randn(each.shape) for each in results])
    return [each.detach() for each in results], [each.grad for each in leaves]
