"""A dispatch mode that looks at operations and changes none of them, and what such modes ask."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Classes of tensors that are what they seem; others tell by operations what they are made of."""
MOVES_NOTHING = frozenset({
    "_local_scalar_dense", "_resize_output_", "_unsafe_view", "detach", "empty", "empty_like",
    "empty_strided", "is_same_size", "lift", "lift_fresh", "new_empty", "new_empty_strided",
    "record_stream", "resize_", "resize_as_", "set_",
})  # fmt: skip
"""Operations of `aten` that move no data, besides views; what they make takes memory."""
NOT_OF_DEVICES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "prim", "profiler"})
"""Libraries of collectives, which process groups know about, and of what takes no time."""


class UnseenMode(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Lets `torch.compile` and operators of higher order work as without it."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """It changes nothing: torch.compile need not fall back because of it."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The same."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or each operation would go through dynamo's wrapper
