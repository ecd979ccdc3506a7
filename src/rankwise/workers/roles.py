"""What the children of a worker are: helpers that run functions, chips, workers of their own.

Made in the child's own process; see `rankwise.drivers.real.tree.child` for when what is called. A
frame begins with its length and the simulated instant before which its task cannot begin.
"""

import pickle
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import msgspec

from rankwise.base.errors import CollectiveError, TreeValueError
from rankwise.base.failure import text_of
from rankwise.core.tasks.calls import ControlCode
from rankwise.drivers.real.tree.arena import FRAME_HEAD
from rankwise.drivers.real.tree.child import ChildEnds
from rankwise.workers.arguments import TaskArgs
from rankwise.workers.bootstrap import ChipBootstrapChannel, ChipBootstrapConfig
from rankwise.workers.callable_table import CallableTable
from rankwise.workers.child_context import ChildContext, enter
from rankwise.workers.chip_communicator import RegionSource
from rankwise.workers.chip_timeline import Timeline, TimelineEntry
from rankwise.workers.platforms.port import Leak, Platform
from rankwise.workers.staging import StagingSource
from rankwise.workers.wire import decode_command, unpack_arguments, unpack_task

if TYPE_CHECKING:
    from rankwise.workers.recorded_graphs import RecordedProgram
    from rankwise.workers.worker import Worker

JOIN, LEAVE = b"J", b"L"
"""First bytes of commands about domains; one of `core.tasks.calls` begins with neither."""


class ExitReport(msgspec.Struct, frozen=True):
    """What a child says when it is closed, if there is anything to say.

    Attributes:
        leaks: memory of chips that was not freed, by the chip's name.
        killed: children of its own that it had to kill.
    """

    leaks: dict[str, tuple[Leak, ...]] = {}
    killed: tuple[str, ...] = ()


encode_left = msgspec.msgpack.Encoder().encode
decode_left = msgspec.msgpack.Decoder(Timeline).decode
decode_exit_report = msgspec.msgpack.Decoder(ExitReport).decode


def _opened(frame: memoryview) -> tuple[int, memoryview]:
    """The instant before which a task cannot begin, and the rest of its frame."""
    length, clock = FRAME_HEAD.unpack_from(frame)
    return clock, frame[FRAME_HEAD.size : FRAME_HEAD.size + length]


def _inputs_checked(args: TaskArgs) -> AbstractContextManager[None]:
    from rankwise.workers.input_check import inputs_checked  # noqa: PLC0415  # opt-in, takes ctypes

    return inputs_checked(args)


class _Role:
    """What all have in common."""

    checks_inputs = False

    def __init__(self, ends: ChildEnds, table: CallableTable, child: ChildContext) -> None:
        self.ends = ends
        self.table = table
        self.child = child

    def start(self) -> None:
        """Say who we are."""
        enter(self.child)

    def failed(self, error: BaseException) -> None:
        """A task has raised: its peers must not wait for it."""
        if not isinstance(error, CollectiveError):  # they know, or it was told by the collective
            self.child.give_up(f"its task raised {type(error).__name__}: {text_of(error)}")

    def loss(self) -> str:
        """Nothing that is needed can be lost."""
        return ""

    def command(self, body: bytes) -> bytes:
        """Join or leave a domain."""
        kind = body[:1]
        if kind == JOIN:
            from rankwise.workers.member import Member  # noqa: PLC0415  # takes numpy along

            spec, rank = pickle.loads(body[1:])  # noqa: S301  # from our own worker process
            self.child.join(spec.name, Member.join_at(self.ends.arena.memory, spec, rank))
        elif kind == LEAVE:
            self.child.leave(pickle.loads(body[1:]))  # noqa: S301  # the same
        else:
            return self.device_command(body)
        return b""

    def device_command(self, body: bytes) -> bytes:
        """Do something with the memory of a device."""
        del body
        raise TreeValueError(
            f"{self.child.path} has no device memory",
            hint="malloc, free, copy_to and copy_from are for chips of a level-3 worker",
        )

    def program(self, number: int) -> None:
        """Run a recorded program."""
        program: RecordedProgram = self.table.find(number)
        program.run(self.table, _inputs_checked if self.checks_inputs else None)

    def finish(self) -> bytes:
        """Leave all domains."""
        self.child.leave_all()
        return b""


class FunctionRole(_Role):
    """A sub worker: `fn(args)`."""

    def __init__(self, ends: ChildEnds, table: CallableTable, child: ChildContext) -> None:
        super().__init__(ends, table, child)
        self._functions = table.found

    def run(self, callable_: int, frame: memoryview | None) -> None:
        """Call a function."""
        function = self._functions.get(callable_)
        if function is None:
            function = self.table.find(callable_)
        args = TaskArgs() if frame is None else unpack_arguments(_opened(frame)[1])
        if self.checks_inputs:
            with _inputs_checked(args):
                function(args)
        else:
            function(args)


