"""Enters the calls of torch.distributed in the rank's call record, see `call_ring`.

The boot code calls `enter_calls` when `torch.distributed.distributed_c10d` has been imported, and
before `torch.distributed` takes its names from there. Each function that begins a collective is
replaced by one that enters the call, with its line in the program, calls the function, and enters
how it has ended. So is `Work.wait`, by which a rank waits for a call that it has issued; and
`Work.is_completed` counts how often it has told that the call is not over. What C++
begins by itself (DDP's reducer, functional collectives) is not seen, but torch's flight recorder
has it: `recorded_groups` tells of that when somebody asks.

All that is private to torch is used in `_TorchGroups` and `recorded_groups`, and `missing_names`
tells what a release of torch lacks of it: then nothing is entered, and the user is told so. Names
and places of arguments are read from the functions themselves, so that releases may differ in them.

Loaded as `call_ring` is, and from Python 3.9 on.
"""

import functools
import os
import sys
import time
from contextlib import contextmanager
from weakref import WeakKeyDictionary

TYPE_CHECKING = False  # as in `call_ring`
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any

    from rankwise.drivers.real.worker.call_ring import RingGroup

    _Issued = tuple[Any, int, bytes]  # the ring, number and stamp of a call

NAMES_NEEDED = ("_world", "get_rank", "all_reduce", "broadcast", "barrier")
WORLD_NAMES_NEEDED = ("default_pg", "pg_group_ranks", "pg_names")
"""Of `distributed_c10d` and of its `_world`."""
_KNOWN_MAX = 1024
_NOWHERE = 1 << 20
OF_ONE_SIZE = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
"""Operations whose tensors must have as many elements on all members."""
_OF_ONE_SIZE_IN_GLOO = ("all_gather", "gather", "scatter")
"""The same, where the backend is gloo, which ends a rank that receives more than it expects."""
_OPERATIONS = {
    # The one that goes to the backend: in some releases others call it.
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}
_COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "all_to_all",
    "barrier",
    "monitored_barrier",
)
_MESSAGES = {"send": "to", "recv": "from"}
_TENSORS = ("tensor", "input", "input_tensor", "output", "input_list", "input_tensor_list")
_ROOTS = ("src", "dst", "group_src", "group_dst")
_OF_RANK_0 = ("gather", "scatter")
"""Where no root is named, and other ranks may name it."""

_OPERATIONS_OF_RECORDER = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}
_TYPES_OF_RECORDER = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
_RECORDED_MAX = 8
_SAMPLED_MAX = 128
"""Latest calls of a group that are told of: in full, and for lateness and the record of the run."""


def enter_calls(
    c10d: "ModuleType",
    ring_module: "ModuleType",
    digest_of: "Callable[..., int]",
    reporter: "Any",
) -> None:
    """Let calls of this module's functions be entered, each with its `core.matching.digest_of`.

    `reporter` is told of the recorder once there is a process group, and when these are destroyed.
    It is also told why calls cannot be entered, where torch is another than we know.
    """
    missing = missing_names(c10d)
    if missing:
        reporter.tell_ledger_is_off(f"has no {', '.join(missing)}")
        return
    ring_module.ring_of_process()  # a rank without a call yet has come to none
    groups = _TorchGroups(c10d, ring_module, digest_of, reporter)
    for name in _COLLECTIVES:
        own = _OPERATIONS.get(name, name)
        function = getattr(c10d, own, None) or getattr(c10d, name, None)
        if function is not None:
            setattr(c10d, function.__name__, _Entered(name, function, groups).wrapper())
    for name, way in _MESSAGES.items():
        function = getattr(c10d, name, None)
        if function is not None:
            setattr(c10d, name, _Entered(name, function, groups, way).wrapper())
    wait = getattr(getattr(c10d, "Work", None), "wait", None)
    if wait is not None:
        c10d.Work.wait = groups.handles.entering(wait)
        c10d.Work.is_completed = _polling(c10d.Work.is_completed, ring_module)
    init = getattr(c10d, "init_process_group", None)
    if init is not None:
        is_by_environment = _initializes_by_environment(init)

        @functools.wraps(init)
        def init_process_group(*args: "Any", **kwargs: "Any") -> None:
            begun_ns = time.time_ns()
            with groups.meeting(is_by_environment(args, kwargs)):
                init(*args, **kwargs)
            reporter.left_at = None
            generation = groups.generation
            reporter.answer_for_recorder(lambda: recorded_groups(c10d, generation, begun_ns))

        setattr(c10d, "init_process_group", init_process_group)  # noqa: B010 - as above
    destroy = getattr(c10d, "destroy_process_group", None)
    if destroy is not None:
        setattr(c10d, "destroy_process_group", groups.forgetting(destroy))  # noqa: B010 - as above


