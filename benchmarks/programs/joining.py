"""Some nodes of a rendezvous, a thread each: they join one round, and stay until the input ends.

    joining.py KIND NODES FIRST COUNT PORT RUN

KIND is `etcd` or `embedded` (ours), `torch` (its dynamic rendezvous on TCPStore), or `bare`: a
lease, a key, one watch on one key, as few requests to etcd as any protocol can make. This process
is nodes FIRST to FIRST + COUNT - 1 of NODES. It prints `up`, waits for a line, and prints for each
node the instant at which it knew its rank, and the rank.
"""

import json
import os
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

KIND, RUN = sys.argv[1], sys.argv[6]
NODES, FIRST, COUNT, PORT = map(int, sys.argv[2:6])
KEPT: list[Any] = []
"""What must live as long as the process."""

Join = Callable[[], int]


def ours(index: int) -> Join:
    from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig
    from rankwise.core.rendezvous.machine import Rendezvous
    from rankwise.core.rendezvous.vocabulary import (
        AnnounceWaiting,
        Effect,
        Joined,
        NodeReady,
        Refused,
        Settled,
    )  # fmt: skip
    from rankwise.drivers.real.clock import SystemClock
    from rankwise.drivers.real.rendezvous_thread import RendezvousThread
    from rankwise.drivers.real.stores.opening import open_store

    settings = {"is_host": "false", "token": "benchmark"} if KIND == "embedded" else {}
    store = open_store(KIND, f"127.0.0.1:{PORT}", settings, run_id=RUN)
    offer = NodeOffer(node_id=f"n{index:07x}", host=f"h{index}", address="127.0.0.1", slots=8)
    settled = threading.Event()
    told: list[Effect] = []

    def on_tiding(tiding: Effect) -> None:
        if isinstance(tiding, AnnounceWaiting):
            print(f"{KIND}: node {index} waits {tiding.text}", file=sys.stderr, flush=True)
        if isinstance(tiding, Settled | Refused):
            told.append(tiding)
            settled.set()

    config = RendezvousConfig(nodes_min=NODES, nodes_max=NODES)
    thread = RendezvousThread(Rendezvous(RUN, config, offer), store, SystemClock(), on_tiding)
    KEPT.append(thread)

    def join() -> int:
        thread.tell(Joined())
        thread.tell(NodeReady(0, 29500))
        settled.wait()
        assert isinstance(told[0], Settled), told
        return told[0].world.node_rank

    return join


def torch_dynamic(_index: int) -> Join:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"127.0.0.1:{PORT}",
        run_id=RUN,
        min_nodes=NODES,
        max_nodes=NODES,
        local_addr="127.0.0.1",
        is_host="0",
        read_timeout="300",
    )
    backend, store = create_backend(parameters)
    handler = create_handler(store, backend, parameters)
    KEPT.append(handler)

    def join() -> int:
        rank: int = handler.next_rendezvous().rank
        return rank

    return join


def bare(index: int) -> Join:
    from http.client import HTTPConnection

    asking, watching = HTTPConnection("127.0.0.1", PORT), HTTPConnection("127.0.0.1", PORT)
    KEPT.append((asking, watching))

    def text(words: str) -> str:
        return b64encode(words.encode()).decode()

    def ask(path: str, body: Any) -> Any:
        asking.request("POST", path, json.dumps(body))
        return json.loads(asking.getresponse().read())

    me, members, roster = f"{RUN}/m/{index:06d}", f"{RUN}/m/", f"{RUN}/roster"

    def join() -> int:
        watching.request("POST", "/v3/watch", json.dumps({"create_request": {"key": text(roster)}}))
        told = watching.getresponse()
        told.readline()
        lease = ask("/v3/lease/grant", {"TTL": "30"})["ID"]
        span = {"key": text(members), "range_end": text(f"{RUN}/m0")}
        put = {"key": text(me), "value": text("127.0.0.1"), "lease": lease}
        counting = {"request_range": {**span, "count_only": True}}
        done = ask("/v3/kv/txn", {"success": [{"request_put": put}, counting]})
        if int(done["responses"][1]["response_range"]["count"]) == NODES:
            keys = [each["key"] for each in ask("/v3/kv/range", span)["kvs"]]
            ask("/v3/kv/put", {"key": text(roster), "value": text(" ".join(keys))})
        while True:
            events = json.loads(told.readline())["result"].get("events")
            if events:
                return b64decode(events[0]["kv"]["value"]).decode().split().index(text(me))

    return join


def main() -> None:
    make = {"torch": torch_dynamic, "bare": bare}.get(KIND, ours)
    joins = [make(FIRST + index) for index in range(COUNT)]
    begun = threading.Event()
    results: list[tuple[int, int]] = []

    def run(join: Join) -> None:
        begun.wait()
        rank = join()
        results.append((time.monotonic_ns(), rank))

    threads = [threading.Thread(target=run, args=(join,), daemon=True) for join in joins]
    for thread in threads:
        thread.start()
    print("up", flush=True)
    sys.stdin.readline()
    begun.set()
    for thread in threads:
        thread.join()
    print(json.dumps(results), flush=True)
    sys.stdin.read()
    os._exit(0)


main()
