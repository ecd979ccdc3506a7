"""All that rankwise touches of torch's private parts, in one place.

Tested with the versions in `TESTED`; with another one a run begins with a warning that says so.
These are touched:

- `distributed_c10d._new_process_group_helper`: with any backend that a program names, the group
  is made with ours, which is registered by the public `Backend.register_backend(extended_api=True)`
  and returns a Python `ProcessGroup`; torch's records then get the name that was asked for.
- `distributed_c10d._world`: one object, which becomes the `RankWorld` of the rank that runs.
- `distributed_c10d._process_group_name`: the registry of groups in C++ is the process's, so each
  rank's groups have names of their own.
- `torch.distributed._symmetric_memory`: its tables of what belongs to the name of a group.
- `distributed_c10d._unregister_all_process_groups`: would take the groups of all ranks out of it.
- `torch.distributed.TCPStore` and `FileStore`: the same for programs that make one themselves; and
  `PrefixStore` around one of those, here and in `distributed_c10d`.
- `ProcessGroup._register_backend` and its siblings, to make the groups of gloo that are recorded.
- `distributed_c10d._object_to_tensor`: refuses objects under `FakeTensorMode`.
- `distributed_c10d._get_default_timeout`: is told that all backends are gloo.
- `torch.distributed.rpc.init_rpc`: is refused.
- the functions of `distributed_c10d`: a thread that a rank has started takes a turn in them, and
  finds its rank's groups.
- `distributed_c10d.rendezvous`: gives the store of the simulated world.
- `torch._C._DisableTorchDispatch` and `_ExcludeDispatchKeyGuard`: operations compute below modes
  and autograd, as a backend in C++ does (`arithmetic`).
- `torch._C._push_on_torch_dispatch_stack`: what a rank computes is charged by a mode in its thread,
  on a modelled machine; the public way would leave marks in torch that other threads see.
- `FakeTensorMode.__init__` and `__torch_dispatch__`: what a program computes with fake tensors is
  charged above it.
- `torch.distributed._symmetric_memory`: the class of C++ behind it, and `torch.ops.symm_mem` for
  tensors on the CPU (`symmetric_memory`, `symmetric_operations`).
- `torch._C._current_graph_task_id`: whether a thread is in backward (`operations`).
- `torch.autograd._engine_run_backward`: what a program's own functions do in backward is meant for
  CUDA as well (`cuda`).
- `torch.cuda.graphs`, its `CUDAGraph` and `torch._C._host_emptyCache`; `SyncBatchNorm.forward` and
  the functions `torch.batch_norm_*` behind it, which a build for the CPU has not (`cuda`).
- `torch.autograd.profiler._prepare_profiler` and `_enable_profiler`: two ranks' would crash.
- `torch._C._set_deterministic_algorithms` and `torch._tensor_str.PRINT_OPTS`: ranks may differ in
  such settings (`settings`).
- the kernels of `aten` for autocast on the CPU, which get CUDA's lists (`cuda_autocast`).
- `torch._C._dispatch_library` and the tables of `torch._library.custom_ops`: the operators that
  programs define (`operators`).
- `torch._dynamo.trace_rules.SKIP_DIRS`: what `torch.compile` leaves alone; rankwise, too.
- `torch.nn.modules.module`, `torch.optim.optimizer`: their tables of hooks for all (`settings`).
- `DeviceMesh.__init__` and `__setstate__`: meshes get the number of their rank as `_thread_id`,
  which torch has for its tests with threads. Equal meshes of two ranks would otherwise be one key
  of the caches of `torch.distributed.tensor`, whose values hold the coordinates of a rank.
- `torch._C._cuda_getDeviceCount`, `_cuda_init` and `_accelerator_*`: there is no GPU (`no_gpus`).
- `torch.UntypedStorage.resize_`, `torch.cuda.Event`, `torch.cuda.synchronize`: the memory and
  the time of the modelled machine.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial, wraps
from importlib import import_module
from itertools import count
from types import FunctionType
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import Backend, DeviceMesh, ProcessGroup, ProcessGroupGloo
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rankwise.base.errors import ConfigError
from rankwise.simranks.torch.cuda import Event, OnCpu, model_cuda
from rankwise.simranks.torch.loads import makes_fake_tensors
from rankwise.simranks.torch.no_gpus import NoGpu, hide_gpus
from rankwise.simranks.torch.operators import TABLES, CustomOperators, TableByRank
from rankwise.simranks.torch.process_group import RehearsedProcessGroup
from rankwise.simranks.torch.rank_store import (
    OF_RANK,
    SYMMETRIC_MEMORY,
    RehearsedFileStore,
    RehearsedPrefixStore,
    RehearsedStore,
    RehearsedTCPStore,
    StoreEntries,
)
from rankwise.simranks.torch.reads_in_flight import watch_methods
from rankwise.simranks.torch.settings import PerRankSettings, set_num_threads
from rankwise.simranks.torch.streams import order_by_streams
from rankwise.simranks.torch.streams import synchronize as wait_for_device
from rankwise.simranks.torch.torch_events import follow_steps, recorded
from rankwise.simranks.world.places import OUR_PACKAGE
from rankwise.simranks.world.rank_events import present_recorder
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.turn_takers import taking_turns
from rankwise.simranks.world.world import SimulatedWorld, present_world, running_rank

TESTED = ("2.13",)
BACKEND = "rankwise"
_KEY = "torch"
_PRIVATE = (
    "_find_pg_by_ranks_and_tag", "_get_default_group", "_get_default_store", "_get_group_tag",
    "_get_process_group_name", "_resolve_process_group",
)  # fmt: skip
"""Functions that other parts of torch call for a group."""


def install(world: SimulatedWorld, device: str = "cpu") -> Callable[[], None]:
    """Let the ranks of a world use torch.distributed; returns what undoes it.

    With the device `cuda` they find modelled CUDA devices.
    """
    check_version(torch.__version__)
    _register()
    import_module("torch.distributed.nn")  # its defaults are the group of the rank that imports it
    stack = ExitStack()

    def replace(name: str, make: Callable[[Any], Any], owner: Any = c10d) -> None:
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        stack.callback(setattr, owner, name, original)

    original = c10d._world  # noqa: SLF001  # see the module's text
    replace("_world", _movable_record)
    stack.callback(_become, c10d._world, original)  # noqa: SLF001  # the same
    replace("_new_process_group_helper", _with_our_backend)
    replace("_process_group_name", _unique_per_rank)
    _take_turns()  # for good: outside of ranks' threads a turn is free
    replace("_unregister_all_process_groups", _unregister_those_of_rank)
    replace("rendezvous", _rendezvous)
    replace("_get_default_timeout", _of_gloo)
    replace("_object_to_tensor", _refused_with_fakes)
    stack.callback(_forget_meshes)
    replace("__init__", _numbered, DeviceMesh)
    replace("__setstate__", _renumbered, DeviceMesh)
    if (rpc := import_module("torch.distributed.rpc")).is_available():
        replace("init_rpc", _refused_to_ranks, rpc)
    for name in ("_prepare_profiler", "_enable_profiler"):
        replace(name, _of_one_rank, torch.autograd.profiler)
    stack.callback(follow_steps())
    for name, kind in (("TCPStore", RehearsedTCPStore), ("FileStore", RehearsedFileStore)):
        replace(name, partial(_made_by_ranks, kind, kind), torch.distributed)
    for owner in (torch.distributed, c10d):
        replace("PrefixStore", partial(_made_by_ranks, RehearsedPrefixStore, _prefixed), owner)
    is_gpu_in_use = torch.cuda.is_initialized()  # asked before the answer is always no
    # Also where devices are modelled: what is not replaced must not find a real one.
    stack.callback(hide_gpus(can_pin=device == "cuda"))
    if device == "cuda":
        stack.callback(model_cuda())
    if world.prediction is not None:
        from rankwise.simranks.torch.fused_kernels import fuse_kernels  # noqa: PLC0415  # for machines
        from rankwise.simranks.torch.operations import with_fakes, with_makers  # noqa: PLC0415  # the same
        from rankwise.simranks.torch.storages import with_counting  # noqa: PLC0415  # the same

        if world.timing_only is None:
            stack.callback(fuse_kernels())
        else:
            from rankwise.simranks.torch.without_data import compute_nothing  # noqa: PLC0415  # rare

            stack.callback(compute_nothing())
        if device == "cuda":
            from rankwise.simranks.torch.cuda_autocast import cast_as_cuda  # noqa: PLC0415  # for machines
            from rankwise.simranks.torch.cuda_choices import choices  # noqa: PLC0415  # the same

            stack.callback(cast_as_cuda(choices()["autocast"]))
        stack.callback(order_by_streams())
        # FSDP frees and takes memory by resizing storages: no operation tells of it.
        replace("resize_", with_counting, torch.UntypedStorage)
        replace("__torch_dispatch__", with_fakes, FakeTensorMode)
        replace("__init__", with_makers, FakeTensorMode)
        stack.callback(register_optimizer_step_pre_hook(_begin_update).remove)
        stack.callback(register_optimizer_step_post_hook(_end_step).remove)
    if world.has_virtual_clock:
        replace("Event", lambda _: Event, torch.cuda)  # a class: torch asks for instances
        replace("synchronize", _synchronized, torch.cuda)
    stack.callback(watch_methods())
    operators = CustomOperators(world.own_state.is_of_ranks)
    stack.callback(operators.close)
    replace("_dispatch_library", lambda _: operators.make_library, torch._C)  # noqa: SLF001  # see the module's text
    for name in TABLES:
        replace(name, TableByRank, import_module("torch._library.custom_ops"))
    state = TorchState(world, device, is_gpu_in_use=is_gpu_in_use)
    world.own_state.add(state)
    stack.callback(state.close)
    stack.callback(PerRankSettings(world).close)
    world.at_end_of_ranks(_forget_groups)
    return stack.close


def stay_out_of_graphs() -> Callable[[], None]:
    """Have `torch.compile` run our functions as they are: C++ calls them inside of compiled ones.

    DDP's reducer does, for one. It stays so, since it changes nothing else.
    """
    rules = import_module("torch._dynamo.trace_rules")
    if (fused := sys.modules.get("rankwise.simranks.torch.fused_kernels")) is not None:
        # As torch's functions, for which they stand, they are called from within a graph.
        for function in (fused.rms_norm, fused.scaled_dot_product_attention):
            rules._allowed_callable_ids.add(id(function))  # noqa: SLF001  # `allow_in_graph` imports more
    if (choices := sys.modules.get("rankwise.simranks.torch.cuda_choices")) is not None:
        for function in choices.IN_GRAPHS:
            rules._allowed_callable_ids.add(id(function))  # noqa: SLF001  # the same
    if not any(OUR_PACKAGE.startswith(each.rstrip("/")) for each in rules.SKIP_DIRS):
        rules.add("rankwise")
    return _nothing


def _nothing() -> None:
    """Undo nothing."""


def share_memory() -> Callable[[], None]:
    """Follow the import of torch's symmetric memory; returns what undoes it."""
    from rankwise.simranks.torch import symmetric_operations  # noqa: PLC0415  # few programs have them

    return symmetric_operations.install()