def _initializes_by_environment(init: "Callable[..., Any]") -> "Callable[[Any, Any], bool]":
    """Return whether a call of `init_process_group` takes rank and world from the environment."""
    while hasattr(init, "__wrapped__"):
        init = init.__wrapped__
    code = init.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    def is_by_environment(args: "Any", kwargs: "Any") -> bool:
        given = {**dict(zip(names, args)), **kwargs}  # noqa: B905 - Python 3.9 has no `strict`
        method = given.get("init_method")
        return (
            (method is None or method == "env://")
            and given.get("store") is None
            and str(given.get("world_size", -1)) in ("-1", os.environ.get("WORLD_SIZE"))
            and str(given.get("rank", -1)) in ("-1", os.environ.get("RANK"))
        )

    return is_by_environment


def missing_names(c10d: "ModuleType") -> "list[str]":
    """Return what this module has not of what is needed."""
    missing = [f"distributed_c10d.{name}" for name in NAMES_NEEDED if not hasattr(c10d, name)]
    world = type(getattr(c10d, "_world", None))
    if not missing:
        missing = [f"_world.{name}" for name in WORLD_NAMES_NEEDED if not hasattr(world, name)]
    return missing


def recorded_groups(c10d: "ModuleType", generation: int, since_ns: int) -> str:
    """Return the JSON of what torch's flight recorder has of each group, its latest calls.

    Torch names groups anew when all have been destroyed, and records on. So groups are those of a
    `generation`, which has made no call before `since_ns`.

    It takes 20 to 50 ms for the 2,000 calls that torch records by default, and the interpreter for
    so long.
    """
    import json  # noqa: PLC0415 - rarely needed

    world = c10d._world  # noqa: SLF001 - as above
    groups = {str(world.pg_names[group]): group for group in world.pg_names}
    if not groups:
        return "[]"
    c = sys.modules["torch._C._distributed_c10d"]
    entries = json.loads(c._dump_fr_trace_json()).get("entries", [])  # noqa: SLF001 - no public name
    of_nccl = getattr(c, "_dump_nccl_trace_json", None)  # it has a recorder of its own
    if of_nccl is not None:
        entries += json.loads(of_nccl()).get("entries", [])
    calls: dict[str, dict[int, Any]] = {}
    sampled: dict[str, dict[int, Any]] = {}
    for entry in entries:
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        if entry["is_p2p"] or name not in groups or entry["time_created_ns"] < since_ns:
            continue
        known = calls.setdefault(name, {})
        if known and number < max(known):  # an earlier group had the name
            known.clear()
            sampled[name].clear()
        if number in known:  # one of several that are one call
            continue
        known[number] = entry
        if len(known) > _RECORDED_MAX:
            del known[min(known)]
        sample = sampled.setdefault(name, {})
        sample[number] = entry
        if len(sample) > _SAMPLED_MAX:
            del sample[min(sample)]
    # Of several, as this thread may have to wait between the two clocks.
    wall_offset = min(-time.monotonic_ns() + time.time_ns() for _ in range(5))
    told = []
    for name, known in calls.items():
        members = tuple(world.pg_group_ranks[groups[name]])
        is_all = groups[name] is world.default_pg
        signatures: dict[tuple[Any, ...], int] = {}
        numbered = []
        for number, entry in sampled[name].items():
            signature = _signature_of(entry)
            begun_at = entry["time_created_ns"] - wall_offset
            what = signatures.setdefault(signature, len(signatures))
            numbered.append((number, begun_at, what))
        told.append(
            {
                "name": _key(generation, name),
                "label": "" if is_all else _label(groups[name], members),
                "members": members,
                "calls": [_recorded_call(entry, wall_offset) for entry in known.values()],
                "sample": numbered,
                "signatures": list(signatures),
            }
        )
    return json.dumps(told)


