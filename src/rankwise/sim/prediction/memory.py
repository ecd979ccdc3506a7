"""What a device's memory holds, and what a caching allocator would keep of it."""


class DeviceMemory:
    """Bytes on one device.

    Attributes:
        used: that live now.
        reserved: that an allocator holds: what it was given it keeps until it is told to empty its
            cache. It never splits memory badly, so it holds no more than has lived at once.
        peak, reserved_peak: the most of both since the program reset them.
        peak_of_run: the most of `used` in the whole run.
        taken: the sum of all that was ever taken.
    """

    __slots__ = ("peak", "peak_of_run", "reserved", "reserved_peak", "taken", "used")

    def __init__(self) -> None:
        self.used = self.reserved = self.taken = 0
        self.peak = self.reserved_peak = self.peak_of_run = 0

    def take(self, size: int) -> None:
        """Take bytes, or give them back if they are negative."""
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

    def empty_cache(self) -> None:
        """Keep no more than is used."""
        self.reserved = self.used
