"""`tl.extra.cuda`: what NVIDIA's devices have beyond the language."""

from rankwise.sim.triton.language.extra import libdevice
from rankwise.sim.triton.refusals import refusing


def gdc_wait() -> None:
    """Wait for the launch before; it is over when a launch begins."""


def gdc_launch_dependents() -> None:
    """Let the next launch begin; it begins when this one is over."""


__all__ = ["gdc_launch_dependents", "gdc_wait", "libdevice"]

_OF_HARDWARE = "it asks about an NVIDIA device"
__getattr__ = refusing(
    "triton.language.extra.cuda",
    {
        **dict.fromkeys(("globaltimer", "num_threads", "num_warps", "smid"), _OF_HARDWARE),
        **dict.fromkeys(
            ("convert_custom_float8_sm70", "convert_custom_float8_sm80"),
            "the format float8e4b15 is software for older NVIDIA devices",
        ),
    },
)