def _signature_of(entry: "Any") -> "tuple[Any, ...]":
    """Return an entry's `core.matching.CallSignature` as JSON has it.

    The recorder has neither reductions nor roots.
    """
    operation, shape, dtype = _operation_of(entry)
    tensors = ((tuple(shape), dtype),) if shape is not None and dtype else ()
    return operation, "", -1, tensors


def _operation_of(entry: "Any") -> "tuple[str, Any, str]":
    """Return what an entry is of: the operation, its shape if there is one, and its dtype."""
    operation = entry["profiling_name"].rpartition(":")[2]
    operation = _OPERATIONS_OF_RECORDER.get(operation, operation)
    sizes = entry["input_sizes"] or entry["output_sizes"]
    dtypes = entry["input_dtypes"] or entry["output_dtypes"]
    dtype = _TYPES_OF_RECORDER.get(dtypes[0], dtypes[0]) if dtypes else ""
    return operation, sizes[0] if sizes and dtypes else None, dtype


def _recorded_call(entry: "Any", wall_offset: int) -> "dict[str, Any]":
    return {
        "begun_at": entry["time_created_ns"] - wall_offset,
        "number": entry["collective_seq_id"],
        "signature": _signature_of(entry),
        # NCCL's watchdog retires calls a while after the GPU has completed them.
        "is_over": entry["retired"] or entry["state"] == "completed",
    }


