"""msgspec crashes when threads meet a type for the first time at the same moment."""

import subprocess
import sys

RUNS = 6
RACE = """
import sys, threading
from rankwise.core.rendezvous import records
from rankwise.drivers.real.stores import embedded_protocol, etcd_messages
from rankwise.drivers.real.stores.etcd_messages import decoded

RANGE = b'{"header": {"revision": "5"}, "kvs": [{"key": "YQ==", "mod_revision": "3"}]}'
WATCH = b'{"result": {"header": {"revision": "5"}, "events": [{"kv": {"key": "YQ=="}}]}}'
ASKED = embedded_protocol.encoded(embedded_protocol.ReadAsked("a"))
ROUND = records.encode(records.Round(number=0, phase=records.RoundPhase.GATHERING))
WORK = [
    lambda: decoded(RANGE, etcd_messages.RangeReply),
    lambda: decoded(WATCH, etcd_messages.WatchLine),
    lambda: embedded_protocol.decode_request(ASKED),
    lambda: records.decode_round(ROUND, "round"),
]
sys.setswitchinterval(1e-6)
together = threading.Barrier(8)

def run(work):
    together.wait()
    work()

threads = [threading.Thread(target=run, args=(WORK[index % 4],)) for index in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("all decoded")
"""


def test_threads_may_decode_their_first_messages_at_the_same_moment() -> None:
    for _ in range(RUNS):
        done = subprocess.run(
            [sys.executable, "-c", RACE], capture_output=True, text=True, check=False
        )

        assert (done.returncode, done.stdout.strip()) == (0, "all decoded"), done.stderr
