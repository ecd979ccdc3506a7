"""Random numbers of a program that seeds nothing differ by rank."""

import multiprocessing as mp
import os
import random
import uuid
from pathlib import Path

import numpy as np
import torch

values = [
    random.random(),
    np.random.random(),
    np.random.default_rng().random(),
    torch.rand(1).item(),
    torch.initial_seed(),
    uuid.uuid4(),
    bytes(mp.current_process().authkey),
]
Path(f"random-{os.environ['RANK']}").write_text("\n".join(map(str, values)))