class _TorchGroups:
    """Torch's process groups as the ring knows them."""

    def __init__(
        self,
        c10d: "ModuleType",
        ring_module: "ModuleType",
        digest_of: "Callable[..., int]",
        reporter: "Any",
    ) -> None:
        self.ring_module = ring_module
        self.digest_of = digest_of
        self._c10d = c10d
        self._reporter = reporter
        self.handles = _CallHandles(ring_module)
        self.generation = 0
        """Counts how often all groups have been destroyed."""
        self.ring: "Any" = None  # noqa: UP037 - as everywhere in this file
        self._init_of: "tuple[Any, RingGroup | None]" = None, None  # noqa: UP037 - the same
        self.known: "dict[Any, RingGroup | None]" = {}  # noqa: UP037 - the same

    def find(self, ring: "Any", group: "Any") -> "RingGroup | None":
        """Return a group of this process, None for one whose calls are not entered."""
        if ring is not self.ring:  # the first call, or the process is a rank of another world
            self.ring = ring
            self.known.clear()
        try:
            return self.known[group]
        except KeyError:
            try:
                found = self._enter(ring, group)
            except Exception:  # noqa: BLE001 - another torch, or a group of another kind
                found = None
            self.known[group] = found
            return found

    def rank_of(self, group: "Any", place: int) -> int:
        """Return the rank in the world of a member."""
        world = self._c10d._world  # noqa: SLF001 - no public name
        ranks = world.pg_group_ranks[group or world.default_pg]
        return int(next(rank for rank, member in ranks.items() if member == place))

    def backend_of(self, group: "Any") -> str:
        """Return the name of the library that carries out a group's calls."""
        return str(self._c10d.get_backend(group))

    def forgetting(self, destroy: "Callable[..., Any]") -> "Callable[..., Any]":
        """Return torch's function that destroys groups, as one that lets us know."""

        @functools.wraps(destroy)
        def destroy_process_group(*args: "Any", **kwargs: "Any") -> "Any":
            group = args[0] if args else kwargs.get("group")
            try:
                if group is None or group is self._c10d._world.default_pg:  # noqa: SLF001 - as above
                    self.generation += 1
                    self.known.clear()
                    self.ring_module.be_done()
                    self._reporter.left_at = time.monotonic_ns(), time.time_ns()
                    self._reporter.tell_last_recorded()
                else:
                    self.known.pop(group, None)
            except Exception as error:  # noqa: BLE001 - as above: the program goes on
                what = f"{type(error).__name__}: {error}"
                why = f"destroys groups in an unknown way ({what})"
                self._reporter.tell_ledger_is_off(why)
            return destroy(*args, **kwargs)

        return destroy_process_group

    @contextmanager
    def meeting(self, is_by_environment: bool) -> "Iterator[None]":
        """Enter that the rank is in `init_process_group`, where it waits for all others.

        Only if the launcher's variables name the world: ranks of a world that the program makes up
        are not those of the launcher.
        """
        ring = self.ring_module.ring_of_process() if is_by_environment else None
        try:
            entry = None if ring is None else self._begin_init(ring)
        except Exception:  # noqa: BLE001 - variables of any kind: torch itself complains
            entry = None
        if ring is None or entry is None:
            yield
            return
        stage = self.ring_module.FAILED
        try:
            yield
            stage = self.ring_module.DONE
        finally:
            ring.end(entry, stage)

    def _begin_init(self, ring: "Any") -> "int | None":
        environment = os.environ
        # A program may have set them for a world of its own. Others are in that, or nobody else.
        if (
            int(environment["RANK"]) != ring.rank
            or environment["WORLD_SIZE"] != environment["ROLE_WORLD_SIZE"]
        ):
            return None
        if self._init_of[0] is not ring:
            size = int(environment["WORLD_SIZE"])
            # One group for all calls of this world, also after groups were destroyed: a rank that
            # recovers has destroyed some, and one that was begun anew has not.
            self._init_of = ring, ring.add_group(self.ring_module.INIT_KEY, "", size, range(size))
        group = self._init_of[1]
        if group is None:
            return None
        inner = (*_files_of_torch(sys.modules["torch"].__file__ or ""), _OWN_PATH)
        line = self.ring_module.line_outside(1, inner)
        stamp = self.ring_module.stamp_of(group, 0, "init_process_group", line)
        entry: int = ring.begin(group, stamp)
        return entry

    def _enter(self, ring: "Any", group: "Any") -> "RingGroup | None":
        world = self._c10d._world  # noqa: SLF001 - as above
        actual = world.default_pg if group is None else group
        if actual is None or self._c10d.get_rank() != ring.rank:
            return None  # torch counts ranks in another way than the launcher
        if group is None or actual is not world.default_pg:
            members = tuple(world.pg_group_ranks[actual])
            name = str(world.pg_names[actual])
            is_all = actual is world.default_pg
            label = "" if is_all else _label(actual, members)
            key = _key(self.generation, name)
            entered: RingGroup | None = ring.add_group(key, label, len(members), members)
            if entered is None:
                self._reporter.tell_ledger_lacks(
                    f"has room for {self.ring_module.GROUPS_MAX} groups of a rank, and does not "
                    f"see what rank {ring.rank} calls in others, such as {label or name}"
                )
            return entered
        return self.find(ring, None)


def _key(generation: int, name: str) -> str:
    return f"torch {generation} {name}"


def _label(group: "Any", members: "tuple[int, ...]") -> str:
    """Return how people call a group: its description, unless that says nothing; else its ranks."""
    description = str(getattr(group, "group_desc", "") or "")
    if description and description not in ("undefined", "default_pg"):
        return description.removeprefix("mesh_")
    shown = ", ".join(map(str, members[:4]))
    return f"[{shown}, ...]" if len(members) > 4 else f"[{shown}]"


