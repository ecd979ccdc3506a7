"""One rank never comes to the barrier: who is missing, and where does it stand?

`--hang-timeout` is for how long no rank may make progress before stacks are collected.
"""

import threading

import rankwise
from rankwise import collectives

if rankwise.rank() == 2:
    threading.Event().wait()  # as a data loader that waits for a file server
collectives.barrier()