class ChipRole(_Role):
    """A chip."""

    def __init__(
        self,
        ends: ChildEnds,
        table: CallableTable,
        child: ChildContext,
        *,
        platform: str | Platform,
        device_id: int,
        bootstrap: ChipBootstrapConfig | None,
        channel_address: int,
        communicators: RegionSource,
        staging: StagingSource,
    ) -> None:
        super().__init__(ends, table, child)
        self._platform = platform
        self._device_id = device_id
        self._bootstrap = bootstrap
        self._channel_address = channel_address
        self._communicators = communicators
        self._staging = staging

    def start(self) -> None:
        """Bring the chip up, and publish how that went."""
        from rankwise.workers.chip_worker import ChipWorker  # noqa: PLC0415  # takes numpy along

        super().start()
        chip = self._chip = self.child.chip = ChipWorker()
        chip.communicator_source = self._communicators
        chip.staging_source = self._staging
        config = self._bootstrap
        if config is None:
            chip.init(self._platform)
            chip.set_device(self._device_id)
            return
        channel = ChipBootstrapChannel(self._channel_address, len(config.buffers))
        try:
            chip.init(self._platform)
        except BaseException as error:
            channel.write_error(1, f"{type(error).__name__}: {error}")
            raise
        chip.bootstrap_context(self._device_id, config, channel)

    def run(self, callable_: int, frame: memoryview | None) -> bytes:
        """Run a chip's callable; leaves when it ran in simulated time."""
        assert frame is not None, "a chip's task has a configuration"
        clock, body = _opened(frame)
        args, config = unpack_task(body)
        with _inputs_checked(args) if self.checks_inputs else nullcontext():
            self._chip.run(self.table.find(callable_), args, config, not_before_ps=clock)
        report = self._chip.last_report
        if report is None:
            return b""
        entries = [
            TimelineEntry(
                self.child.path, report.task, report.start_ps, report.end_ps, 0, report.tensors
            )
        ]
        entries += [
            TimelineEntry(self.child.path, span.name, span.start_ps, span.end_ps, part=span.place)
            for span in report.spans
        ]
        return encode_left(Timeline(entries))

    def device_command(self, body: bytes) -> bytes:
        """Malloc, free, copy."""
        chip, command = self._chip, decode_command(body)
        match command.code:
            case ControlCode.MALLOC:
                return chip.malloc(command.arg0).to_bytes(8, "little")
            case ControlCode.FREE:
                chip.free(command.arg0)
            case ControlCode.COPY_TO:
                chip.copy_to(command.arg0, command.arg1, command.arg2)
            case ControlCode.COPY_FROM:
                chip.copy_from(command.arg0, command.arg1, command.arg2)
            case _:
                raise TreeValueError(f"a chip knows no command {command.code}")
        return b""

    def finish(self) -> bytes:
        """Store outputs to the host, leave the communicator, let go of the chip; tells leaks."""
        super().finish()
        try:
            self._chip.shutdown_bootstrap()
        finally:
            self._chip.finalize()
        leaks = self._chip.leaks
        return encode_left(ExitReport({self.child.path: leaks})) if leaks else b""


class WorkerRole(_Role):
    """A next-level worker: `fn(orch, args, config)` on a worker of its own."""

    def __init__(
        self, ends: ChildEnds, table: CallableTable, child: ChildContext, worker: "Worker"
    ) -> None:
        super().__init__(ends, table, child)
        self._worker = worker

    def start(self) -> None:
        """Initialise the worker, which starts children of its own."""
        super().start()
        self._worker.init()

    def run(self, callable_: int, frame: memoryview | None) -> bytes:
        """Run an orchestration function; leaves what its chips did in simulated time."""
        assert frame is not None, "a next-level task has a configuration"
        clock, body = _opened(frame)
        args, config = unpack_task(body)
        with _inputs_checked(args) if self.checks_inputs else nullcontext():
            timeline = self._worker.run_at(clock, self.table.find(callable_), args, config)
        return encode_left(timeline)

    def loss(self) -> str:
        """The chip or worker that has ended below, if one has."""
        return self._worker.loss

    def finish(self) -> bytes:
        """Close the worker; tells what its chips have leaked, and whom it had to kill."""
        super().finish()
        worker = self._worker
        worker.close()
        if not (worker.leaks or worker.killed):
            return b""
        return encode_left(ExitReport(worker.leaks, worker.killed))
