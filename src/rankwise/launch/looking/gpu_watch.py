"""What the GPUs of this node do during a run: errors, slow clocks, and what is read of them.

It is loaded where a device file shows a GPU and the extra `gpu` is installed. NVML may hang with a
broken card, so all reading is done in one thread, and nothing here waits for it longer than
`PATIENCE`: a report then tells what was known before.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from queue import SimpleQueue

from rankwise.base.units import (
    MILLISECOND,
    SECOND,
    Duration,
    Instant,
    after,
    between,
    format_duration,
)
from rankwise.base.wording import counted, ranks_in_words
from rankwise.drivers.real.gpus import (
    GpuReading,
    Xid,
    listen_for_xids,
    open_gpus,
    uses_of,
)
from rankwise.drivers.real.reactor import Reactor
from rankwise.launch.telling.notices import Say
from rankwise.ports.clock import Clock

PATIENCE = Duration(2 * SECOND)
FIRST_LOOK, LOOK_PAUSE = Duration(5 * SECOND), Duration(60 * SECOND)
"""When it is seen which rank is on which GPU: once they have begun, and then every minute."""
XID_RECENT = Duration(60 * SECOND)
"""For how long a failure is told of an XID before it."""
THROTTLED_SHARE_MIN = 0.1
THROTTLED_TIME_MIN = Duration(100 * MILLISECOND)
_XIDS_MAX = 16

_XID_NAMES = {
    13: "graphics engine exception",
    31: "memory page fault",
    43: "processing stopped",
    45: "channels torn down",
    48: "double-bit ECC error",
    62: "microcontroller halt",
    63: "memory rows remapped",
    64: "remapping of memory rows failed",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "no answer of its GSP",
    120: "GSP error",
    140: "uncorrected ECC error",
}
"""The numbers that NVIDIA's catalogue of XID errors explains, as far as they are common."""

OnReadings = Callable[[list[GpuReading]], None]


