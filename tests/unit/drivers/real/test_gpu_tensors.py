"""What a rank's tensors hold when memory is short; here on torch's device without memory."""

import gc
from typing import Any

import pytest

from rankwise.drivers.real.worker.gpu_tensors import held_in_words, note_on_memory

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _no_others() -> None:
    gc.unfreeze()  # a command that ran in this process has set aside what was there, tensors too
    gc.collect()


def test_each_storage_counts_once_by_its_kind() -> None:
    network = torch.nn.Linear(1024, 1024, bias=False, device="meta")
    optimizer = torch.optim.AdamW(network.parameters(), foreach=False)
    network(torch.empty(8, 1024, device="meta")).sum().backward()
    optimizer.step()
    activations = [torch.empty(512, 1024, device="meta") for _ in range(3)]
    views = [each.view(-1)[:10] for each in activations]

    told = held_in_words(torch, "meta")

    assert told.startswith(
        "parameters 4 MiB, gradients 4 MiB, optimizer state 8 MiB, other tensors 6"
    )
    assert "3 of (512, 1024) float32 6 MiB" in told
    assert len(views) == 3


class Sharded(torch.Tensor):  # type: ignore[name-defined, misc]  # it may be missing
    """As a DTensor: it says that it has memory, which another tensor has."""

    @staticmethod
    def __new__(cls: Any, local: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, local.shape, device=local.device)
        made.local = local
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any, kwargs: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default
        return cls(args[0].local)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["local"], None


def test_tensor_in_another_counts_once_and_for_its_kind() -> None:
    parameter = torch.nn.Parameter(Sharded(torch.empty(1 << 20, device="meta")))

    told = held_in_words(torch, "meta")

    assert told == "parameters 4 MiB"
    assert parameter.requires_grad


def test_error_of_torch_gets_the_note_once_and_others_do_not() -> None:
    tensor = torch.empty(1 << 20, device="meta")
    error, other = torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("out of memory")

    for each in (error, error, other):
        note_on_memory(each, "meta")

    (note,) = error.__notes__
    assert note.startswith("this rank's tensors: other tensors 4")
    assert not hasattr(other, "__notes__")
    assert tensor.shape == (1 << 20,)


def test_rank_without_such_tensors_has_no_note() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.")

    note_on_memory(error)

    assert not hasattr(error, "__notes__")
