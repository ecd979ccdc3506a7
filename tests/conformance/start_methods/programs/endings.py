"""What happens at the end: exit functions, threads, files left open, destructors."""

import atexit
import os
import threading
import weakref

import numpy as np

rank = os.environ["RANK"]


class Last:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        print(rank, "destroyed", self.name, flush=True)


atexit.register(print, rank, "exit function 1")
atexit.register(print, rank, "exit function 2")
left_open = open(f"left-open-{rank}", "w")
left_open.write("all of it\n" * 100)
public, _private = Last("public"), Last("private")
cycle = [Last("in a cycle")]
cycle.append(cycle)
finalizer = weakref.finalize(np.ones(3), print, rank, "finalized")
kept = np.ones(3)
at_exit = weakref.finalize(kept, print, rank, "finalized at exit")
end_of_body = threading.Event()
threading.Thread(target=lambda: (end_of_body.wait(), print(rank, "thread", flush=True))).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(rank, "body")
end_of_body.set()
