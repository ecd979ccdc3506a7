"""Messages between PEs that nobody received are told at the end, by sender and receiver."""

import pytest

import rankwise.sim.triton.language as tl
from rankwise.base.errors import LocalProtocolError
from rankwise.sim import GraphEngine, RuntimeContext


def sends(count: tl.constexpr) -> None:
    if tl.program_id(0) == 0:
        for _ in range(count):
            tl.send(1, tl.full((16,), 1.0, tl.float32))


def receives(count: tl.constexpr) -> None:
    if tl.program_id(0) == 1:
        for _ in range(count):
            tl.recv(0, (16,), tl.float32)


def test_what_was_sent_and_never_received_is_told_when_the_context_ends() -> None:
    message = (
        r"no rank received: 2 slots from sip0\.cube0\.pe0 to sip0\.cube0\.pe1 "
        r"\(every tl.send needs its tl.recv"
    )
    with (
        pytest.raises(LocalProtocolError, match=message),
        RuntimeContext(GraphEngine("default"), ccl={}) as torch,
    ):
        torch.launch(sends, 2, count=2)


def test_another_launch_may_receive_it() -> None:
    with RuntimeContext(GraphEngine("default"), ccl={}) as torch:
        torch.launch(sends, 2, count=2)
        torch.launch(receives, 2, count=2)

        assert torch.now > 0


def sends_and_fails() -> None:
    with RuntimeContext(GraphEngine("default"), ccl={}) as torch:
        torch.launch(sends, 2, count=1)
        raise ZeroDivisionError


def test_the_error_that_ended_the_program_is_not_hidden_by_it() -> None:
    with pytest.raises(ZeroDivisionError):
        sends_and_fails()
