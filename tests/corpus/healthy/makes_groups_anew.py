"""Groups are destroyed and made again, with a new numbering of calls."""

import os
import tempfile
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["PATIENCE"])))
rank = dist.get_rank()
x = torch.ones(4)

place = [f"{tempfile.gettempdir()}/rendezvous-{uuid.uuid4()}"]
dist.broadcast_object_list(place)
dist.all_reduce(x)
dist.destroy_process_group()
time.sleep(0.2 * rank)
dist.init_process_group("gloo", init_method=f"file://{place[0]}", rank=rank, world_size=3)
dist.barrier()
dist.all_reduce(x)
dist.destroy_process_group()
