"""Names for building launchers: torch's public ones are here, with torch's parameters."""

import inspect
import warnings
from collections.abc import Iterator
from importlib import import_module
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


def both(module: str, name: str) -> tuple[Any, Any]:
    return getattr(load_from(TORCH, module), name), getattr(load_from(RANKWISE, module), name)


def names_in_all_modules() -> list[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            modules = [import_module(f"{TORCH}.elastic.{module}") for module in MODULES]
    except ImportError:
        return []
    return [
        (short, name)
        for short, module in zip(MODULES, modules, strict=True)
        for name in public_names(module)
    ]


@pytest.mark.parametrize(("module", "name"), names_in_all_modules())
def test_a_name_is_here_with_torchs_parameters(module: str, name: str) -> None:
    theirs, ours = both(module, name)

    if inspect.isclass(theirs) and issubclass(theirs, BaseException):
        assert issubclass(ours, BaseException)
        return
    assert parameters(ours) == parameters(theirs)


@pytest.mark.parametrize(("module", "name"), names_in_all_modules())
def test_a_class_has_torchs_methods_with_their_parameters(module: str, name: str) -> None:
    theirs, ours = both(module, name)
    if not inspect.isclass(theirs) or issubclass(theirs, BaseException):
        pytest.skip("it is no class with methods")

    for method, value in vars(theirs).items():
        if method.startswith("_") or method in PHASES_OF_TORCHS:
            continue
        assert hasattr(ours, method), method
        if inspect.isfunction(value):
            names = [one for one, *_ in parameters(value)]
            assert [one for one, *_ in parameters(getattr(ours, method))] == names, method
