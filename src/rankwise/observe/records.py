"""The lines that an agent records of its ranks in the run's journal, besides facts and orders.

Facts and orders tell how a run was decided. These records tell what its ranks did meanwhile;
nothing is decided by them. They are written by `rankwise.launch.looking.rank_records`, and read by
`rankwise.observe.story`. Instants are nanoseconds of the node's monotonic clock.
"""

from collections.abc import Mapping

import msgspec

from rankwise.base.units import ZERO, Duration, Instant
from rankwise.core.matching import CallSignature

RECORDER = "recorder"
"""The recorder: its name as a `machine` in the journal."""
OF_HANDLE = 4
"""The stage of a wait for the handle of a call that the rank has issued before."""
BEGUN_BY_CPP = 5
"""The stage of a call of `CallsSampled`."""


class RunDescribed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The program, its machine, and its versions. Comes once.

    Attributes:
        name: the run's name; where that is what nodes know each other by, one made of it.
        command: the words of the command line; what looks like a secret is left out.
        directory: where it was given.
        host: the machine.
        rankwise, python: versions of this package and of the ranks' interpreter's parent.
        system: the kernel.
        cpus: how many CPUs the agent may use.
        memory: of the machine, in bytes.
        packages: versions of what ranks usually compute with, as far as it is installed.
        is_simulated: whether the ranks are (`--on sim`), so that times are virtual.
    """

    name: str
    command: tuple[str, ...]
    directory: str
    host: str
    rankwise: str
    python: str
    system: str
    cpus: int
    memory: int
    packages: Mapping[str, str] = {}
    is_simulated: bool = False


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """The use of one rank's process: CPU time so far, and memory now, in bytes.

    `cpu_wait` is for how long it was ready to run and had no CPU, so far.
    """

    rank: int
    cpu: Duration
    memory: int
    cpu_wait: Duration = ZERO


class RanksSampled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The use of the processes of all ranks here at that instant."""

    attempt: int
    samples: tuple[Sample, ...]


class GpuSample(msgspec.Struct, frozen=True, array_like=True):
    """One GPU at an instant: see `drivers.real.gpus.GpuReading`; what is not told is None.

    Attributes:
        gpu: its number on its node.
        ranks: those that were seen on it last.
        memory: in use, of all processes, in bytes.
        utilisation: 0 to 1.
        celsius: its temperature.
        throttled_by: why its clocks are slow.
        errors: uncorrectable errors of its memory since the driver was loaded.
    """

    gpu: int
    ranks: tuple[int, ...]
    memory: int | None
    utilisation: float | None
    celsius: int | None
    throttled_by: tuple[str, ...]
    errors: int | None = None


class GpusSampled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The state of the GPUs of this node at that instant."""

    attempt: int
    samples: tuple[GpuSample, ...]


class GpuErrorReported(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver has reported an XID error, in words: `GPU 3 (rank 3) reported XID 79 …`."""

    text: str


class RecordedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group of ranks: its key, what people call it, its size, and its members on this node."""

    key: str
    label: str
    size: int
    members: tuple[int, ...]


class RecordedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call that a rank has made: instants count from the record's `base`.

    Attributes:
        group: the number of its group; -1 for a message to one rank.
        number: which of the group's calls it was.
        begun: when the rank came to it.
        lasted: until it had ended or was issued; -1 while the rank is in it.
        stage: how far it has come, see `core.ledger.Stage`; or `OF_HANDLE`.
        what: the number of its signature.
    """

    group: int
    number: int
    begun: int
    lasted: int
    stage: int
    what: int


class CallsSeen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Collective calls of one rank.

    Attributes:
        attempt, rank: whose calls.
        base: from where instants count.
        since, until: between these instants no call is missing.
        groups, signatures: those that are new, by their numbers in this attempt of the rank; with a
            signature comes the line that has called it.
        calls: in their order.
        texts: the operation in words instead of its signature, in journals of earlier versions.
    """

    attempt: int
    rank: int
    base: Instant
    since: Instant
    until: Instant
    calls: tuple[RecordedCall, ...]
    groups: Mapping[int, RecordedGroup] = {}
    signatures: Mapping[int, tuple[CallSignature, str]] = {}
    texts: Mapping[int, tuple[str, str]] = {}


class CallsSampled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Calls that C++ has begun by itself in one rank; their ends are unknown.

    They are a sample: what torch's flight recorder had when it was read.

    Attributes:
        attempt, rank: whose calls.
        base: from where instants count.
        groups, signatures: those of these calls.
        calls: of each the place of its group, its number there, when it was begun, and the place of
            its signature.
        texts: operations in words instead of signatures, in journals of earlier versions.
    """

    attempt: int
    rank: int
    base: Instant
    groups: tuple[RecordedGroup, ...]
    calls: tuple[tuple[int, int, int, int], ...]
    signatures: tuple[CallSignature, ...] = ()
    texts: tuple[str, ...] = ()


class RecordedSection(msgspec.Struct, frozen=True, array_like=True):
    """A section: how many others it lies in, when it began, how long it lasted (-1: it is open)."""

    name: str
    depth: int
    begun_at: Instant
    lasted: int


class SectionsSeen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sections of one rank (`rankwise.section`)."""

    attempt: int
    rank: int
    sections: tuple[RecordedSection, ...]


Record = (
    RunDescribed
    | RanksSampled
    | GpusSampled
    | GpuErrorReported
    | CallsSeen
    | CallsSampled
    | SectionsSeen
)
