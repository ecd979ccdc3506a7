"""Trees are forked, and a process with threads is not."""

import threading

import pytest

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def _threads_of_earlier_tests_have_ended() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"an earlier test has left {thread!r} behind"
