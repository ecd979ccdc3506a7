"""`ChipWorker`: one chip and the process that owns it, without a worker above.

Life: `init` once, then `set_device` or `bootstrap_context`, tasks and memory, then
`shutdown_bootstrap` or `reset_device`, `finalize` at the end. Memory that was not freed by then is
listed in `leaks`. One thread uses it at a time.

A communicator's windows are memory that all its ranks have mapped. The chip uses them like its own:
pointers into its window, and into its peers', are `child_memory`.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from rankwise.base.errors import LocalProtocolError, TreeError, TreeValueError
from rankwise.core.tasks.calls import ChipCallConfig
from rankwise.workers.arguments import TaskArgs
from rankwise.workers.bootstrap import (
    ChipBootstrapChannel,
    ChipBootstrapConfig,
    ChipBootstrapResult,
    ChipCommBootstrapConfig,
    place_buffers,
)
from rankwise.workers.callables import ChipCallable
from rankwise.workers.chip_communicator import ChipCommunicator, RegionSource
from rankwise.workers.errors import BadArguments
from rankwise.workers.platforms.port import Device, Leak, Platform, TaskReport
from rankwise.workers.platforms.registry import load_platform
from rankwise.workers.staging import StagingSource, posix_shared_memory, staged

if TYPE_CHECKING:
    from rankwise.workers.member import Member

_BOOTSTRAP_ERROR = 1


class ChipShutdownFailed(TreeError):
    """A chip was brought down, but something that should have been done could not be."""


class ChipWorker:
    """One chip.

    Attributes:
        communicator_source: finds the windows of a communicator that an ancestor has made; by
            default the ranks meet by `rootinfo_path` on this machine.
        staging_source: finds memory of the host by the name in a `HostBufferStaging`; by default
            the POSIX shared memory of that name.
        last_report: what the device told of the latest task.
        leaks: memory of released devices that was not freed.
    """

    def __init__(self) -> None:
        self.communicator_source: RegionSource | None = None
        self.staging_source: StagingSource = posix_shared_memory
        self.last_report: TaskReport | None = None
        self.leaks: tuple[Leak, ...] = ()
        self._platform: Platform | None = None
        self._device: Device | None = None
        self._is_finalized = False
        self._communicator: ChipCommunicator | None = None
        self._communicators_made = 0
        self._bring_down: ExitStack | None = None
        """Undoes a bootstrap in the reverse order; None without one."""
        self._problems: list[tuple[str, BaseException]] = []
        """What it could not undo."""
        self._buffer_ptrs: dict[str, int] = {}

    def init(self, platform: str | Platform = "host") -> None:
        """Choose what the chip is made of: a name that `load_platform` knows, or a platform.

        Raises:
            LocalProtocolError: it was called before.
            ConfigError: there is no such platform.
        """
        self._check_not_finalized()
        if self._platform is not None:
            raise LocalProtocolError(
                f"this chip worker is initialised for {self._platform.name!r} already",
                hint="make another ChipWorker for another platform",
            )
        self._platform = load_platform(platform) if isinstance(platform, str) else platform

    @property
    def platform(self) -> str:
        """The name of the platform; empty before `init`."""
        return self._platform.name if self._platform is not None else ""

    @property
    def device_id(self) -> int | None:
        """The number of the chip; None while there is none."""
        return self._device.chip if self._device is not None else None

    @property
    def is_finalized(self) -> bool:
        """Whether `finalize` was called."""
        return self._is_finalized

    @property
    def committed_device_memory(self) -> int:
        """How many bytes of the chip's memory are given out."""
        return self._device.committed_bytes if self._device is not None else 0

    def set_device(self, device_id: int) -> None:
        """Open a chip; the same one again changes nothing.

        Raises:
            ConfigError: the platform has no chip of that number.
            LocalProtocolError: another one is set, or `init` was not called.
        """
        self._check_not_finalized()
        if self._platform is None:
            raise LocalProtocolError(
                "a chip worker is not initialized", hint="call init(platform=...) first"
            )
        if self._device is None:
            self._device = self._platform.open(device_id)
        elif self._device.chip != device_id:
            raise LocalProtocolError(
                f"the chip worker has chip {self._device.chip}, so it cannot take chip {device_id}",
                hint="call reset_device() first, or make another ChipWorker",
            )

    def reset_device(self) -> None:
        """Let go of the chip, its memory and its communicator; without one, changes nothing.

        The promises of a bootstrap for the end are left to `shutdown_bootstrap`.
        """
        if self._device is None:
            return
        if self._communicator is not None:
            self.comm_destroy(self._communicator.number)
        device, self._device = self._device, None
        self._bring_down = None
        self.leaks += device.close()

    def finalize(self) -> None:
        """Let go of everything, as `reset_device` does, for good; twice is once."""
        if not self._is_finalized:
            self.reset_device()
            self._is_finalized = True

    def run(
        self,
        callable_: ChipCallable,
        args: TaskArgs | None = None,
        config: ChipCallConfig | None = None,
        *,
        not_before_ps: int = 0,
        **overrides: object,
    ) -> int:
        """Run a task on the chip; returns the simulated nanoseconds that it took.

        Args:
            callable_: what to run.
            args: its arguments.
            config: how to run it.
            not_before_ps: the instant on the chip's clock before which it cannot begin: when what
                it needs is there. So the clocks of chips whose tasks need each other agree.
            overrides: options of `config` that are different this time.

        Raises:
            BadArguments: they do not fit the signature; names which.
            BadPointer: a tensor does not lie in memory that this chip can use; says whose it is.
            ConfigError: there is no such option.
        """
        if not isinstance(callable_, ChipCallable):
            raise BadArguments(
                f"a task's callable is {callable_!r}, expected a ChipCallable",
                hint="ChipCallable.build wraps a kernel or a function with its signature",
            )
        device = self._opened()
        chosen = config or ChipCallConfig()
        chosen = chosen.changed(**overrides) if overrides else chosen
        chosen.check()
        self.last_report = device.run(callable_, args or TaskArgs(), chosen, not_before_ps)
        return self.last_report.duration_ns

    def malloc(self, size: int) -> int:
        """Take memory of the chip; returns its address. It holds zeros.

        Raises:
            ConfigError: the size is not at least one byte.
            DeviceMemoryExhausted: there is too little left.
        """
        return self._opened().malloc(size)

    def free(self, pointer: int) -> None:
        """Give memory back that `malloc` gave.

        Raises:
            BadPointer: it did not; says whose the pointer is.
        """
        self._opened().free(pointer)

    def copy_to(self, destination: int, source: int, size: int) -> None:
        """Copy bytes from an address of the host to the chip's memory.

        Raises:
            BadPointer: one of the ranges does not lie where it should.
        """
        self._opened().copy_to(destination, source, size)

    def copy_from(self, destination: int, source: int, size: int) -> None:
        """Copy bytes from the chip's memory to an address of the host.

        Raises:
            BadPointer: one of the ranges does not lie where it should.
        """
        self._opened().copy_from(destination, source, size)

    def comm_init(self, rank: int, nranks: int, rootinfo_path: str) -> int:
        """Take a place in a communicator; returns a handle. There is one at a time.

        Raises:
            ConfigError: there is no such rank, or the ranks do not agree on how many they are.
            CollectiveTimeout, PeerDied: a rank did not come, or is gone.
            LocalProtocolError: the chip is in a communicator already.
        """
        return self._comm_init(ChipCommBootstrapConfig(rank, nranks, rootinfo_path, 0))

    def comm_alloc_windows(self, handle: int, size: int) -> int:
        """Get a window of at least `size` bytes on every rank; returns the `device_ctx`.

        All ranks ask for the same size. `device_ctx` is where kernels find the windows: u32 rank,
        u32 ranks, u64 bytes of a window, u64 address of each rank's.

        Raises:
            ConfigError: the ranks do not agree on the size, or what exists is smaller.
            CollectiveTimeout, PeerDied: a rank did not come, or is gone.
        """
        communicator = self._checked(handle)
        communicator.alloc_windows(self._opened(), size)
        return communicator.table_address

    def comm_get_local_window_base(self, handle: int) -> int:
        """Where the chip's own window begins."""
        return self._checked(handle).windows.local_window_base

    def comm_get_window_size(self, handle: int) -> int:
        """How many bytes each window has."""
        return self._checked(handle).windows.window_size

    def comm_member(self, handle: int) -> "Member":
        """The rank in the communicator, for puts, signals and collectives from Python."""
        return self._checked(handle).windows.member

    @property
    def bootstrap_member(self) -> "Member | None":
        """The rank in the communicator that the chip is in now, if it is in one."""
        return None if self._communicator is None else self._communicator.windows.member

    def comm_barrier(self, handle: int, timeout: float | None = None) -> None:
        """Return when all ranks have called it.

        Raises:
            PeerDied: a rank has died.
            CollectiveTimeout: a rank did not come within `timeout` seconds.
        """
        self.comm_member(handle).barrier(timeout)

    def comm_destroy(self, handle: int) -> None:
        """Leave the communicator, without waiting: a peer may still read the windows."""
        self._checked(handle).leave(self._opened())
        self._communicator = None

    def bootstrap_context(
        self,
        device_id: int,
        cfg: ChipBootstrapConfig,
        channel: ChipBootstrapChannel | None = None,
    ) -> ChipBootstrapResult:
        """Bring the chip up: device, communicator, windows, buffers, inputs from the host.

        Success and the first error are published in `channel` at once. After an error everything
        is as it was before.

        Raises:
            LocalProtocolError: the chip is up already, or finalized.
            ConfigError: something in `cfg` is wrong; and all that the steps raise.
        """
        if self._bring_down is not None:
            raise LocalProtocolError(
                f"chip {self.device_id} was brought up before",
                hint="call shutdown_bootstrap() first",
            )
        bring_down = ExitStack()
        try:
            self._bring_up(device_id, cfg, channel, bring_down)
        except BaseException as error:
            try:
                # At once: to undo it may take long, and the parent must not wait for that.
                if channel is not None:
                    reason = f"{type(error).__name__}: {error}"
                    channel.write_error(_BOOTSTRAP_ERROR, reason)
            finally:
                for problem, _ in self._close(bring_down):
                    error.add_note(f"and then: {problem}")
            raise
        self._bring_down = bring_down
        result = self._result()
        if channel is not None:
            channel.write_success(
                result.device_ctx,
                result.local_window_base,
                result.actual_window_size,
                result.buffer_ptrs,
            )
        return result

    def shutdown_bootstrap(self) -> None:
        """Undo `bootstrap_context`: outputs to the host, communicator, device; twice is once.

        Raises:
            ChipShutdownFailed: some of it could not be done; says what. The rest was.
        """
        if self._bring_down is None:
            return
        device_id = self.device_id
        problems = self._close(self._bring_down)
        self._bring_down = None
        if problems:
            texts = "; ".join(problem for problem, _ in problems)
            raise ChipShutdownFailed(
                f"chip {device_id} could not be shut down properly: {texts}"
            ) from problems[0][1]

    @property
    def buffer_ptrs(self) -> dict[str, int]:
        """Where the buffers of the bootstrap lie, by name."""
        return dict(self._buffer_ptrs)

    def _bring_up(
        self,
        device_id: int,
        config: ChipBootstrapConfig,
        channel: ChipBootstrapChannel | None,
        bring_down: ExitStack,
    ) -> None:
        """Take the steps in their order, and note for each one that was taken how it is undone."""

        def undone_by(action: Callable[[], None], name: str) -> None:
            bring_down.callback(self._undo, action, name)

        config.check()
        _check_room(config, channel)
        self.set_device(device_id)
        undone_by(self.reset_device, "set_device")
        if config.comm is None:
            return
        self._comm_init(config.comm)
        undone_by(self._leave_communicator, "comm_init")
        self.comm_alloc_windows(self._handle(), config.comm.window_size)
        base = self.comm_get_local_window_base(self._handle())
        room = self.comm_get_window_size(self._handle())
        placed = place_buffers(config.buffers, room)
        self._buffer_ptrs = {each.name: base + each.offset for each in placed}
        undone_by(lambda: setattr(self, "_buffer_ptrs", {}), "place_buffers")
        for buffer in config.buffers:
            if buffer.load_from_host:
                staging = config.input_staging(buffer.name)
                with staged(self.staging_source, staging) as address:
                    self.copy_to(self._buffer_ptrs[buffer.name], address, staging.size)
        # Last, so that a chip which never came up stores nothing.
        for buffer in config.buffers:
            if buffer.store_to_host:
                store = partial(self._store, config, buffer.name)
                undone_by(store, f"store_to_host of {buffer.name!r}")

    def _undo(self, action: Callable[[], None], name: str) -> None:
        """Undo a step; if that fails, the others are undone all the same."""
        try:
            action()
        except BaseException as error:  # noqa: BLE001  # raised when all is undone
            self._problems.append((f"{name}: {type(error).__name__}: {error}", error))

    def _close(self, bring_down: ExitStack) -> list[tuple[str, BaseException]]:
        """Undo what was done; what could not be, and why."""
        bring_down.close()
        problems, self._problems = self._problems, []
        return problems

    def _leave_communicator(self) -> None:
        if self._communicator is not None:  # the user may have left it
            self.comm_destroy(self._communicator.number)

    def _store(self, config: ChipBootstrapConfig, name: str) -> None:
        staging = config.output_staging(name)
        with staged(self.staging_source, staging) as address:
            self.copy_from(address, self._buffer_ptrs[name], staging.size)

    def _result(self) -> ChipBootstrapResult:
        if self._communicator is None:
            return ChipBootstrapResult()
        handle = self._communicator.number
        return ChipBootstrapResult(
            self._communicator.table_address,
            self.comm_get_local_window_base(handle),
            self.comm_get_window_size(handle),
            tuple(self._buffer_ptrs.values()),
        )

    def _comm_init(self, config: ChipCommBootstrapConfig) -> int:
        self._opened()
        if self._communicator is not None:
            raise LocalProtocolError(
                f"chip {self.device_id} is in communicator "
                f"{self._communicator.config.rootinfo_path!r} already",
                hint="call comm_destroy() first",
            )
        self._communicators_made += 1
        self._communicator = ChipCommunicator(
            self._communicators_made, config, self.communicator_source
        )
        return self._communicators_made

    def _handle(self) -> int:
        assert self._communicator is not None, "a step before has joined it"
        return self._communicator.number

    def _checked(self, handle: int) -> ChipCommunicator:
        communicator = self._communicator
        if communicator is None or communicator.number != handle:
            raise LocalProtocolError(
                f"chip {self.device_id} is in no communicator with handle {handle}",
                hint="comm_init() gives one, until comm_destroy()",
            )
        return communicator

    def _opened(self) -> Device:
        self._check_not_finalized()
        if self._device is None:
            raise LocalProtocolError(
                "a chip worker was used with its device not set",
                hint="call set_device() or bootstrap_context() first",
            )
        return self._device

    def _check_not_finalized(self) -> None:
        if self._is_finalized:
            raise LocalProtocolError(
                "a chip worker was used after it was finalized", hint="make another ChipWorker"
            )


def _check_room(config: ChipBootstrapConfig, channel: ChipBootstrapChannel | None) -> None:
    """Find out before anything is done whether success could be published."""
    if channel is not None and len(config.buffers) > channel.max_buffer_count:
        raise TreeValueError(
            f"{len(config.buffers)} buffers are configured, but the bootstrap channel has room for "
            f"{channel.max_buffer_count}"
        )
