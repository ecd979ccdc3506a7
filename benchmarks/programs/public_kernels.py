"""Operators of public libraries of Triton kernels against torch on the CPU.

    PYTHONPATH=LIBRARIES:SOURCES rankwise sim run --triton benchmarks/programs/public_kernels.py
    … rankwise sim run --triton benchmarks/programs/public_kernels.py -- liger mamba.chunk_scan

With `--topology default` the kernels run on the simulated machine. What is not right is told with
the library's own words. Each module of `libraries` says where its library comes from; the figures
are in docs/sim/kernels.md.
"""

import sys
import time
import traceback
from importlib import import_module

import torch
from libraries import compare

LIBRARIES = (
    "liger", "fla", "mamba", "flash_attention", "bitsandbytes", "unsloth", "vllm", "sglang",
    "flag_gems", "tritonbench", "xformers",
    "conch", "optimi", "mlstm", "small",
)  # fmt: skip


def count(library: str, only: str) -> tuple[int, int]:
    """How many of a library's operators are right, of how many."""
    torch.manual_seed(0)
    right = tried = 0
    for operator in import_module(f"libraries.{library}").operators():
        if only and operator.name != only:
            continue
        tried += 1
        begun = time.process_time()
        try:
            compare(operator)
        except (Exception, SystemExit) as error:
            words = f"{type(error).__name__}: {error}".replace("\n", " ")
            print(f"{library}.{operator.name}: {words[:400]}", flush=True)
            if only:
                traceback.print_exc()
        else:
            right += 1
            if only:
                print(f"{library}.{only}: right, {time.process_time() - begun:.1f} s of CPU")
    print(f"{library}: {right} of {tried} right", flush=True)
    return right, tried


def main() -> None:
    counts = [count(*each.partition(".")[::2]) for each in sys.argv[1:] or LIBRARIES]
    print("all:", " of ".join(str(sum(column)) for column in zip(*counts, strict=True)), "right")


if __name__ == "__main__":
    main()
