"""`dispatch.yaml`, compared with the headers and the dispatcher of the torch that is installed."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
choices = pytest.importorskip("rankwise.simranks.torch.cuda_choices").choices

pytestmark = pytest.mark.torch

MACROS = {
    "lower": "AT_FORALL_LOWER_PRECISION_FP",
    "f32": "AT_FORALL_FP32",
    "f32_dtype": "AT_FORALL_FP32_SET_OPT_DTYPE",
    "promoted": "AT_FORALL_PROMOTE",
}


def test_autocast_lists_are_those_of_torchs_header() -> None:
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text()

    for kind, macro in MACROS.items():
        body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", text, re.DOTALL)
        assert body is not None, macro
        found = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
        names = [f"{name}.{overload}" if overload else name for name, overload in found]
        assert choices()["autocast"][kind] == names


def test_autocast_lists_are_complete() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    listed = {name for names in choices()["autocast"].values() for name in names}

    # Only cuDNN's own operators are missing, which no program calls.
    missing = {name.removeprefix("aten::") for name in registered} - listed
    assert missing == {"cudnn_convolution", "cudnn_convolution_transpose"}


def test_optimisers_take_lists_on_the_devices_of_torchs_table() -> None:
    from torch.utils import _foreach_utils  # noqa: PLC0415  # of an optional package

    assert set(choices()["foreach_devices"]) <= set(
        _foreach_utils._get_foreach_kernels_supported_devices()
    )