class _CallHandles:
    """The handles of calls that were issued, and the waits for them.

    A wait for what C++ has issued, or for a message, is entered without a group: it shows where
    time goes, and accuses nobody. A wait of torch itself, within a call that is entered, is that
    call's: entered, it would be the latest that the rank has called.
    """

    def __init__(self, ring_module: "ModuleType") -> None:
        self._ring_module = ring_module
        self._issued: "WeakKeyDictionary[Any, _Issued]" = WeakKeyDictionary()  # noqa: UP037
        self._unknown = (None, 0, ring_module.stamp_of(None, 0, "wait", ("", 0)))
        self._known: "dict[Any, bytes]" = {}  # noqa: UP037 - as everywhere in this file

    def note(self, handle: "Any", issued: "_Issued") -> None:
        """Remember what a handle is of."""
        try:
            self._issued[handle] = issued
        except TypeError:  # another kind of handle, such as a list
            return

    def entering(self, wait: "Callable[..., Any]") -> "Callable[..., Any]":
        """Return torch's function that waits, as one that enters the wait."""
        ring_module = self._ring_module
        inner = _files_of_torch(sys.modules["torch"].__file__ or "")

        @functools.wraps(wait)
        def call(handle: "Any", *args: "Any", **kwargs: "Any") -> "Any":
            ring = ring_module.ring
            if ring is None:
                return wait(handle, *args, **kwargs)
            try:
                line = ring_module.line_outside(1, inner)
                entry = None if line[0] == _OWN_PATH else self._begin(ring, handle, line)
            except Exception:  # noqa: BLE001 - a handle of any kind
                entry = None
            if entry is None:
                return wait(handle, *args, **kwargs)
            stage = ring_module.FAILED
            try:
                result = wait(handle, *args, **kwargs)
                stage = ring_module.DONE
            finally:
                ring.end(entry, stage)
            return result

        return call

    def _begin(self, ring: "Any", handle: "Any", line: "tuple[str, int]") -> int:
        """Enter a wait at that line; return where."""
        issued = self._issued.get(handle, self._unknown)
        if issued[0] is not ring:  # C++ has issued it, or it is of an earlier world
            issued = self._unknown
        _, number, stamp = issued
        stamp_of_wait = self._known.get((stamp, line))
        if stamp_of_wait is None:
            stamp_of_wait = self._ring_module.stamp_of_wait(stamp, line)
            _remember(self._known, (stamp, line), stamp_of_wait)
        entry: int = ring.begin_wait(number, stamp_of_wait)
        return entry


def _polling(is_completed: "Callable[..., bool]", ring_module: "Any") -> "Callable[..., bool]":
    """Return torch's function that asks a handle, as one that enters when it is asked in vain."""

    @functools.wraps(is_completed)
    def call(handle: "Any") -> bool:
        is_over = is_completed(handle)
        if not is_over and ring_module.ring is not None:
            ring_module.ring.enter_poll()
        return is_over

    return call


def _files_of_torch(path: str) -> "tuple[str, ...]":
    """Return how the names of files begin that are no line of a program, given one of torch."""
    folder = os.path.dirname(path)
    beside = os.path.join(os.path.dirname(folder), "typing_extensions.py")  # says "deprecated"
    return (os.path.join(folder, ""), beside, os.__file__.replace("os.py", "contextlib"))


_OWN_PATH = _files_of_torch.__code__.co_filename


