"""A place to meet, which prints its port and serves until its input ends.

serving.py embedded|tcpstore
"""

import sys


def main() -> None:
    if sys.argv[1] == "embedded":
        from rankwise.base.units import SECOND, Duration
        from rankwise.drivers.real.clock import SystemClock
        from rankwise.drivers.real.stores.embedded import EmbeddedConfig, open_embedded

        config = EmbeddedConfig(
            host="127.0.0.1", port=0, token=b"benchmark", is_host=True, linger=Duration(SECOND)
        )
        store = open_embedded(config, SystemClock())
        assert store.server is not None
        print(store.server.address[1], flush=True)
    else:
        from torch.distributed import TCPStore

        tcp = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, wait_for_workers=False)
        print(tcp.port, flush=True)
    sys.stdin.read()


main()
