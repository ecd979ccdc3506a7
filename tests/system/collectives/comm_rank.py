"""A rank without a tree: comm_rank.py RANK COUNT PATH SIZE TIMEOUT SCRIPT; prints what it comes to.

SCRIPT is what it does once it has windows: `meet` (a barrier, and what its left neighbour wrote),
`wait` (for a peer that is to be killed), `stay` (until it is killed), `late` (no windows at all).
"""

import signal
import sys

from rankwise.base.errors import RankwiseError
from rankwise.workers.comm import CommHandle


def main() -> None:
    rank, count, size = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    path, timeout, script = sys.argv[3], float(sys.argv[5]), sys.argv[6]
    try:
        with CommHandle.meet(rank, count, path, timeout) as comm:
            if script == "late":
                print("met", flush=True)
                signal.pause()
            comm.alloc_windows(size)
            window = comm.member.peer((rank + 1) % count).whole
            window[0] = 10 + rank
            comm.barrier()
            print("met", comm.member.window.whole[0], comm.window_size, flush=True)
            if script == "wait":
                comm.barrier()
            elif script == "stay":
                signal.pause()
    except RankwiseError as error:
        print(type(error).__name__, error, flush=True)


main()
