"""A chip's place in a communicator: the windows of all ranks, as memory that the chip can use."""

import ctypes
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import TreeValueError
from rankwise.workers.bootstrap import ChipCommBootstrapConfig
from rankwise.workers.comm import CommHandle
from rankwise.workers.platforms.port import Device

if TYPE_CHECKING:
    from rankwise.drivers.real.windows import WindowRegion

RegionSource = Callable[[ChipCommBootstrapConfig], "WindowRegion"]
"""Finds the windows of a communicator that an ancestor has made, by its `rootinfo_path`."""
_HEAD = struct.Struct("=IIQ")


class ChipCommunicator:
    """One rank of a communicator, from when it takes its place until it leaves.

    Raises:
        ConfigError: there is no such rank, or the ranks do not agree on how many they are.
        CollectiveTimeout, PeerDied: the ranks meet by themselves, and one does not come.
    """

    def __init__(
        self, number: int, config: ChipCommBootstrapConfig, source: RegionSource | None
    ) -> None:
        config.check()
        self.number = number
        self.config = config
        self._table: Any = None
        self._attached: list[int] = []
        self.windows: CommHandle
        """Those of all ranks, and who this one is, once they exist."""
        if source is None:
            self.windows = CommHandle.meet(config.rank, config.nranks, config.rootinfo_path)
            return
        region = source(config)
        if region.rank_count != config.nranks:
            raise TreeValueError(
                f"communicator {config.rootinfo_path!r} has {region.rank_count} ranks, but rank "
                f"{config.rank} was told {config.nranks}",
                hint="all ranks must give the same nranks",
            )
        self.windows = CommHandle.within(region, config.rank)

    @property
    def table_address(self) -> int:
        """Where kernels find the windows: u32 rank, u32 ranks, u64 bytes, u64 each address."""
        assert self.windows.member is not None, "it is made with the windows"
        return ctypes.addressof(self._table)

    def alloc_windows(self, device: Device, size: int) -> None:
        """Get the windows of all ranks, and let the device use them.

        Raises:
            ConfigError: the ranks do not agree on the size, or what exists is smaller.
            CollectiveTimeout, PeerDied: the ranks meet by themselves, and one does not come.
        """
        self.windows.alloc_windows(size)
        region = self.windows.member.region
        count, actual = region.rank_count, region.window_bytes
        addresses = [region.window_address(rank) for rank in range(count)]
        content = _HEAD.pack(self.config.rank, count, actual)
        content += struct.pack(f"={count}Q", *addresses)
        self._table = (ctypes.c_char * len(content)).from_buffer_copy(content)
        name = self.config.rootinfo_path
        self._attach(device, ctypes.addressof(self._table), len(content), f"device_ctx of {name!r}")
        if actual:
            for rank, address in enumerate(addresses):
                self._attach(device, address, actual, f"window of rank {rank} of {name!r}")

    def leave(self, device: Device) -> None:
        """Release the windows, without waiting: what peers still use stays theirs."""
        for address in reversed(self._attached):
            device.detach(address)
        self._attached = []
        self.windows.destroy()

    def _attach(self, device: Device, address: int, size: int, name: str) -> None:
        device.attach(address, size, name)
        self._attached.append(address)
