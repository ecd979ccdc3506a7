"""Names for building launchers: torch's public ones are here, with torch's parameters."""

import inspect
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from elastic_sides import RANKWISE, TORCH, load_from

pytestmark = pytest.mark.torch

MODULES = [
    f"rendezvous.{name}"
    for name in (
        "api",
        "c10d_rendezvous_backend",
        "dynamic_rendezvous",
        "etcd_rendezvous",
        "etcd_rendezvous_backend",
        "etcd_server",
        "etcd_store",
    )
] + ["multiprocessing.api", "multiprocessing.tail_log"]
PHASES_OF_TORCHS = frozenset(
    {
        # EtcdRendezvous does its protocol in these; `rendezvous_barrier` is all of them.
        "announce_self_waiting", "confirm_membership", "confirm_phase",
        "create_path_if_not_exists", "get_rdzv_state", "handle_existing_rendezvous",
        "handle_join_last_call", "init_phase", "join_phase", "join_rendezvous",
        "setup_lease_renewal", "try_create_rendezvous", "try_wait_for_state_change",
        "wait_for_final", "wait_for_peers", "wait_for_rendezvous_to_free",
    }
)  # fmt: skip
NOT_HERE = frozenset({"cas_delay", "get_method_name"})
"""Helpers of torch's mechanisms that have no underscore."""


def public_names(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        is_own = getattr(value, "__module__", None) == module.__name__
        if is_own and callable(value) and not name.startswith("_") and name not in NOT_HERE:
            yield name


def parameters(value: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults; a default that is a function or a class is only its presence."""
    return [
        (one.name, one.kind, "..." if callable(one.default) else str(one.default))
        for one in inspect.signature(value).parameters.values()
    ]


def both(module: str) -> Iterator[tuple[str, Any, Any]]:
    """Each public name of torch's, and what it is there and here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, ours = load_from(TORCH, module), load_from(RANKWISE, module)
    for name in public_names(theirs):
        yield name, getattr(theirs, name), getattr(ours, name, None)


def is_exception(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


@pytest.mark.parametrize("module", MODULES)
def test_names_are_here_with_torchs_parameters(module: str) -> None:
    names = list(both(module))
    callables = [each for each in names if not is_exception(each[1])]

    assert [
        name for name, theirs, ours in names if is_exception(theirs) != is_exception(ours)
    ] == []
    assert {name: parameters(ours) for name, _, ours in callables} == {
        name: parameters(theirs) for name, theirs, _ in callables
    }


@pytest.mark.parametrize("module", MODULES)
def test_classes_have_torchs_methods_with_their_parameters(module: str) -> None:
    for _, theirs, ours in both(module):
        if not inspect.isclass(theirs) or is_exception(theirs):
            continue
        for method, value in vars(theirs).items():
            if method.startswith("_") or method in PHASES_OF_TORCHS:
                continue
            assert hasattr(ours, method), method
            if inspect.isfunction(value):
                names = [one for one, *_ in parameters(value)]
                assert [one for one, *_ in parameters(getattr(ours, method))] == names, method
