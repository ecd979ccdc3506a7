"""Records in the journal what the ranks of this node do: calls, sections, CPU time and memory.

It is there where a run has a journal. Twice a second it looks into the memory in which ranks enter
calls and sections, which costs them nothing; CPU time and memory are read from /proc, often at
first and then every two seconds. A rank's last look is taken when it has ended, so that a run of a
tenth of a second is recorded whole. Entries that a ring holds no more at a look are lost: of a rank
that makes hundreds of calls a second a part of each half second is recorded, and the records say
which.

A run of a week must not fill the disk: see `rankwise.observe.thinning`. When looks are thinned out,
each takes the calls of the last interval only.
"""

import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import rankwise
from rankwise.base.units import MILLISECOND, SECOND, ZERO, Duration, Instant, after
from rankwise.core.gang.vocabulary import (
    RecoveryMessage,
    RecoveryMessageSent,
    WorkerExited,
    WorkerSpawned,
)
from rankwise.core.ledger import Begun, Group
from rankwise.core.matching import CallSignature
from rankwise.drivers.real.call_rings import CallReader, SeenCall, words_in
from rankwise.drivers.real.cpus import usable_cpu_count
from rankwise.drivers.real.journal import FileJournal
from rankwise.drivers.real.process_host import RealProcessHost
from rankwise.drivers.real.process_work import cpu_wait_of, usage_of
from rankwise.drivers.real.reactor import Reactor, ReactorTimer
from rankwise.drivers.real.section_ring import SectionReader
from rankwise.drivers.real.segments import Segment
from rankwise.launch.run.planning import JobPlanner
from rankwise.observe.records import (
    OF_HANDLE,
    RECORDER,
    CallsSampled,
    CallsSeen,
    GpuErrorReported,
    GpuSample,
    GpusSampled,
    RanksSampled,
    Record,
    RecordedCall,
    RecordedGroup,
    RecordedSection,
    RunDescribed,
    Sample,
    SectionsSeen,
)
from rankwise.observe.thinning import Thinning
from rankwise.ports.clock import Clock

if TYPE_CHECKING:
    from rankwise.drivers.real.gpus import GpuReading
    from rankwise.launch.looking.gpu_watch import GpuWatch

INTERVAL = Duration(500 * MILLISECOND)
SAMPLE_INTERVAL = Duration(2 * SECOND)
_FIRST_SAMPLE = Duration(125 * MILLISECOND)
BYTES_MAX, _SAMPLE_BYTES_MAX = 16 << 20, 2 << 20
"""What the records of one node may take, and the samples among them: some 600,000 calls, of which a
page is made in ten seconds."""
_CALLS_MAX, _CALLS_MIN = 4096, 16
"""How many calls a look takes in: of all ranks together (6 ms of CPU), and of each at least."""
_ALWAYS = Instant(0)
_KNOWN_MAX = 4096
"""So many texts of a rank are remembered, should each call have another shape."""
_INSTALLED = re.compile(
    r"(?P<package>torch|numpy|triton|jax|tensorflow|mpi4py|nvidia_nccl_cu\d+)-(?P<version>[^-]+)"
    r"\.dist-info"
)
_HIDDEN_NAME = r"[\w.-]*(?:token(?![a-z])|secret|passw|(?:api|access)[_-]?key|credential)[\w.-]*"
_SECRET_VALUE = re.compile(rf"\b({_HIDDEN_NAME}\s*[=:]\s*)[^,\s]+", re.IGNORECASE)
_SECRET_OPTION = re.compile(rf"--?{_HIDDEN_NAME}", re.IGNORECASE)
_PASSWORD_IN_URL = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@")
_HIDDEN = "***"