def record_in_process() -> None:
    """Have the groups of this process, which is no simulated rank, record what they do."""
    _register()
    helper = c10d._new_process_group_helper  # noqa: SLF001  # see the module's text
    c10d._new_process_group_helper = _with_our_backend(helper)  # noqa: SLF001  # the same


def check_version(version: str) -> None:
    """Warn of a version of torch that rankwise was not tested with."""
    if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
        warnings.warn(
            f"simulated ranks use private parts of torch and are tested with {', '.join(TESTED)}; "
            f"this is torch {version}",
            stacklevel=2,
        )


class TorchState:
    """What of torch's state each rank has for itself; moved in and out at each hand-over."""

    def __init__(self, world: SimulatedWorld, device: str, *, is_gpu_in_use: bool) -> None:
        self._device = device
        self._is_gpu_in_use = is_gpu_in_use
        self._generator = torch.default_generator
        self._home = self._generator.get_state()
        self._dtype = torch.get_default_dtype()
        self._world = world
        self._present = c10d._world  # noqa: SLF001  # see the module's text

    def move_in(self, rank: Rank) -> None:
        """Let a rank find its random state and its default dtype."""
        mine: _TorchStateOfRank | None = rank.own_state.get(_KEY)
        if mine is None:
            mine = rank.own_state[_KEY] = self._first(rank)
        _become(self._present, mine.world)
        self._generator.set_state(mine.random)
        if mine.dtype is not torch.get_default_dtype():
            torch.set_default_dtype(mine.dtype)

    def move_out(self, rank: Rank) -> None:
        """Keep them."""
        mine: _TorchStateOfRank = rank.own_state[_KEY]
        mine.random = self._generator.get_state()
        mine.dtype = torch.get_default_dtype()

    def close(self) -> None:
        """Give the process its own back."""
        self._generator.set_state(self._home)
        torch.set_default_dtype(self._dtype)

    def _first(self, rank: Rank) -> "_TorchStateOfRank":
        set_num_threads(1)  # of this thread: as OMP_NUM_THREADS=1 of a real rank
        torch.autograd.set_multithreading_enabled(False)
        generator = torch.Generator().manual_seed(self._world.seed_of(rank))
        if self._device == "cuda":
            # It holds for meshes of the CPU, of which the program knows nothing.
            warnings.filterwarnings("ignore", "DTensor random operators may not have complete")
        if self._world.timing_only is not None:
            from rankwise.simranks.torch.without_data import begin_rank  # noqa: PLC0415  # rare

            begin_rank(self._world, rank)
            return _TorchStateOfRank(generator.get_state(), self._dtype)
        if self._device == "cuda":
            OnCpu().__enter__()  # of this thread, for as long as it lives
        elif self._is_gpu_in_use:
            NoGpu().__enter__()  # the same
        if self._world.prediction is not None:
            from rankwise.simranks.torch.operations import ChargingMode, charge_thread  # noqa: PLC0415  # for machines

            mode = charge_thread(ChargingMode(self._world.prediction.clock_of(rank)))
            torch._C._push_on_torch_dispatch_stack(mode)  # noqa: SLF001  # see the module's text
        return _TorchStateOfRank(generator.get_state(), self._dtype)


_numbers = count(1)
"""Of all ranks that this process ever has: caches of torch outlive a world, and threads."""


class _TorchStateOfRank:
    """What one rank has of torch.

    Attributes:
        number: of this rank alone, in whatever world of this process.
    """

    def __init__(self, random: Any, dtype: Any) -> None:
        self.random = random
        self.dtype = dtype
        self.number = next(_numbers)
        self.world = RankWorld()
        self.names: list[str] = []
        self.stores: list[RehearsedStore] = []
        self._stepping: Any = None

    def is_stepped_by(self, optimizer: Any) -> bool:
        """Whether this is the first optimiser that has made a step."""
        if self._stepping is None or self._stepping() is None:
            self._stepping = weakref.ref(optimizer)
        return self._stepping() is optimizer


class RankWorld(c10d._World):  # type: ignore[misc]  # noqa: SLF001  # see the module's text
    """torch's record of the process groups of one rank."""

    # Not torch's properties, which ask for what the process has.
    pg_map = pg_names = pg_group_ranks = pg_backend_config = tags_to_pg = pg_to_tag = None
    group_count = 0

    def __init__(self) -> None:
        super().__init__()
        maps = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config")
        self.__dict__ |= {name: {} for name in (*maps, "tags_to_pg", "pg_to_tag")}


def _movable_record(original: Any) -> Any:
    """Another object for torch's record, which can become that of the rank that runs.

    Other modules of torch have it under names of their own, so it stays, and what it is moves.
    """
    present = object.__new__(type(original))
    _become(present, original)
    return present


def _take_turns() -> None:
    """Let torch's functions take turns, from when a rank has threads."""
    for function in map(vars(c10d).get, (*c10d.__all__, *_PRIVATE)):
        # `isinstance` would ask objects that torch has deprecated, which warn.
        if type(function) is FunctionType:
            taking_turns(function)


def _become(present: Any, world: Any) -> None:
    """Be that record, with all its state: quicker than passing on each access."""
    if type(present) is not type(world):
        present.__class__ = type(world)
    present.__dict__ = world.__dict__


def _register() -> None:
    if BACKEND.upper() not in Backend._plugins:  # noqa: SLF001  # asked, not changed
        Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"])


_asked_for = "gloo"
"""The backend that the group which is being made was asked to have; one rank runs at a time."""
_may_be_nccl = False
"""Whether torch would give that group NCCL for tensors of CUDA."""


def _make_group(options: Any, _backend_options: Any) -> Any:
    """Make this rank's end of a group; of gloo's, if it is a process that records itself."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    told = _label(options.group_id.partition(OF_RANK)[0], ranks)
    if running_rank() is None:
        return recorded(_gloo_group(options), _asked_for, told)
    group = present_world().group(told, ranks)
    if told == "default":
        group.label = ""
    world, rank = present_world(), running_rank()
    clock = None if rank is None or world.prediction is None else world.prediction.clock_of(rank)
    # Modelled CUDA tensors are the CPU's: where NCCL may be meant, it is taken to be meant.
    is_of_gloo = "gloo" in _asked_for and not (_may_be_nccl and torch.cuda.is_available())
    made = RehearsedProcessGroup(
        options.group_rank, group, _asked_for, clock, compares_shapes=is_of_gloo
    )
    ended = recorded(made, _asked_for, told)
    if rank is not None and "gloo" in _asked_for and options.global_ranks_in_group:
        group.wait_for_creation(rank.number)  # gloo connects all members; others run meanwhile
    return ended


def _gloo_group(options: Any) -> ProcessGroup:
    """A group of processes, as torch makes it for the backend gloo."""
    kind = ProcessGroup.BackendType.GLOO
    group = ProcessGroup(options.store, options.group_rank, options.group_size)
    backend = ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )
    backend._set_sequence_number_for_group()  # noqa: SLF001  # as torch does
    group._set_default_backend(kind)  # noqa: SLF001  # the same
    group._register_backend(torch.device("cpu"), kind, backend)  # noqa: SLF001  # the same
    group._set_group_name(options.group_id)  # noqa: SLF001  # the same
    return group


def _label(name: str, ranks: tuple[int, ...]) -> str:
    """`default`, or what torch calls it; equal names of different ranks are different groups."""
    if name == "0":
        return "default"
    return f"{name}:{','.join(map(str, ranks))}" if len(ranks) <= 8 else f"{name}:{hash(ranks):x}"


def _made_by_ranks(kind: Any, make: Callable[..., Any], original: Any) -> type:
    """A class that makes a store of the simulated world for a rank, and else what it replaces."""

    class MadeByRanks(type(original)):  # type: ignore[misc]  # a metaclass of pybind's
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            rank = running_rank()
            store = None
            if rank is not None:
                world = present_world()
                store = make(world.scheduler, world.shared, *args, **kwargs)
            if rank is None or store is None:
                return original(*args, **kwargs)
            rank.own_state[_KEY].stores.append(store)  # C++ keeps no Python object alive
            return store

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original | kind)

    return MadeByRanks(original.__name__, (original,), {})


def _prefixed(
    _scheduler: Any, _shared: Any, prefix: str, store: Any
) -> RehearsedPrefixStore | None:
    """The one around a store of the simulated world: C++ could not pass on to that all it takes."""
    return RehearsedPrefixStore(prefix, store) if isinstance(store, RehearsedStore) else None


def _with_our_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_process_group_helper(
        size: int, group_rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        global _asked_for, _may_be_nccl  # noqa: PLW0603  # see there
        if running_rank() is None and present_recorder() is None:
            return original(size, group_rank, ranks, backend, *args, **kwargs)
        asked = "gloo" if str(backend) == "undefined" else str(backend)
        _asked_for = asked
        _may_be_nccl = "nccl" in asked or str(backend) == "undefined"
        made = original(size, group_rank, ranks, Backend(BACKEND), *args, **kwargs)
        group, store = made
        if store is not None:
            c10d._world.pg_map[group] = (Backend(asked), store)  # noqa: SLF001  # see the module's text
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(Backend(asked)))  # noqa: SLF001  # the same
        return made

    return new_process_group_helper


def _unique_per_rank(original: Callable[..., str]) -> Callable[..., str]:
    def process_group_name(*args: Any, **kwargs: Any) -> str:
        name, rank = original(*args, **kwargs), running_rank()
        if rank is None:
            return name
        unique = f"{name}{OF_RANK}{rank.number}.{present_world().serial}"
        rank.own_state[_KEY].names.append(unique)
        return unique

    return process_group_name


def _forget_meshes() -> None:
    """Empty the caches whose keys are meshes: they would keep the groups of a finished world."""
    if (redistributing := sys.modules.get("torch.distributed.tensor._redistribute")) is not None:
        redistributing._gen_transform_infos.cache_clear()  # noqa: SLF001  # see the module's text
        redistributing.clear_redistribute_planner_cache()
        costs = import_module("torch.distributed.tensor._collective_utils")
        costs.MeshTopoInfo.build_from_mesh.cache_clear()


def _numbered(original: Callable[..., None]) -> Callable[..., None]:
    """`DeviceMesh.__init__`: equal meshes of two ranks are different keys."""

    @wraps(original)
    def init(mesh: Any, *args: Any, **kwargs: Any) -> None:
        original(mesh, *args, **kwargs)
        if (rank := running_rank()) is not None:
            mesh._thread_id = rank.own_state[_KEY].number  # noqa: SLF001  # see the module's text

    return init


def _renumbered(original: Callable[..., None]) -> Callable[..., None]:
    """`DeviceMesh.__setstate__`: a mesh of another rank equals the own one, as on processes."""

    def set_state(mesh: Any, state: dict[str, Any]) -> None:
        rank = running_rank()
        number = None if rank is None else rank.own_state[_KEY].number
        original(mesh, {**state, "_thread_id": number, "_hash": None})

    return set_state


def _unregister_those_of_rank(original: Callable[[], None]) -> Callable[[], None]:
    def unregister_all_process_groups() -> None:
        rank = running_rank()
        if rank is None:
            original()
        else:
            _forget_groups(rank)

    return unregister_all_process_groups


def _forget_groups(rank: Rank) -> None:
    """Take a rank's groups out of the registry in C++, and what they share."""
    rank.own_state.pop(SYMMETRIC_MEMORY, None)
    names, rank.own_state[_KEY].names = rank.own_state[_KEY].names, []
    shared = sys.modules.get("torch.distributed._symmetric_memory")
    for name in names:
        with suppress(RuntimeError):  # the program has destroyed it
            c10d._unregister_process_group(name)  # noqa: SLF001  # see the module's text
        if shared is not None:
            shared._group_name_to_store.pop(name, None)  # noqa: SLF001  # the same
            shared._group_name_to_workspace_tensor.pop(name, None)  # noqa: SLF001  # the same


