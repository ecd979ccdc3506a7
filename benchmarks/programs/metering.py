"""Forwards connections to a port of this machine and counts what passes, both ways together.

    metering.py PORT

Prints the port it listens on; then, for each line of input, the bytes since the last one.
"""

import os
import selectors
import socket
import sys


class Meter:
    """One thread that forwards for everybody."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.selector = selectors.DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.others: dict[socket.socket, socket.socket] = {}
        self.count = 0

    def run(self) -> None:
        """Forward, and answer how much, until the input ends."""
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(sys.stdin, selectors.EVENT_READ)
        print(self.listener.getsockname()[1], flush=True)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    self.accept()
                elif isinstance(key.fileobj, socket.socket):
                    self.forward(key.fileobj)
                elif not os.read(0, 1):
                    return
                else:
                    print(self.count, flush=True)
                    self.count = 0

    def accept(self) -> None:
        """Connect a client with the target."""
        near, _ = self.listener.accept()
        far = socket.create_connection(("127.0.0.1", self.target))
        for one, other in ((near, far), (far, near)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.others[one] = other
            self.selector.register(one, selectors.EVENT_READ)

    def forward(self, source: socket.socket) -> None:
        """Pass on what has come."""
        sink = self.others.get(source)
        if sink is None:
            return
        try:
            data = source.recv(1 << 18)
            self.count += len(data)
            sink.sendall(data)
        except OSError:
            data = b""
        if not data:
            for one in (source, sink):
                self.selector.unregister(one)
                del self.others[one]
                one.close()


Meter(int(sys.argv[1])).run()
