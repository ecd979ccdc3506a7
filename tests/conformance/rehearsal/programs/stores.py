"""Stores that the program makes itself, and groups over them."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder = os.environ["CHECKPOINT"] + ".store"

files = dist.FileStore(folder, size)
if rank == 0:
    server = dist.TCPStore(
        "127.0.0.1", 0, size, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    files.set("port", str(server.port))
    store = server
else:
    port = int(files.get("port"))
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
assert isinstance(store, dist.TCPStore)
assert isinstance(store, dist.Store)
assert not isinstance(files, dist.TCPStore)

store.set(f"from {rank}", f"hello {rank}")
received = [store.get(f"from {other}").decode() for other in range(size)]
print(f"rank {rank}: {received}", flush=True)
if store.add("count", 1) == size:
    store.set("all", "here")
if rank % 2:
    store.wait(["all"], timedelta(seconds=60))
else:
    while not store.check(["all"]):
        pass
print(f"rank {rank}: {store.get('count').decode()} {store.check(['never'])}", flush=True)

mine = dist.PrefixStore("inner", dist.PrefixStore("outer", store.clone()))
mine.queue_push("work", f"of {rank}")
mine.set("key", "value")
store.wait(["outer/inner/key"])
print(f"rank {rank}: {mine.clone().get('key').decode()} {mine.list_keys()}", flush=True)
if rank == 0:
    taken = sorted(mine.queue_pop("work").decode() for _ in range(size))
    print(taken, mine.queue_len("work"), "outer/inner/key" in store.list_keys(), flush=True)
    try:
        mine.queue_pop("work", block=False)
    except dist.QueueEmptyError as error:
        print(error, flush=True)
try:
    files.queue_len("work")
except NotImplementedError as error:
    print(str(error).partition(":")[0].rstrip("."), flush=True)

patience = timedelta(milliseconds=100)
for each in (mine, store):
    each.set_timeout(patience)
    waits = (each.get, each.queue_pop, lambda key: each.wait([key], patience))  # noqa: B023
    for wait in waits:
        try:
            wait("never")
        except dist.DistStoreError as error:
            print(str(error).partition(",")[0], flush=True)
    each.set_timeout(timedelta(seconds=60))

dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(f"rank {rank}: {total.item()}", flush=True)
dist.barrier()
dist.destroy_process_group()

dist.init_process_group("gloo", init_method=f"file://{folder}.two", rank=rank, world_size=size)
dist.all_reduce(total)
print(f"rank {rank}: {total.item()}", flush=True)
dist.barrier()
dist.destroy_process_group()
