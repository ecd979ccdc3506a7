"""`--check-compile`: what Triton's process is told of a kernel, and what there is without one."""

import importlib.util
from typing import Any

import numpy as np
import pytest

import rankwise.sim.triton as triton
import rankwise.sim.triton.language as tl
from rankwise.base.errors import ConfigError
from rankwise.sim.triton.compile_check import (
    check_installed,
    kernels_shown_to_triton,
    type_in_signature,
)
from rankwise.sim.triton.jit import LaunchesSeen

STRANGE = object()


@triton.jit
def mentions_an_object(p: Any) -> None:
    if STRANGE is None:
        tl.store(p, 1)


def test_without_triton_there_is_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(ConfigError, match="the package triton is not installed") as caught:
        check_installed()

    assert caught.value.hint is not None
    assert "-m pip install 'triton==3.9.*'" in caught.value.hint


def test_a_kernel_that_cannot_be_described_is_not_refused() -> None:
    said: list[str] = []

    with kernels_shown_to_triton(said.append):
        for _ in range(2):
            mentions_an_object[(1,)](np.zeros(1, np.float32))

    (line,) = said
    assert line.startswith('--check-compile: kernel "mentions_an_object": `STRANGE` holds: object')
    assert LaunchesSeen.by is None


@triton.jit(do_not_specialize=["n", 2])
def not_specialized(p: Any, n: Any, m: Any, k: Any, wide: "tl.int64") -> None:  # type: ignore[valid-type]
    tl.store(p, n + m + k + wide)


def test_an_argument_of_one_is_a_constant_unless_the_kernel_forbids_it_or_annotates_it() -> None:
    types = {
        name: type_in_signature(not_specialized, name, 1)
        for name in not_specialized.arg_names
        if name != "p"
    }

    assert types == {"n": "i32", "m": "i32", "k": "constexpr", "wide": "i64"}
