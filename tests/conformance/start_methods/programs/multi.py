"""multiprocessing with each start method, pools, subprocesses and a fork of the program's own."""

import multiprocessing as mp
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np


def square(number):
    return int(np.square(number))


if __name__ == "__main__":
    rank = os.environ["RANK"]
    print(rank, mp.current_process().name, mp.parent_process(), mp.get_start_method())
    for method in ("fork", "spawn", "forkserver"):
        with mp.get_context(method).Pool(1) as pool:
            print(rank, method, pool.map(square, range(4)))
    with ProcessPoolExecutor(1) as executor:
        print(rank, list(executor.map(square, range(3))))
    command = [sys.executable, "-c", "import os; print(os.environ['RANK'], os.getppid())"]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    print(rank, words[0] == rank, words[1] == str(os.getpid()))
    sys.stdout.flush()
    if not (pid := os.fork()):
        print(rank, "child", flush=True)
        os._exit(4)
    print(rank, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
