"""The names under which agents and pools can be reached, and who is at the other end.

An agent's name is `rankwise/<uid>/<run id>/<pid>`, a pool's `rankwise-pool/<uid>/<name>/<pid>`, in
the abstract namespace of unix sockets, with a digest for the id where that is what nodes know each
other by: all users see these names. Such a name lives in the kernel only: it is gone with the
process, there is no file to leave behind, and `/proc/net/unix` lists all of them, which is how runs
are found without a registry. Abstract names have no permissions, so both ends check the other's
user (SO_PEERCRED): an agent answers its own user and root; a client believes only a process that
has the user and the pid of the name.
"""

import os
import re
import socket
import struct

_RUN_ID_BYTES_MAX = 60  # an abstract name has room for 107 bytes
_DIGEST = re.compile(r"run-[0-9a-f]{8}")
_CREDENTIALS = struct.Struct("=iII")


def shown_id(run_id: str, *, is_secret: bool) -> str:
    """A run's id, or where that is a secret, a name that tells runs apart."""
    if not is_secret:
        return run_id
    from hashlib import sha256  # noqa: PLC0415  # takes ms, and few runs need it

    return f"run-{sha256(run_id.encode()).hexdigest()[:8]}"


def may_hide_id(shown: str) -> bool:
    """Whether that may be the digest of an id, which only its agent tells."""
    return _DIGEST.fullmatch(shown) is not None


def socket_name(run_id: str, pid: int, uid: int | None = None, *, is_pool: bool = False) -> bytes:
    """The abstract name under which the agent `pid` of a run, or a pool, can be reached."""
    quoted = re.sub(rb"[^A-Za-z0-9._-]", lambda byte: b"%%%02X" % byte[0][0], os.fsencode(run_id))
    # Cut between escapes, so that what a reader makes of the name leads back to the same name.
    shortened = re.sub(rb"%[0-9A-F]?\Z", b"", quoted[:_RUN_ID_BYTES_MAX])
    family = b"rankwise-pool" if is_pool else b"rankwise"
    return b"\0%s/%d/%s/%d" % (family, os.geteuid() if uid is None else uid, shortened, pid)


def parse_name(shown: str, *, is_pool: bool = False) -> tuple[str, int, int] | None:
    """Read run id, pid and uid from a name as /proc/net/unix shows it, with `@` for the zero byte.

    None when the name is not one of ours.
    """
    parts = shown.split("/")
    if len(parts) != 4 or parts[0] != ("@rankwise-pool" if is_pool else "@rankwise"):
        return None
    _, uid, quoted, pid = parts
    if not (uid.isdecimal() and pid.isdecimal()):
        return None
    raw = re.sub(rb"%([0-9A-F]{2})", lambda hexed: bytes([int(hexed[1], 16)]), quoted.encode())
    return os.fsdecode(raw), int(pid), int(uid)


def peer(connection: socket.socket) -> tuple[int, int]:
    """The pid and the uid of the process at the other end, as the kernel noted them."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid
