"""What a worker is made of, and what it cannot be made of."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rankwise.base.errors import BootstrapRefused, ConfigError, LocalProtocolError, TreeValueError
from rankwise.base.units import Duration
from rankwise.drivers.real.tree.processor_placement import Home
from rankwise.workers.bootstrap import ChipBootstrapConfig, ChipCommBootstrapConfig
from rankwise.workers.numbers import check_text, check_whole, checked_entries, checked_patience
from rankwise.workers.platforms.registry import check_platform
from rankwise.workers.states import MAX_RING_DEPTH

if TYPE_CHECKING:
    from rankwise.workers.platforms.port import Platform
    from rankwise.workers.worker import Worker


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker consists of.

    Attributes:
        level: its level.
        platform: what its chips are made of.
        device_id: the chip of a level-2 worker.
        device_ids: the chips of a level-3 worker.
        bootstraps: for each chip what it is brought up with; none, or one each.
        next_level: its next-level workers, where it has no chips.
        sub_count: how many sub workers it has.
        staged: memory of the host by name, for chips that load or store buffers.
        ring_depth, heap_bytes, start_patience, close_patience, journal: see `EngineSpec`.
        takes_tokens: whether tensors may have addresses at which nothing lies.
        is_near: whether the first sub worker shares the caller's processor.
        checks_inputs: whether a task that writes to one of its inputs fails.
        home: where children run; anywhere if it is None.
    """

    level: int
    platform: "str | Platform"
    device_id: int
    device_ids: tuple[int, ...]
    bootstraps: tuple[ChipBootstrapConfig, ...]
    next_level: tuple["Worker", ...] = ()
    sub_count: int
    staged: dict[str, Any] = {}
    ring_depth: int
    heap_bytes: int
    start_patience: Duration
    close_patience: Duration
    journal: str | None = None
    takes_tokens: bool = False
    is_near: bool = False
    checks_inputs: bool = False
    home: Home | None = None

    def communicators(self) -> list[ChipCommBootstrapConfig]:
        """The places in communicators of all chips in this tree."""
        own = [config.comm for config in self.bootstraps if config.comm is not None]
        return own + [comm for each in self.next_level for comm in each.spec.communicators()]

    @property
    def is_one_chip(self) -> bool:
        """Whether it is a chip in the process that initialises it, without children."""
        return self.level == 2

    def check_registers(self) -> None:
        """Refuse functions where they could not be called.

        Raises:
            LocalProtocolError: it has no children.
        """
        if self.is_one_chip:
            raise LocalProtocolError(
                "a level-2 worker registers nothing", hint="give run() a ChipCallable"
            )

    def check_has_next_level(self) -> None:
        """Refuse a next-level worker where there can be none.

        Raises:
            LocalProtocolError: workers of this level have none.
        """
        if self.level < 4:
            raise LocalProtocolError(
                f"add_worker() needs level >= 4, but the level is {self.level}",
                hint="level 4 and above have next-level workers; level 3 has chips",
            )

    def check_next_level(self, level: int) -> None:
        """Refuse a next-level worker that is not of the level below.

        Raises:
            ConfigError: says which level it must have.
        """
        if level != self.level - 1:
            raise TreeValueError(
                f"a worker of level {level} was added to one of level {self.level}",
                hint=f"it must have level {self.level - 1}",
            )

    def check_platforms(self) -> None:
        """Refuse unknown platforms, before any process is made.

        Raises:
            BootstrapRefused: names the first of them.
        """
        if isinstance(self.platform, str):
            try:
                check_platform(self.platform)
            except ConfigError as error:
                raise _refused("chip 0", error) from error
        for worker in self.next_level:
            worker.spec.check_platforms()

    def check_bootstraps(self, below: str = "") -> None:
        """Refuse before anything is started what can be seen to be wrong with chips of this tree.

        Raises:
            BootstrapRefused: names the first of them.
        """
        for index, config in enumerate(self.bootstraps):
            try:
                config.check()
            except ConfigError as error:
                raise _refused(f"chip {index}{below}", error) from error
        for index, worker in enumerate(self.next_level):
            worker.spec.check_bootstraps(f" of worker {index}{below}")


def spec_of(
    level: int,
    chip_bootstrap_configs: Sequence[ChipBootstrapConfig] | None,
    *,
    platform: "str | Platform",
    device_id: int,
    device_ids: Iterable[int],
    num_sub_workers: int,
    heap_ring_size: int,
    ring_depth: int,
    start_timeout: float,
    close_timeout: float,
    placement: str | None,
    check_inputs: bool,
    journal: str | None,
    takes_tokens: bool,
) -> WorkerSpec:
    """The spec of what was given to `Worker`.

    Raises:
        ConfigError: something of it cannot be used, or not together.
    """
    check_whole("level", level, 2, "2 is one chip; 3 has chips, and each above has workers")
    check_whole("num_sub_workers", num_sub_workers, 0)
    check_whole("heap_ring_size", heap_ring_size, 1)
    check_whole("ring_depth", ring_depth, 1)
    if not hasattr(platform, "open"):
        check_text("platform", platform, '"sim", "host", or another that is installed')
    if placement not in (None, "near"):
        raise TreeValueError(
            f"placement is {placement!r}, expected None or 'near'",
            hint="with None the kernel places all processes",
        )
    if journal is not None:
        check_text("journal", journal, "a file, such as 'worker.jsonl'")
    spec = WorkerSpec(
        level=level,
        platform=platform,
        device_id=device_id,
        device_ids=checked_entries("device_ids", device_ids, "numbers of chips: [0, 1]"),
        bootstraps=checked_entries(
            "chip_bootstrap_configs", chip_bootstrap_configs or (), "one per device"
        ),
        sub_count=num_sub_workers,
        ring_depth=ring_depth,
        heap_bytes=MAX_RING_DEPTH * heap_ring_size,
        start_patience=checked_patience("start_timeout", start_timeout),
        close_patience=checked_patience("close_timeout", close_timeout),
        journal=journal,
        takes_tokens=takes_tokens,
        is_near=placement == "near",
        checks_inputs=bool(check_inputs),
    )
    _check_parts(spec, has_bootstraps=chip_bootstrap_configs is not None)
    return spec


def _check_parts(spec: WorkerSpec, *, has_bootstraps: bool) -> None:
    level, chips = spec.level, len(spec.device_ids)
    for device_id in spec.device_ids:
        check_whole("a number in device_ids", device_id, 0)
    if has_bootstraps and level < 3:
        raise TreeValueError(
            f"chip_bootstrap_configs needs level >= 3, but the level is {level}",
            hint="a level-3 worker brings chips up; at level 2, use ChipWorker",
        )
    if has_bootstraps and len(spec.bootstraps) != chips:
        raise TreeValueError(
            f"chip_bootstrap_configs has {len(spec.bootstraps)} entries, and must equal "
            f"device_ids length, which is {chips}",
            hint="give one per device",
        )
    if chips and level != 3:
        raise TreeValueError(
            f"device_ids was given to a worker of level {level}",
            hint="chips belong to level 3; give add_worker() a level-3 worker",
        )
    if len(set(spec.device_ids)) != chips:
        raise TreeValueError(f"device_ids names a chip twice: {list(spec.device_ids)}")
    if spec.sub_count and level < 3:
        raise TreeValueError(
            f"num_sub_workers is {spec.sub_count}, but a level-2 worker has none",
            hint="a level-3 worker has chips and sub workers",
        )
    for config in spec.bootstraps:
        if not isinstance(config, ChipBootstrapConfig):
            raise TreeValueError(f"{config!r} is not a ChipBootstrapConfig")


def _refused(what: str, error: ConfigError) -> BootstrapRefused:
    text = f"{what} bootstrap failed: {type(error).__name__}: {error.message}"
    return BootstrapRefused(text, hint=error.hint)
