"""Handlers of signals, alarms, and a rank that ends by one."""

import os
import signal

import numpy as np
from in_step import go_on_as_rank_1

rank = os.environ["RANK"]


def on_signal(number, frame):
    print(rank, signal.Signals(number).name, frame.f_code.co_name, flush=True)


for each in (signal.SIGUSR1, signal.SIGALRM, signal.SIGHUP):
    signal.signal(each, on_signal)
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGHUP)
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print(rank, "interrupted", np.int64(3), flush=True)
go_on_as_rank_1()
os.kill(os.getpid(), signal.SIGTERM)
