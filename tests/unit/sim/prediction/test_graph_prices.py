"""What a prediction with compiled graphs leaves behind in the process."""

import pytest

torch = pytest.importorskip("torch")

from rankwise.simranks.torch.compiled_graphs import GraphPrices  # noqa: E402  # needs torch

pytestmark = pytest.mark.torch


def prepared(remarks: list[str]) -> GraphPrices:
    prices = GraphPrices(object, remarks.append)
    prices.compile(torch.compile)(lambda x: x)
    return prices


def test_dynamo_is_as_before_when_a_prediction_is_over() -> None:
    modules = pytest.importorskip("torch._dynamo.variables.nn_module")
    functions = pytest.importorskip("torch._dynamo.variables.functions").UserFunctionVariable
    before = modules.unpatched_nn_module_call, functions.__init__

    prices = prepared([])
    during = functions.__init__
    prices.close()

    assert during is not before[1]
    assert (modules.unpatched_nn_module_call, functions.__init__) == before


def test_break_of_an_earlier_prediction_is_no_remark_of_this_one() -> None:
    counters = pytest.importorskip("torch._dynamo.utils").counters
    counters["graph_break"]["earlier"] += 1
    remarks: list[str] = []

    prepared(remarks).close()
    later = prepared(remarks)
    counters["graph_break"]["now"] += 1
    later.close()

    assert len(remarks) == 1
    counters.clear()
