"""Start ranks that share a segment, watch over them as an agent does, and say how they ended.

world_host.py SEGMENT_FD SOCKET_FD...: forks one rank per socket. A rank reads pickled pairs
`(function, arguments)` from its socket, calls `function(communicator, *arguments)`, and answers
`("ok", value)` or `("error", exception)`. At end of file it exits. For every rank that ends, the
host marks it dead and prints "LOCAL_RANK CODE".
"""

import os
import pickle
import socket
import struct
import sys

import cloudpickle
import numpy  # noqa: F401, ICN001  # imported before the ranks are forked, so that they need not

from rankwise.collectives.default import communicator_from_environment
from rankwise.drivers.real.segments import Segment


def serve(rank: int, size: int, segment_fd: int, fd: int) -> None:
    channel = socket.socket(fileno=fd).makefile("rwb")
    communicator = communicator_from_environment(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "RANKWISE_SEGMENT_FD": str(segment_fd),
            "RANKWISE_COLLECTIVE_TIMEOUT": "60",
        }
    )
    while head := channel.read(4):
        function, arguments = pickle.loads(channel.read(*struct.unpack("=I", head)))
        try:
            answer = ("ok", function(communicator, *arguments))
        except Exception as error:  # noqa: BLE001  # the test decides what is expected
            answer = ("error", error)
        frame = cloudpickle.dumps(answer)
        channel.write(struct.pack("=I", len(frame)) + frame)
        channel.flush()


def main() -> None:
    segment_fd, *socket_fds = map(int, sys.argv[1:])
    segment = Segment.attach(segment_fd)
    ranks = {}
    for rank, fd in enumerate(socket_fds):
        pid = os.fork()
        if pid == 0:
            for other in socket_fds:
                if other != fd:
                    os.close(other)
            serve(rank, len(socket_fds), segment_fd, fd)
            os._exit(0)
        ranks[pid] = rank
    for fd in socket_fds:
        os.close(fd)
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        segment.mark_dead(rank)
        print(rank, os.waitstatus_to_exitcode(status), flush=True)


main()