class RunRecorder:
    """Records one run.

    Args:
        journal: where to.
        host: knows the ranks' processes.
        planner: knows the memory that they share, and their place in the world.
        reactor: wakes for the next look.
        clock: tells the time of a look.
        name: the run's, as it may be shown.
        gpus: read the GPUs of this node; None where there are none.
    """

    def __init__(
        self,
        journal: FileJournal,
        host: RealProcessHost,
        planner: JobPlanner,
        reactor: Reactor,
        clock: Clock,
        *,
        name: str,
        gpus: "GpuWatch | None" = None,
    ) -> None:
        self._gpus = gpus
        if gpus is not None:
            gpus.on_xid.append(self._on_xid)
        self._name = name
        self._is_described = False
        self._journal = journal
        self._host = host
        self._planner = planner
        self._reactor = reactor
        self._clock = clock
        self._thinning = Thinning(BYTES_MAX - _SAMPLE_BYTES_MAX)
        self._samples_thinning = Thinning(_SAMPLE_BYTES_MAX)
        self._is_looking = False
        self._sample_timer: ReactorTimer | None = None
        self._attempt = -1
        self._segment: Segment | None = None
        self._ranks: dict[int, _RankReader] = {}
        self._cpp_calls_until: dict[tuple[int, int], int] = {}

    def on_stimulus(self, stimulus: WorkerSpawned | RecoveryMessageSent | WorkerExited) -> None:
        """Begin with the first rank; take a last look at one that ends or is called again."""
        if stimulus.attempt > self._attempt:  # of which no rank need be new: they are called again
            self._attempt = stimulus.attempt
            self._read_present_segment()
        if not self._is_looking:
            self._is_looking = True
            self._look_later()
            if self._sample_timer is not None:  # of the attempt before
                self._sample_timer.cancel()
            self._sample_later(_FIRST_SAMPLE)
        if _has_left(stimulus) and stimulus.attempt == self._attempt:
            self._describe()
            reader = self._ranks.pop(stimulus.local_rank, None)
            if reader is not None and self._reads_present_segment:
                self._write(reader.read(self._clock.now(), self._most, is_last=True))

    def on_cpp_calls(
        self, local_rank: int, groups: Mapping[str, Group], calls: Iterable[Begun]
    ) -> None:
        """Torch's flight recorder has told of calls that C++ has begun; some may be known."""
        since = self._cpp_calls_until.get((self._attempt, local_rank), 0)
        new = [call for call in calls if call.begun_at > since]
        if not new:
            return
        self._cpp_calls_until[self._attempt, local_rank] = max(call.begun_at for call in new)
        # Differences and indexes are short: a record has thousands of calls.
        base = min(call.begun_at for call in new)
        keys = list(dict.fromkeys(call.group for call in new))
        signatures = list(dict.fromkeys(filter(None, (call.signature for call in new))))
        record = CallsSampled(
            attempt=self._attempt,
            rank=self._planner.ranks.rank(local_rank),
            base=Instant(base),
            groups=tuple(
                RecordedGroup(key, groups[key].label, groups[key].size, groups[key].members)
                for key in keys
            ),
            signatures=tuple(signatures),
            calls=tuple(
                (
                    keys.index(each.group),
                    each.number,
                    each.begun_at - base,
                    signatures.index(each.signature),
                )
                for each in new
                if each.signature is not None
            ),
        )
        self._thinning.note(self._write([record]))

    @property
    def _most(self) -> int:
        """How many calls of a rank a look takes in."""
        return max(_CALLS_MIN, _CALLS_MAX // max(1, len(self._ranks)))

    def _read_present_segment(self) -> None:
        self._segment, ranks = self._planner.segment, self._planner.ranks
        self._ranks = {}
        if self._segment is not None:
            now = self._clock.now()
            self._ranks = {
                local_rank: _RankReader(
                    self._segment, local_rank, ranks.first_rank, self._attempt, now
                )
                for local_rank in range(self._segment.worker_count)
            }

    @property
    def _reads_present_segment(self) -> bool:
        """Whether readers are of the memory that ranks share now; that of before is closed."""
        return self._segment is not None and self._segment is self._planner.segment

    def _look_later(self) -> None:
        self._reactor.call_at(after(self._clock.now(), INTERVAL), self._look)

    def _look(self) -> None:
        if not self._host.living():
            self._is_looking = False
            return
        if self._reads_present_segment and self._thinning.takes_look():
            now, most = self._clock.now(), self._most
            since = _ALWAYS if self._thinning.every == 1 else Instant(now - INTERVAL)
            for reader in self._ranks.values():
                self._thinning.note(self._write(reader.read(now, most, since=since)))
        self._look_later()

    def _sample_later(self, pause: Duration) -> None:
        def sample() -> None:
            self._describe()
            living = self._host.living()
            if not living:
                return
            if self._samples_thinning.takes_look():
                self._samples_thinning.note(self._write([self._sampled(living)]))
                if self._gpus is not None:
                    self._gpus.read(self._on_gpus_read)
            self._sample_later(min(SAMPLE_INTERVAL, Duration(2 * pause)))

        self._sample_timer = self._reactor.call_at(after(self._clock.now(), pause), sample)

    def _describe(self) -> None:
        """Record what runs where, once the ranks are busy starting: it takes some milliseconds."""
        if not self._is_described:
            self._is_described = True
            self._write([described_run(self._name)])

    def _sampled(self, living: Mapping[int, int]) -> RanksSampled:
        samples = [
            Sample(self._planner.ranks.rank(local_rank), *usage, cpu_wait_of(pid) or ZERO)
            for local_rank, pid in sorted(living.items())
            if (usage := usage_of(pid)) is not None
        ]
        return RanksSampled(attempt=self._attempt, samples=tuple(samples))

    def _on_xid(self, text: str) -> None:
        self._write([GpuErrorReported(text=text)])

    def _on_gpus_read(self, readings: list["GpuReading"]) -> None:
        assert self._gpus is not None, "it has read them"
        samples = tuple(
            GpuSample(
                each.index,
                self._gpus.ranks_on(each.index),
                each.memory_bytes,
                each.utilisation,
                each.temperature_c,
                each.throttled_by,
                each.ecc_errors,
            )
            for each in readings
        )
        sampled = GpusSampled(attempt=self._attempt, samples=samples)
        self._samples_thinning.note(self._write([sampled]))

    def _write(self, records: Iterable[Record]) -> int:
        now = self._clock.now()
        return sum(self._journal.record(RECORDER, record, now) for record in records)


def _has_left(stimulus: WorkerSpawned | RecoveryMessageSent | WorkerExited) -> bool:
    """Whether a rank does nothing more in this attempt."""
    if isinstance(stimulus, RecoveryMessageSent):
        return stimulus.word is RecoveryMessage.YIELDED
    return isinstance(stimulus, WorkerExited)


class _RankReader:
    """Reads what one rank enters, and tells what is new as records."""

    def __init__(
        self, segment: Segment, local_rank: int, first_rank: int, attempt: int, now: Instant
    ) -> None:
        self._calls = CallReader(segment, local_rank, first_rank)
        self._sections = SectionReader(segment, local_rank)
        self._attempt = attempt
        self._rank = first_rank + local_rank
        self._complete_since = now
        self._known: dict[bytes, int] = {}
        self._groups_recorded = 0

    def read(
        self, now: Instant, most: int, *, since: Instant = _ALWAYS, is_last: bool = False
    ) -> list[Record]:
        """What is new, without calls that began before `since`."""
        records: list[Record] = []
        sections = self._sections.read(is_last=is_last)
        if sections:
            told = (
                RecordedSection(
                    each.name,
                    each.depth,
                    Instant(each.begun_at),
                    each.ended_at - each.begun_at if each.ended_at else -1,
                )
                for each in sections
            )
            records.append(
                SectionsSeen(attempt=self._attempt, rank=self._rank, sections=tuple(told))
            )
        calls, lost = self._calls.read_calls(most, is_last=is_last)
        chosen = [call for call in calls if call.begun_at >= since]
        if chosen:
            is_whole = not lost and len(chosen) == len(calls)
            complete = self._complete_since if is_whole else Instant(chosen[0].begun_at)
            records.append(self._seen(chosen, complete, now))
        self._complete_since = now
        return records

    def _seen(self, calls: Sequence[SeenCall], since: Instant, until: Instant) -> CallsSeen:
        base = calls[0].begun_at
        signatures: dict[int, tuple[CallSignature, str]] = {}
        recorded = tuple(
            RecordedCall(
                call.slot,
                call.number,
                call.begun_at - base,
                call.ended_at - call.begun_at if call.ended_at else -1,
                OF_HANDLE if call.of_handle else call.stage,
                self._number_of(call.words, signatures),
            )
            for call in calls
        )
        return CallsSeen(
            attempt=self._attempt,
            rank=self._rank,
            base=Instant(base),
            since=min(since, Instant(base)),
            until=until,
            calls=recorded,
            groups=self._new_groups(),
            signatures=signatures,
        )

    def _number_of(self, words: bytes, new: dict[int, tuple[CallSignature, str]]) -> int:
        number = self._known.get(words)
        if number is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            number = self._known[words] = len(self._known)
            new[number] = words_in(words)
        return number

    def _new_groups(self) -> dict[int, RecordedGroup]:
        told, self._groups_recorded = self._groups_recorded, len(self._calls.keys)
        groups = self._calls.groups
        return {
            number: RecordedGroup(key, groups[key].label, groups[key].size, groups[key].members)
            for number, key in enumerate(self._calls.keys[told:], told)
        }


def described_run(name: str, *, is_simulated: bool = False) -> RunDescribed:
    """What this process runs, and on which machine."""
    system = os.uname()
    return RunDescribed(
        name=name,
        command=without_secrets(command_line(sys.argv)),
        directory=os.getcwd(),  # pathlib costs milliseconds
        host=socket.gethostname(),
        rankwise=rankwise.__version__,
        python=sys.version.partition(" ")[0],
        system=f"{system.sysname} {system.release} {system.machine}",
        cpus=usable_cpu_count(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        packages=installed_versions(sys.path),
        is_simulated=is_simulated,
    )


def command_line(argv: Sequence[str]) -> tuple[str, ...]:
    """The words that started this process: `rankwise` by its name, a program by its path."""
    first = "rankwise" if os.path.basename(argv[0]) in ("rankwise", "__main__.py") else argv[0]
    return (first, *argv[1:])


def without_secrets(words: Iterable[str]) -> tuple[str, ...]:
    """The words of a command line; what stands after a name such as `--api-key` is hidden."""
    shown: list[str] = []
    is_secret = False
    for word in words:
        hidden = _PASSWORD_IN_URL.sub(f"{_HIDDEN}@", _SECRET_VALUE.sub(rf"\1{_HIDDEN}", word))
        shown.append(_HIDDEN if is_secret and not word.startswith("-") else hidden)
        is_secret = _SECRET_OPTION.fullmatch(word) is not None
    return tuple(shown)


def installed_versions(folders: Iterable[str]) -> dict[str, str]:
    """The versions of what ranks usually compute with, by the names that pip gives directories.

    `importlib.metadata` knows more, and takes as long as starting a small run.
    """
    found: dict[str, str] = {}
    for folder in folders:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in filter(None, map(_INSTALLED.fullmatch, names)):
            found.setdefault(name["package"].replace("_", "-"), name["version"])
    return dict(sorted(found.items()))
