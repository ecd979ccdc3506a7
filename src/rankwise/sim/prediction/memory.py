"""What a device's memory holds, and what a caching allocator would keep of it."""

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
    """

    __slots__ = (
        "book", "limit", "peak", "peak_of_run", "reserved", "reserved_peak", "taken", "used",
    )  # fmt: skip

    def __init__(self) -> None:
        self.used = self.reserved = self.taken = 0
        self.peak = self.reserved_peak = self.peak_of_run = 0
        self.limit: int | None = None
        self.book: HolderBook | None = None

    def take(self, size: int, holder: Holder | None = None) -> None:
        """Take bytes, or give them back if they are negative.

        Raises:
            DeviceFull: there are fewer, and a limit is enforced.
        """
        if self.limit is not None and size > 0 and self.used + size > self.limit:
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
