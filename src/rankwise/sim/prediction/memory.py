"""What a device's memory holds, and what a caching allocator would keep of it."""

from heapq import heappop, heappush

from rankwise.sim.prediction.holders import Holder, HolderBook


class DeviceFull(Exception):  # an event, which the rank's own error tells
    """More bytes are taken than the device has.

    Attributes:
        wanted: that would be in use.
        taker: who wants them.
    """

    def __init__(self, wanted: int, taker: Holder | None) -> None:
        super().__init__(wanted, taker)
        self.wanted = wanted
        self.taker = taker


class DeviceMemory:
    """Bytes on one device.

    Attributes:
        used: that live now.
        reserved: that an allocator holds: what it was given it keeps until it is told to empty its
            cache. It never splits memory badly, so it holds no more than has lived at once.
        peak, reserved_peak: the most of both since the program reset them.
        peak_of_run: the most of `used` in the whole run.
        taken: the sum of all that was ever taken.
        limit: how much there is, if that is to be enforced; otherwise None.
        book: who holds it, if that is to be told; otherwise None.
        awaited: bytes of `used` that the program has freed, and streams still use.
    """

    __slots__ = (
        "_freed", "_order", "awaited", "book", "limit", "peak", "peak_of_run", "reserved",
        "reserved_peak", "taken", "used",
    )  # fmt: skip

    def __init__(self) -> None:
        self.used = self.reserved = self.taken = self.awaited = 0
        self._freed: list[tuple[int, int, int, Holder | None]] = []
        self._order = 0
        self.peak = self.reserved_peak = self.peak_of_run = 0
        self.limit: int | None = None
        self.book: HolderBook | None = None

    def take(self, size: int, holder: Holder | None = None) -> None:
        """Take bytes, or give them back if they are negative.

        Raises:
            DeviceFull: there are fewer, and a limit is enforced.
        """
        if size > 0 and self.is_too_much(size):
            raise DeviceFull(self.used + size, holder)
        if self.book is not None:
            self.book.note(holder, size)
        used = self.used = self.used + size
        if size > 0:
            self.taken += size
            self.peak = max(self.peak, used)
            self.peak_of_run = max(self.peak_of_run, used)
            self.reserved = max(self.reserved, used)
            self.reserved_peak = max(self.reserved_peak, self.reserved)

    def is_too_much(self, size: int) -> bool:
        """Whether so many bytes more than are used are more than there are."""
        return self.limit is not None and self.used + size > self.limit

    def await_bytes(self, time: int, size: int, holder: Holder | None) -> None:
        """Keep bytes that are freed, until an instant of the device."""
        self._order += 1
        heappush(self._freed, (time, self._order, size, holder))
        self.awaited += size

    @property
    def next_instant(self) -> int:
        """When the first bytes of those that are awaited are free."""
        return self._freed[0][0]

    def give_back_until(self, time: int) -> None:
        """Give back what is free at an instant."""
        while self._freed and self._freed[0][0] <= time:
            _, _, size, holder = heappop(self._freed)
            self.awaited -= size
            self.take(-size, holder)

    def reset_peaks(self) -> None:
        """Begin the peaks that the program asks for anew."""
        self.peak, self.reserved_peak = self.used, self.reserved

    def forget_peaks(self) -> None:
        """Begin anew: what was in use was not on the device."""
        self.peak = self.reserved = self.reserved_peak = self.peak_of_run = self.used
        if self.book is not None:
            self.book.forget()

    def empty_cache(self) -> None:
        """Keep no more than is used."""
        self.reserved = self.used
