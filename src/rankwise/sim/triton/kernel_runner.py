"""`KernelRunner`: a kernel on the processing elements of a simulated machine.

Each program is a fiber on a PE, which `hardware.occupancy` chooses. It calculates real numbers. Its
cost goes to the engines of the PE (`timing`), its messages go through the modelled queues
(`queues`).
Kernels are children of the main greenlet, which drives the agenda, never of the rank that happened
to launch them: when a rank dies, its kernels do not die in the middle with it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from rankwise.sim.hardware.engine import GraphEngine
from rankwise.sim.hardware.environment import DealtPes, KernelEnvironment
from rankwise.sim.hardware.replicas import Original, Replica
from rankwise.sim.kernel import Steps, main_greenlet
from rankwise.sim.triton.execution import ACTIVE
from rankwise.sim.triton.jit import BoundLaunch, JITFunction
from rankwise.sim.triton.launch_arguments import TensorDescriptor
from rankwise.sim.triton.machine_launch import DevicePointer, MachineLaunch
from rankwise.sim.triton.peers import LaunchRank
from rankwise.sim.triton.tuning import Autotuner, Config, Heuristics, Trial

if TYPE_CHECKING:
    from greenlet import greenlet

__all__ = ["DevicePointer", "KernelRunner", "bind_on", "tried"]


class KernelRunner:
    """Runs kernels on a simulated machine; one runner may serve any number of launches.

    Args:
        meta: the kernel's compile-time parameters by name, and whatever arguments are passed so.
        grid: the shape of the grid, or a function of the parameters that gives it; a row of
            `num_programs` if None.
        ahead: how many operations a program may run ahead of simulated time.
        is_representative_of: the launch that this one is a trial of, whose whole numbers it sees.
        place: the rank that launches, among so many.
        part: on how many PEs it may run, with their programs alone; on all if None. Programs that
            depend on others run with all of them.

    Attributes:
        ran_whole: whether the latest launch ran all programs of its grid.
        _parent: the greenlet above all kernels of the latest launch: the main one.
    """

    def __init__(
        self,
        meta: Mapping[str, Any] | None = None,
        grid: tuple[int, ...] | Callable[..., Any] | None = None,
        *,
        ahead: int = 16,
        is_representative_of: KernelEnvironment | None = None,
        place: LaunchRank = LaunchRank(0, 1),  # noqa: B008  # it never changes
        part: int | None = None,
    ) -> None:
        self._parent: greenlet | None = None
        self.meta = dict(meta or {})
        self.grid = grid
        self.ahead = ahead
        self.is_representative_of = is_representative_of
        self.place = place
        self.part = part
        self.ran_whole = True

    def run(
        self,
        env: KernelEnvironment,
        kernel_fn: Callable[..., Any] | BoundLaunch,
        kernel_args: Sequence[Any],
        num_programs: int,
    ) -> Steps:
        """Run all programs of a launch; a process of the simulation, which ends when they all have.

        `kernel_fn` may be a `BoundLaunch`, which has its arguments and its grid.
        The first step only says who the parent is: nothing of the kernel runs in the greenlet that
        happens to make it.
        """
        self._parent = main_greenlet()
        yield 0
        if isinstance(kernel_fn, BoundLaunch):
            launch = kernel_fn
        else:
            grid = self.grid or num_programs
            launch = bind_on(env, kernel_fn, kernel_args, self.meta, grid)
        launching = MachineLaunch(env, self.ahead, self.is_representative_of, self.place, self.part)
        launching.prepare(launch)
        self.ran_whole = launching.is_whole
        likeness, replicas = launching.likeness(), env.engine.replicas
        role: Original[MachineLaunch] | Replica[MachineLaunch] | None = None
        if likeness is not None:
            role = yield from replicas.role_of(
                env.sip, likeness, launching, has_data=env.enable_data
            )
        try:
            if isinstance(role, Replica):
                yield role.ended
                return
            launching.original = role
            yield from launching.all_steps()
            if role is not None:
                replicas.end(role)
        except BaseException:
            if isinstance(role, Original):
                replicas.spoil(role)
            raise
        finally:
            launching.take_back()


def bind_on(
    env: KernelEnvironment,
    kernel_fn: Any,
    args: Sequence[Any],
    meta: Mapping[str, Any],
    grid: Any,
) -> BoundLaunch:
    """Bind a launch on a machine: the kernel's arguments, with those that its decorators choose.

    Configurations are tried on machines of their own. The hooks of the one that is chosen have run
    when this returns.
    """
    meta = dict(meta)
    while isinstance(kernel_fn, (Autotuner, Heuristics)):
        if isinstance(kernel_fn, Autotuner):
            config = _fastest(env, kernel_fn, args, meta, grid)
            given = kernel_fn.parameters(config, meta)
            if config.pre_hook is not None:
                config.pre_hook(given)
            meta |= config.all_kwargs()
        else:
            meta |= kernel_fn.calculated(args, meta)
        kernel_fn = kernel_fn.fn
    function = kernel_fn if isinstance(kernel_fn, JITFunction) else JITFunction(kernel_fn)
    return function.bind(args, meta, grid)


def _fastest(
    env: KernelEnvironment, kernel: Autotuner, args: Sequence[Any], meta: dict[str, Any], grid: Any
) -> Config:
    """The fastest configuration of a kernel on this machine."""
    topology = env.engine.topology
    return kernel.fastest(
        args,
        meta,
        (topology.name, len(env.pes)),
        lambda config, part: _time_alone(env, kernel, config, args, meta, grid, part),
    )


def _time_alone(
    env: KernelEnvironment,
    kernel: Autotuner,
    config: Config,
    args: Sequence[Any],
    meta: dict[str, Any],
    grid: Any,
    part: int | None,
) -> Trial:
    """Picoseconds that a launch with a configuration takes in a trial, or a part of it.

    Nothing that its hook does there is seen here.
    """
    args = [_untouched(each) for each in args]
    meta = {name: _untouched(each) for name, each in meta.items()}
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **meta, **config.all_kwargs()}
    if config.pre_hook is not None:
        config.pre_hook(given)
    runner = KernelRunner(
        {**meta, **config.all_kwargs()}, grid, is_representative_of=env, part=part
    )
    took = _tried_by(runner, env, kernel.fn, args).now
    return Trial(took, is_whole=runner.ran_whole)


def tried(env: KernelEnvironment, launch: BoundLaunch) -> GraphEngine:
    """A machine on which a launch has been tried, and nothing else: it says what that took.

    The machine has the same topology, and the arguments lie where they lie here. It computes
    nothing, and nothing that happens there is seen here. Its programs see the whole numbers that
    are here in memory, since those say what there is to do; all other numbers are zeros.
    """
    runner = KernelRunner(is_representative_of=env)
    return _tried_by(runner, env, launch, tuple(launch.given.values()))


def _tried_by(
    runner: KernelRunner, env: KernelEnvironment, kernel: Any, args: Sequence[Any]
) -> GraphEngine:
    """A machine on which a kernel has run with arguments; of a bound launch they are its own."""
    engine = GraphEngine(env.engine.topology, enable_data=False)
    machine = engine.machine
    given = (*args, *runner.meta.values())
    for mapping in dict.fromkeys(map(env.mapping_at, _addresses_of(given))):
        engine.space(mapping.places.memories[0].sip).map_like(
            mapping, lambda memory: machine.sip(memory.sip).cube(memory.cube).hbm(memory.pe)
        )
    assert isinstance(env.pes, DealtPes), "an engine deals the PEs of its launches"
    trial = KernelEnvironment(engine, env.sip, env.pes.on(machine.sip(env.sip)), env.name)
    outer = ACTIVE.execution
    try:
        steps = runner.run(trial, kernel, args, 0)
        engine.simulator.run(engine.simulator.process(steps, f"trial of {env.name}"))
    finally:
        ACTIVE.execution = outer
    return engine


class _Untouched:
    """A tensor as the hooks of a trial see it: methods that would change its values do nothing.

    Those are the ones whose names end in an underscore, as torch has it.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_") and not name.startswith("_"):
            return lambda *_args, **_kwargs: self
        return getattr(self._tensor, name)

    def __setitem__(self, key: object, value: object) -> None:
        """Leave the tensor as it is."""


def _untouched(argument: Any) -> Any:
    """An argument for a trial; descriptors are copied, since hooks set the shapes of blocks."""
    if isinstance(argument, TensorDescriptor):
        argument = copy(argument)
        argument.base = _untouched(argument.base)
    elif type(argument) in {tuple, list}:
        return tuple(map(_untouched, argument))
    elif hasattr(argument, "address") and not isinstance(argument, DevicePointer):
        return _Untouched(argument)
    return argument


def _addresses_of(arguments: Iterable[Any]) -> Iterator[int]:
    """Where the memory begins that arguments lie in."""
    for each in arguments:
        if isinstance(each, TensorDescriptor):
            yield from _addresses_of((each.base,))
        elif type(each) in {tuple, list}:
            yield from _addresses_of(each)
        elif hasattr(each, "address"):
            yield each.address
