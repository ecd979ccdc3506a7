"""Starts N trivial functions: `spawners.py HOW N`, and prints the seconds that it took."""

import os
import sys
import time


def nothing(index: int) -> None:
    assert index >= 0


def fork_bare(count: int) -> None:
    for index in range(count):
        if os.fork() == 0:
            nothing(index)
            os._exit(0)
    for _ in range(count):
        os.wait()


def main() -> None:
    how, count = sys.argv[1], int(sys.argv[2])
    if how == "torch":
        import torch.multiprocessing as mp  # only for this peer

        start = time.perf_counter()
        mp.spawn(nothing, nprocs=count)
    elif how == "warm":
        import rankwise  # only for this peer

        with rankwise.ForkServer() as server:
            rankwise.run(nothing, args=(0,), nprocs=1, server=server)
            start = time.perf_counter()
            rankwise.run(nothing, args=(0,), nprocs=count, server=server)
            elapsed = time.perf_counter() - start
        print(elapsed)
        return
    elif how == "fork":
        start = time.perf_counter()
        fork_bare(count)
    else:
        import rankwise  # only for this peer

        start = time.perf_counter()
        rankwise.spawn(nothing, nprocs=count, start_method=how)  # type: ignore[call-overload]  # of the command line
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main()
