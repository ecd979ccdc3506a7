"""A rank raises an exception with a cause and notes; the other one waits."""

import os

import numpy as np
from in_step import go_on_as_rank_1


def fail():
    try:
        np.zeros(3)[5]
    except IndexError as error:
        error.add_note("a note")
        raise ValueError("wrong value") from error


print("before", flush=True)
go_on_as_rank_1()
fail()
