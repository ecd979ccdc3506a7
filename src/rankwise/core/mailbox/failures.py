"""How an exception travels from a worker to whoever has asked: whole, and not as 255 characters.

Its text always travels; the exception object does if it can be pickled. Each process on the way up
adds where it was (`through`), so that one message tells the path without eating the error's text.
"""

import msgspec

from rankwise.base.errors import MailboxCorrupt
from rankwise.base.failure import ErrorRecord


class RemoteFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker could not do what it was asked.

    Attributes:
        error: the exception in text: type, message, traceback.
        pickled: the exception itself; empty if it cannot be pickled.
        task: what was being done, as the caller calls it.
        through: the workers that it came through, the one where it was raised first.
    """

    error: ErrorRecord
    pickled: bytes = b""
    task: str = ""
    through: tuple[str, ...] = ()

    def passed_on_by(self, worker: str) -> "RemoteFailure":
        """The same failure, one process further up."""
        return msgspec.structs.replace(self, through=(*self.through, worker))

    def __str__(self) -> str:
        place = " in ".join(self.through)
        what = f" while doing {self.task}" if self.task else ""
        return f"{place or 'a worker'}{what}: {self.error.type}: {self.error.message}"


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RemoteFailure)


def encode_failure(failure: RemoteFailure) -> bytes:
    """A failure as the body of a frame."""
    return _ENCODER.encode(failure)


def decode_failure(body: bytes) -> RemoteFailure:
    """Read it back.

    Raises:
        MailboxCorrupt: the body was cut or is none.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise MailboxCorrupt(f"a worker's failure cannot be read: {error}") from None
