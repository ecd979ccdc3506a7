"""Simulated ranks take the tensors that gloo takes, and refuse what gloo refuses or gets wrong."""

import json
import sys
from pathlib import Path

import pytest
from preloaded import Preloaded
from running import Running

PROGRAM = Path(__file__).with_name("layouts_of_tensors.py")
OF_GLOO: dict[str, str] = json.loads(PROGRAM.with_name("layouts_of_gloo.json").read_text())


def expected(cell: str, outcome: str) -> str:
    """What simulated ranks do."""
    operation, layout, dtype, *_ = cell.split(", ")
    # Of complex numbers torch makes real ones of one more dimension, which has no such format.
    if (operation, layout, dtype) == ("all_to_all_single_output", "channels last", "complex64"):
        return "refused"
    # gloo writes as many numbers as the tensor seems to have, past its end if there is nothing.
    return "refused" if outcome == "wrong" or layout == "expanded" else outcome


@pytest.mark.torch
@pytest.mark.system
def test_simulated_ranks_refuse_what_gloo_refuses_or_gets_wrong(preloaded: Preloaded) -> None:
    finished = preloaded.run(
        "run", "--on=sim", "--nproc-per-node=2", "--no-prefix", PROGRAM, "gloo"
    )

    assert finished.code == 0, finished.stderr
    simulated = json.loads(finished.stdout)
    different = {
        cell: (outcome, simulated[cell])
        for cell, outcome in OF_GLOO.items()
        if simulated[cell] != expected(cell, outcome)
        and not ("expanded" in cell and simulated[cell] == outcome)
    }
    assert different == {}
    assert simulated.keys() == OF_GLOO.keys()


@pytest.mark.torch
@pytest.mark.system
def test_simulated_ranks_refuse_what_torch_refuses_before_nccl(preloaded: Preloaded) -> None:
    names = ("all_reduce", "all_gather_into_tensor_input", "scatter_output", "send")
    finished = preloaded.run(
        "run", "--on=sim", "--nproc-per-node=2", "--no-prefix", "--device=cuda", PROGRAM,
        "nccl", *names,
    )  # fmt: skip

    assert finished.code == 0, finished.stderr
    for cell, outcome in json.loads(finished.stdout).items():
        operation, layout, *_ = cell.split(", ")
        is_taken = operation == "send" or layout in {
            "contiguous", "part of a tensor", "channels last",
        }  # fmt: skip
        if layout == "channels last" and "complex" in cell:
            continue  # torch hands complex numbers over as real ones, of one more dimension
        assert (cell, outcome) == (cell, "right" if is_taken else "refused")


@pytest.mark.torch
@pytest.mark.system
def test_the_record_of_gloo_is_that_of_the_installed_torch() -> None:
    words = ("-m", "torch.distributed.run", "--nproc-per-node=2", str(PROGRAM), "gloo")
    with Running(sys.executable, *words, "broadcast_receiver", "scatter_output") as running:
        finished = running.finish()

    assert finished.code == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert found == {cell: OF_GLOO[cell] for cell in found}
