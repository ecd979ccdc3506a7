"""Streams and events: what may overlap, and what has to come first.

Commands of one stream are carried out in order, those of different streams overlap. A rank's
default stream is waited for by every call that uses it; work that is launched on another stream is
waited for only when the program says so.
"""

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankwise.base.errors import LocalProtocolError

if TYPE_CHECKING:
    from rankwise.sim.hardware.commands import CommandHandle
    from rankwise.sim.runtime.context import RuntimeContext
    from rankwise.sim.runtime.placement import Device


class Stream:
    """A queue of commands of one device.

    Attributes:
        number: what the engine calls it.
        device: the device that it belongs to.
        pes: the indexes of its PEs, counted over the whole SIP.
        last: the latest command in it.
    """

    def __init__(self, context: "RuntimeContext", number: int, device: "Device") -> None:
        self._context = context
        self.number = number
        self.device = device
        self.pes = device.pes
        self.last: CommandHandle | None = None
        self.pending_dependencies: list[CommandHandle] = []

    def tail(self) -> "tuple[CommandHandle, ...]":
        """What a command that is submitted now comes after: the latest one, and what it awaits."""
        latest = (self.last, *self.pending_dependencies)
        return tuple(handle for handle in latest if handle is not None)

    def synchronize(self) -> None:
        """Wait until everything in it is complete.

        A failure that was reported already is not raised again.
        """
        for handle in self.tail():
            if not self._context.was_waited_for(handle):
                self._context.wait(handle)

    def wait_event(self, event: "Event") -> None:
        """Let what is submitted from now on wait for what came before `event` was recorded."""
        self._come_after(event.handles)

    def wait_stream(self, other: "Stream") -> None:
        """Let what is submitted from now on wait for what is in `other`."""
        self._come_after(other.tail())

    def _come_after(self, handles: "Sequence[CommandHandle]") -> None:
        # Completed commands are left out: a stream may wait often and be given nothing to do
        # itself.
        both = dict.fromkeys((*self.pending_dependencies, *handles))
        self.pending_dependencies = [handle for handle in both if not handle.is_done]

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event here, a new one if none is given."""
        event = event or Event(self._context)
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether everything in it is complete."""
        return all(handle.is_done for handle in self.tail())

    def __repr__(self) -> str:
        return f"<Stream {self.number} of {self.device}>"


class Event:
    """A place in a stream, with the instant at which the stream has come there.

    Attributes:
        handles: the commands that lead up to the place.
    """

    def __init__(self, context: "RuntimeContext", *, enable_timing: bool = True) -> None:
        self._context = context
        self._recorded_at: int | None = None
        self.enable_timing = enable_timing
        self.handles: tuple[CommandHandle, ...] = ()

    def record(self, stream: Stream | None = None) -> None:
        """Mark the place after everything that is in the stream, the current one by default."""
        stream = stream or self._context.current_stream()
        self.handles = stream.tail()
        self._recorded_at = self._context.engine.now

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream, the current one by default, wait for this place."""
        (stream or self._context.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Wait until the stream has come here."""
        for handle in self.handles:
            self._context.wait(handle)

    def query(self) -> bool:
        """Whether the stream has come here."""
        return all(handle.is_done for handle in self.handles)

    @property
    def instant(self) -> int:
        """When the stream came here, in picoseconds of simulated time."""
        if self._recorded_at is None:
            raise LocalProtocolError("the event has not been recorded")
        instant = self._recorded_at
        for handle in self.handles:
            if handle.completed_at is None:
                raise LocalProtocolError(
                    "the event's stream has not come to it yet", hint="synchronize() first"
                )
            instant = max(instant, handle.completed_at)
        return instant

    def elapsed_time(self, end: "Event") -> float:
        """Simulated milliseconds from this event to `end`."""
        return (end.instant - self.instant) / 1e9


class StreamRegistry:
    """The streams of a context: who has which, and who uses which.

    Args:
        context: whose they are.
        ranks_per_sip: how many ranks can share a SIP; each has a default stream of its own there.
    """

    def __init__(self, context: "RuntimeContext", ranks_per_sip: int) -> None:
        # Weak, so that a context is freed with its last reference, not at the next collection.
        self._context: RuntimeContext = weakref.proxy(context)
        self._count = ranks_per_sip
        self._of_device: dict[Device, list[Stream]] = {}
        self._default: dict[Device, Stream] = {}
        self._collective: dict[tuple[Device, str], Stream] = {}
        self._chosen: dict[int, list[Stream]] = {}
        self._touching: dict[Device, list[CommandHandle]] = {}

    def make(self, device: "Device") -> Stream:
        """Make a stream with a number of its own."""
        self._count += 1
        return self._register(Stream(self._context, self._count, device))

    def default(self, device: "Device") -> Stream:
        """The default stream of a device."""
        stream = self._default.get(device)
        if stream is None:
            stream = self._register(Stream(self._context, device.index_on_sip, device))
            self._default[device] = stream
        return stream

    def for_collectives(self, device: "Device", series: str) -> Stream:
        """The stream in which a device's collectives of one series run, in their order."""
        stream = self._collective.get((device, series))
        if stream is None:
            stream = self._collective[device, series] = self.make(device)
        return stream

    def current(self, rank: int, device: "Device") -> Stream:
        """The stream that a rank's commands go to."""
        chosen = self._chosen.get(rank)
        return chosen[-1] if chosen else self.default(device)

    @contextmanager
    def chosen(self, rank: int, stream: Stream) -> Iterator[Stream]:
        """Let a rank's commands go to a stream for a while."""
        chosen = self._chosen.setdefault(rank, [])
        chosen.append(stream)
        try:
            yield stream
        finally:
            chosen.remove(stream)

    def touch(self, device: "Device", handle: "CommandHandle") -> None:
        """Note that a command of another device's stream reads or writes this device's memory."""
        pending = [each for each in self._touching.get(device, ()) if not each.is_done]
        self._touching[device] = [*pending, handle]

    def latest(
        self, devices: "Sequence[Device]", *, with_collectives: bool = True
    ) -> "tuple[CommandHandle, ...]":
        """The latest commands, as far as they are not complete, of all streams of devices."""
        left_out = () if with_collectives else set(self._collective.values())
        found: list[CommandHandle] = []
        for device in dict.fromkeys(devices):
            streams = [each for each in self._of_device.get(device, ()) if each not in left_out]
            found += [stream.last for stream in streams if stream.last is not None]
            found += self._touching.get(device, ())
        return tuple(handle for handle in found if not handle.is_done)

    def unfinished(self) -> "tuple[CommandHandle, ...]":
        """The latest commands, as far as they are not complete, of all streams."""
        return self.latest(tuple(self._of_device))

    def synchronize(
        self, device: "Device | None" = None, *, without: "Collection[CommandHandle]" = ()
    ) -> None:
        """Wait until all streams are empty, or those of one device.

        Streams whose latest command is among `without` are not waited for.
        """
        for owner, streams in list(self._of_device.items()):
            if device is None or owner == device:
                for stream in list(streams):
                    if not any(handle in without for handle in stream.tail()):
                        stream.synchronize()

    def _register(self, stream: Stream) -> Stream:
        self._of_device.setdefault(stream.device, []).append(stream)
        return stream
