"""Start ranks that share a segment, watch over them as an agent does, and say how they ended.

world_host.py [--domain=SPEC] FD SOCKET_FD...: forks one rank per socket. A rank reads pickled
pairs `(function, arguments)` from its socket, calls `function(communicator, *arguments)`, and
answers `("ok", value)` or `("error", exception)`. At end of file it exits. For every rank that
ends, the host marks it dead and prints "LOCAL_RANK CODE". FD is a segment's, or with SPEC that of
the domain's region, and the communicator a member of the domain.
"""

import os
import pickle
import socket
import struct
import sys

import cloudpickle
import msgspec

from rankwise.collectives.communicator import Communicator
from rankwise.collectives.default import communicator_from_environment
from rankwise.drivers.real.segments import Segment
from rankwise.drivers.real.windows import WindowRegion
from rankwise.workers.domains import DomainSpec
from rankwise.workers.member import Member


def communicate(rank: int, size: int, segment_fd: int) -> Communicator:
    return communicator_from_environment(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "RANKWISE_SEGMENT_FD": str(segment_fd),
            "RANKWISE_COLLECTIVE_TIMEOUT": "60",
        }
    )


def serve(communicator: Communicator, fd: int) -> None:
    channel = socket.socket(fileno=fd).makefile("rwb")
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
    words = sys.argv[1:]
    spec = None
    if words[0].startswith("--domain="):
        spec = msgspec.json.decode(words.pop(0).removeprefix("--domain="), type=DomainSpec)
    memory_fd, *socket_fds = map(int, words)
    memory = Segment.attach(memory_fd) if spec is None else WindowRegion.attach(memory_fd)
    ranks = {}
    for rank, fd in enumerate(socket_fds):
        pid = os.fork()
        if pid == 0:
            for other in socket_fds:
                if other != fd:
                    os.close(other)
            if isinstance(memory, WindowRegion):
                serve(Member.join(memory, rank, spec), fd)
            else:
                serve(communicate(rank, len(socket_fds), memory_fd), fd)
            os._exit(0)
        ranks[pid] = rank
    for fd in socket_fds:
        os.close(fd)
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if isinstance(memory, WindowRegion):
            memory.mark_dead(rank, f"exit code {code}")
        else:
            memory.mark_dead(rank)
        print(rank, code, flush=True)


main()