class GpuWatch:
    """Watches the GPUs of one node for one run.

    Args:
        reactor: has what was read delivered in its thread.
        clock: tells how long ago something was.
        say: tells the user of XID errors at once.
        leaders: the ranks' processes, by rank.

    Attributes:
        on_xid: are told of each XID error, in words.
    """

    def __init__(
        self, reactor: Reactor, clock: Clock, say: Say, leaders: Callable[[], Mapping[int, int]]
    ) -> None:
        self._reactor = reactor
        self._clock = clock
        self._say = say
        self._leaders = leaders
        self.on_xid: list[Callable[[str], None]] = []
        self._first: dict[int, GpuReading] = {}
        self._latest: dict[int, GpuReading] = {}
        self._gpus_of: dict[int, frozenset[int]] = {}
        """The GPUs of each rank, as they were seen last: a rank that has ended is on none."""
        self._began_at = self._read_at = clock.now()
        self._xids: list[Xid] = []
        self._xid_counts: Counter[int] = Counter()
        self._stop_listening: Callable[[], None] | None = None
        self._wanted: SimpleQueue[Callable[[list[GpuReading]], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="rankwise-gpus", daemon=True)
        self._thread.start()
        self.read(self._note)
        self._look_later(FIRST_LOOK)

    def read(self, on_readings: OnReadings) -> None:
        """Read all GPUs in the thread; call back in the reactor's, unless there are none."""

        def post(readings: list[GpuReading]) -> None:
            self._reactor.post(partial(self._deliver, readings, on_readings))

        self._wanted.put(post)

    def ranks_on(self, index: int) -> tuple[int, ...]:
        """The ranks that were seen on a GPU last; empty where that is not known."""
        return tuple(rank for rank, gpus in sorted(self._gpus_of.items()) if index in gpus)

    def has_gpu(self, rank: int) -> bool:
        """Whether the rank was seen on a GPU."""
        return bool(self._gpus_of.get(rank))

    def describe_xids(self) -> list[str]:
        """The latest XID errors of this run, in words: `GPU 3 (rank 3) reported XID 79 …`."""
        return [f"{self._label(xid.gpu)} reported {_name(xid.number)}" for xid in self._xids]

    def xid_counts(self) -> dict[int, int]:
        """How many XID errors each GPU has reported in this run."""
        return dict(self._xid_counts)

    def lines(self, at: Instant) -> tuple[str, ...]:
        """What a failure at that time is told with: errors and slow clocks of this node's GPUs."""
        self._read_now()
        return (*self._xid_lines(at), *self._ecc_lines(), *self.throttling())

    def throttling(self, rank: int | None = None) -> tuple[str, ...]:
        """The GPUs, all or a rank's, whose clocks were slow for a notable part of the run."""
        lines = []
        for index, latest in self._latest.items():
            if rank is not None and rank not in self.ranks_on(index):
                continue
            lasted = max(1, between(self._began_at, self._read_at))
            before = self._first[index].throttled_ns.get("thermal")
            now = latest.throttled_ns.get("thermal")
            if before is None or now is None:
                reasons = [why for why in latest.throttled_by if why != "power cap"]
                if reasons:
                    lines.append(f"{self._label(index)} is throttled ({', '.join(reasons)}) now")
            elif now - before >= THROTTLED_SHARE_MIN * lasted and lasted >= THROTTLED_TIME_MIN:
                share = min(1.0, (now - before) / lasted)
                lines.append(
                    f"{self._label(index)} was throttled (thermal) for {share:.0%} of the run"
                )
        return tuple(lines)

    def close(self) -> None:
        """Stop watching. The thread ends by itself, as soon as NVML lets it."""
        if self._stop_listening is not None:
            self._stop_listening()
        self._timer.cancel()
        self._wanted.put(None)

    def _look_later(self, pause: Duration) -> None:
        def look() -> None:
            self.read(self._note)
            self._look_later(LOOK_PAUSE)

        self._timer = self._reactor.call_at(after(self._clock.now(), pause), look)

    def _read(self) -> None:
        """In the thread: open NVML, and read when asked."""
        gpus = open_gpus()
        if gpus is None:
            return
        while (deliver := self._wanted.get()) is not None:
            deliver(gpus.read())
            if self._stop_listening is None:  # the first reading is what later ones are compared to
                self._stop_listening = listen_for_xids(gpus, self._post_xid)
        if self._stop_listening is not None:
            self._stop_listening()

    def _post_xid(self, xid: Xid) -> None:
        """In the thread of events."""
        self._reactor.post(partial(self._on_xid, xid))

    def _on_xid(self, xid: Xid) -> None:
        self._xids = [*self._xids[-_XIDS_MAX + 1 :], xid]
        self._xid_counts[xid.gpu] += 1
        self._read_now()  # its ranks may be about to end
        for on_xid in self.on_xid:
            on_xid(f"{self._label(xid.gpu)} reported {_name(xid.number)}")
        self._say(f"{self._label(xid.gpu)} reported {_name(xid.number)}", "gpu-xid",
                  gpu=xid.gpu, xid=xid.number, ranks=self.ranks_on(xid.gpu))  # fmt: skip

    def _read_now(self) -> None:
        """Read before a report; without an answer in time, the last one serves."""
        answered = threading.Event()
        answers: list[list[GpuReading]] = []

        def deliver(readings: list[GpuReading]) -> None:
            answers.append(readings)
            answered.set()

        if self._latest:
            self._wanted.put(deliver)
            answered.wait(PATIENCE / SECOND)
        for readings in answers:
            self._note(readings)

    def _deliver(self, readings: list[GpuReading], on_readings: OnReadings) -> None:
        self._note(readings)
        if on_readings != self._note:
            on_readings(readings)

    def _note(self, readings: list[GpuReading]) -> None:
        self._read_at = self._clock.now()
        self._latest = {each.index: each for each in readings}
        self._first = {**self._latest, **self._first}
        leaders = {pid: rank for rank, pid in self._leaders().items()}
        for pid, use in uses_of(readings, leaders).items():
            self._gpus_of[leaders[pid]] = frozenset(use.gpus)

    def _label(self, index: int) -> str:
        ranks = self.ranks_on(index)
        return f"GPU {index} ({ranks_in_words(ranks)})" if ranks else f"GPU {index}"

    def _xid_lines(self, at: Instant) -> Iterable[str]:
        for xid in self._xids:
            if xid.at > at:
                yield (
                    f"{self._label(xid.gpu)} reported {_name(xid.number)} "
                    f"{format_duration(between(at, xid.at))} later"
                )
            elif between(xid.at, at) <= XID_RECENT:
                yield (
                    f"{self._label(xid.gpu)} reported {_name(xid.number)} "
                    f"{format_duration(between(xid.at, at))} earlier"
                )

    def _ecc_lines(self) -> Iterable[str]:
        for index, latest in self._latest.items():
            before = self._first[index].ecc_errors
            if latest.ecc_errors is None or before is None or latest.ecc_errors <= before:
                continue
            errors = counted(latest.ecc_errors - before, "uncorrectable memory error")
            yield f"{self._label(index)} had {errors} in this run"


def _name(xid: int) -> str:
    name = _XID_NAMES.get(xid)
    return f"XID {xid} ({name})" if name else f"XID {xid}"
