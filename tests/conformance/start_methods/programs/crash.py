"""faulthandler writes where the program asks for it, and a rank crashes."""

import faulthandler
import os
import sys

import numpy as np
from in_step import go_on_as_rank_1

faulthandler.enable(sys.stdout)
faulthandler.dump_traceback(sys.stdout)
print(np.float32(1), flush=True)
go_on_as_rank_1()
os.kill(os.getpid(), 11)