def _refused_to_ranks(original: Callable[..., None]) -> Callable[..., None]:
    """`init_rpc`, which would wait in C++ for ranks that are threads of the same process."""

    def init_rpc(*args: Any, **kwargs: Any) -> None:
        if running_rank() is not None:
            raise NotImplementedError(
                "torch.distributed.rpc needs processes, and simulated ranks are threads of one: run"
                " the program without --on sim"
            )
        original(*args, **kwargs)

    return init_rpc


def _refused_with_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_object_to_tensor`: torch would look for the size of an object in a tensor without data."""

    @wraps(original)
    def object_to_tensor(*args: Any, **kwargs: Any) -> Any:
        if running_rank() is not None and makes_fake_tensors():
            raise NotImplementedError(
                "a collective of objects under FakeTensorMode: objects travel as the numbers of"
                " tensors, and fake tensors have none; call it outside of the mode"
            )
        return original(*args, **kwargs)

    return object_to_tensor


def _of_gloo(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The default time-out for any backend: torch warns that this build of it has no NCCL."""
    return lambda backend: original(backend if running_rank() is None else Backend.GLOO)


def _rendezvous(original: Callable[..., Any]) -> Callable[..., Any]:
    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
        running = running_rank()
        if running is None:
            yield from original(url, rank, world_size, **kwargs)
            return
        environment = running.process.environment
        world = present_world()
        entries = world.shared.setdefault(f"store {url}", StoreEntries())
        store = RehearsedStore(world.scheduler, entries)
        running.own_state[_KEY].stores.append(store)  # C++ keeps no Python object alive
        yield (
            store,
            int(environment["RANK"]) if rank < 0 else rank,
            int(environment["WORLD_SIZE"]) if world_size < 0 else world_size,
        )

    return rendezvous


def _of_one_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what would end the process: it can have one profiler, whose thread must end it."""

    def begin(*args: Any, **kwargs: Any) -> Any:
        rank = running_rank()
        if rank is not None:
            profiled = present_world().shared.setdefault("profiled rank", rank)
            if profiled is not rank:
                raise ConfigError(
                    f"rank {rank.number} starts torch's profiler, which rank {profiled.number} has"
                    " used: simulated ranks are one process, of which it can record one rank",
                    hint="profile one rank, as in `if rank == 0:`; --on sim:MACHINE --trace "
                    "records what all of them do",
                )
        return original(*args, **kwargs)

    return begin


def _begin_update(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """What is computed from now on is the update of an optimiser."""
    rank = running_rank()
    if rank is not None:
        present_world().prediction.clock_of(rank).is_updating = True


def _end_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """A step of the training ends with one of the first optimiser that the rank has stepped."""
    rank = running_rank()
    if rank is None:
        return
    clock = present_world().prediction.clock_of(rank)
    clock.is_updating = False
    if present_world().timing_only is None:
        from rankwise.simranks.torch.storages import keep_counters_on_host  # noqa: PLC0415  # for machines

        keep_counters_on_host(optimizer, clock)
    if rank.own_state[_KEY].is_stepped_by(optimizer):
        clock.end_step()
        if present_world().timing_only is not None:
            from rankwise.simranks.torch.without_data import end_step  # noqa: PLC0415  # rare

            end_step(rank)


def _synchronized(original: Callable[..., None]) -> Callable[..., None]:
    def synchronize(device: Any = None) -> None:
        if running_rank() is None:
            original(device)
        else:
            wait_for_device()

    return synchronize