class _Entered:
    """One of torch's functions, whose calls are entered."""

    def __init__(
        self, name: str, function: "Callable[..., Any]", groups: _TorchGroups, way: str = ""
    ) -> None:
        self._name = name
        self._function = function
        self._groups = groups
        self._way = way
        inner = function
        while hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        code = inner.__code__
        self._names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self._tensor = next((each for each in _TENSORS if each in self._names), None)
        self._known: dict[Any, bytes] = {}
        self._sites: dict[Any, tuple[Any, bytes]] = {}
        """Stamps by where a call stands in the program, which is known sooner than its line: the
        last one there, and that for each shape."""
        self._inner = _files_of_torch(os.path.dirname(code.co_filename))

    def wrapper(self) -> "Callable[..., Any]":
        """Return the function that takes its place."""
        function, groups, sites = self._function, self._groups, self._sites
        ring_module, stamp_for = groups.ring_module, self._stamp_for
        ring_of_process = ring_module.ring_of_process
        issued, done, failed = ring_module.ISSUED, ring_module.DONE, ring_module.FAILED
        now, stage_bits = time.monotonic_ns, ring_module.STAGE_BITS
        get_frame = sys._getframe  # noqa: SLF001 - the only way to know the line
        is_message, find, known_groups = bool(self._way), groups.find, groups.known
        # Arguments are looked for here, without a call for each: this is done for every collective.
        # No generator reads `args` or `kwargs`, for that would make cells of them, which are slow.
        op_name = "tag" if is_message else "op"
        group_at, op_at = self._place_of("group"), self._place_of(op_name)
        async_at, tensor_at = self._place_of("async_op"), self._place_of(self._tensor)
        tensor_name = self._tensor or ""
        has_tensor = bool(tensor_name) and not tensor_name.endswith("_list")
        roots = [name for name in _ROOTS if name in self._names]
        root_name, other_root_name = (*roots, "", "")[:2]
        root_at, other_root_at = self._place_of(root_name), self._place_of(other_root_name)

        @functools.wraps(function)
        def call(*args: "Any", **kwargs: "Any") -> "Any":
            ring = ring_module.ring or ring_of_process()
            if ring is None:
                return function(*args, **kwargs)
            count = len(args)  # most calls have no keywords, which is sooner asked than looked up
            group = args[group_at] if count > group_at else kwargs.get("group") if kwargs else None
            entered = known_groups.get(group) if ring is groups.ring else None
            entered = entered or find(ring, group)
            if entered is None:
                return function(*args, **kwargs)
            try:
                frame = get_frame(1)
                code = frame.f_code
                tensor: Any = args[tensor_at] if count > tensor_at else kwargs.get(tensor_name)
                op = args[op_at] if count > op_at else kwargs.get(op_name) if kwargs else None
                dtype: Any = None
                if has_tensor:
                    shape, dtype = tensor.shape, tensor.dtype
                else:
                    shape = _shapes(tensor)
                root: Any = None
                other_root: Any = None
                if roots:
                    root = args[root_at] if count > root_at else kwargs.get(root_name)
                    other_root = (
                        args[other_root_at]
                        if count > other_root_at
                        else kwargs.get(other_root_name)
                    )
                site = id(code) + frame.f_lasti
                what = code, entered, shape, dtype, op, root, other_root
                found = sites.get(site)
                if found is not None and found[0] == what:
                    stamp = found[1]
                else:
                    stamp = stamp_for(site, what, args, kwargs)
                words = ring.words
                entry = ring.begin(None if is_message else entered, stamp)
            except Exception:  # noqa: BLE001 - arguments of any kind: the function itself complains
                return function(*args, **kwargs)
            stage = failed
            try:
                result = function(*args, **kwargs) if kwargs else function(*args)
                stage = done
                if result is None:  # as of nearly all, so that the argument need not be looked for
                    return None
                is_async = args[async_at] if count > async_at else kwargs.get("async_op")
                if is_async:
                    stage = issued
            finally:
                words[entry] = now() << stage_bits | stage  # `ring.end`, without the call
            if is_async and not is_message:
                groups.handles.note(result, (ring, ring.number_at(entry), stamp))
            return result

        return call

    def _place_of(self, name: "str | None") -> int:
        """Return the place of an argument, one that no call reaches if it has none."""
        return self._names.index(name) if name in self._names else _NOWHERE

    def _argument(self, name: "str | None", args: "Any", kwargs: "Any") -> "Any":
        at = self._place_of(name)
        return args[at] if len(args) > at else kwargs.get(name)

    def _stamp_for(self, site: "Any", what: "Any", args: "Any", kwargs: "Any") -> bytes:
        """Return the stamp of a call, and remember it for its place in the program."""
        code, entered, shape, *_ = what
        found = self._sites.get((site, shape))
        if found is None or found[0] != what:
            line = self._groups.ring_module.line_outside(2, self._inner)
            key = (line, *what[1:])
            stamp = self._known.get(key)
            if stamp is None:
                stamp = self._stamp(args, kwargs, entered, line)
                _remember(self._known, key, stamp)
            found = what, stamp
            if code.co_filename.startswith(self._inner):
                return stamp  # others have called that place
            _remember(self._sites, (site, shape), found)
        _remember(self._sites, site, found)
        return found[1]

    def _stamp(self, args: "Any", kwargs: "Any", entered: "Any", line: "Any") -> bytes:
        """Return a call as it is entered, and what all members must agree on."""
        group = self._argument("group", args, kwargs)
        tensor = self._argument(self._tensor, args, kwargs)
        peer, root_number = -1, None
        reduction = ""
        if "op" in self._names:
            op = self._argument("op", args, kwargs)
            kind = getattr(op, "op", op)  # of `ReduceOp(ReduceOp.SUM)`, which has an address
            reduction = "sum" if op is None else str(kind).rpartition(".")[2].lower()
        for name in _ROOTS:
            root = self._argument(name, args, kwargs)
            if root is not None:
                of_group = name.startswith("group")
                peer = self._groups.rank_of(group, root) if of_group else int(root)
                root_number = peer
        if root_number is None and self._name in _OF_RANK_0:
            root_number = 0
        agreed: list[tuple[tuple[int, ...] | None, str]] = []
        if getattr(tensor, "dtype", None) is not None:
            count = (tensor.numel(),) if self._is_of_one_size(group) else None
            agreed.append((count, _dtype_of(tensor)))
        root = -1 if root_number is None else root_number
        tag = self._argument("tag", args, kwargs) if self._way else 0
        lists, forms = _forms_of(tensor)
        ring_module = self._groups.ring_module
        stamp: bytes = ring_module.stamp_of(
            None if self._way else entered,
            self._groups.digest_of(self._name, reduction, root, agreed),
            ring_module.signature_text(
                self._name, reduction, root_number, int(tag or 0), lists, forms
            ),
            line,
            peer if self._way else -1,
        )
        return stamp

    def _is_of_one_size(self, group: "Any") -> bool:
        """Return whether members must come with as many elements."""
        if self._name in _OF_ONE_SIZE_IN_GLOO:
            return self._groups.backend_of(group) == "gloo"
        return self._name in OF_ONE_SIZE


def _remember(known: "dict[Any, Any]", key: "Any", value: "Any") -> None:
    if len(known) >= _KNOWN_MAX:
        known.clear()
    known[key] = value


def _shapes(tensors: "Any") -> "Any":
    """Return what tells lists of tensors apart."""
    if isinstance(tensors, (list, tuple)):
        return tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    return None


def _forms_of(tensor: "Any") -> "tuple[list[int], list[tuple[tuple[int, ...], str]]]":
    """Return the lengths of nested lists, and shape and dtype of their first tensor."""
    lists: list[int] = []
    while isinstance(tensor, (list, tuple)):
        lists.append(len(tensor))
        tensor = tensor[0] if tensor else None
    if tensor is None:
        return lists, []
    return lists, [(tuple(tensor.shape), _dtype_of(tensor))]


def _dtype_of(tensor: "Any") -> str:
    return str(tensor.dtype).rpartition(".")[2]
