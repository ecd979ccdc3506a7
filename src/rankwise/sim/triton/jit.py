"""`jit`: a Python function as a kernel.

The function runs as it is, under two names of Python's that a kernel means differently: `range`
counts in the language's integers and over bounds that differ between programs, and `min`, `max` and
`print` take tensors. Its globals are copied for that, anew at each launch, so that the user's
module stays as it is.
"""

import ast
import builtins
import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from hashlib import sha256
from operator import index
from tokenize import TokenError
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from rankwise.base.errors import ConfigError, LocalProtocolError, RankwiseError
from rankwise.sim.triton import creation, debug, functions, logic
from rankwise.sim.triton.annotations import annotated_type, is_number, number_as
from rankwise.sim.triton.constants import constexpr, plain
from rankwise.sim.triton.execution import ACTIVE, KERNEL_CODE, Launch, Observer, place
from rankwise.sim.triton.launch_arguments import (
    HOST_MACHINE,
    Arguments,
    launcher_among,
    tensor_around,
)
from rankwise.sim.triton.launching import run_launch
from rankwise.sim.triton.logic import rewritten
from rankwise.sim.triton.memory import LaunchMemory
from rankwise.sim.triton.poll_limits import TRIES, TRIES_COUNTED
from rankwise.sim.triton.races import RaceDetector
from rankwise.sim.triton.tensor import tensor
from rankwise.sim.triton.wait_addresses import LastWriters

_OPTIONS = frozenset({
    "num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "debug", "arch", "kpack",
    "allow_fp8e4nv", "launch_cooperative_grid", "launch_pdl", "waves_per_eu", "cluster_dims",
    "matrix_instr_nonkdim", "sanitize_overflow", "ir_override", "instrumentation_mode",
})  # fmt: skip
"""Options of compilers, which change nothing here."""

_MESSAGES = frozenset({"send", "recv"})
_OWN = "rankwise.sim.triton"
_WAITING_CALLS = frozenset({"load", "atomic_add", "atomic_xchg", "atomic_or", "atomic_and",
                            "atomic_max", "atomic_min", "atomic_cas", "atomic_load"})  # fmt: skip


def _extremum(own: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def extremum(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not any(isinstance(plain(arg), tensor) for arg in args):
            return own(*map(plain, args), **kwargs)
        result = args[0]
        for arg in args[1:]:
            result = ours(result, arg)
        return result

    return extremum


_KERNEL_BUILTINS: dict[str, Any] = {
    **vars(builtins),
    "range": creation.range,
    "min": _extremum(builtins.min, functions.minimum),
    "max": _extremum(builtins.max, functions.maximum),
    "print": lambda *args, **_kwargs: debug.device_print(*args),
    **logic.WORDS,
}


class _Generation:
    """Counts launches: globals are copied anew for each."""

    number = 0


class KernelFunction:
    """A function under the kernel's builtins."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not isinstance(function, FunctionType):
            raise LocalProtocolError(f"{function!r} is not a function: a kernel has to be one")
        self._source = function
        self._globals: dict[str, Any] = {"__builtins__": _KERNEL_BUILTINS}
        self._generation = -1

    @cached_property
    def _function(self) -> FunctionType:
        source = self._source
        code = rewritten(source) or source.__code__
        cells = dict(zip(source.__code__.co_freevars, source.__closure__ or (), strict=True))
        closure = tuple(cells[name] for name in code.co_freevars)
        function = FunctionType(
            code, self._globals, source.__name__, source.__defaults__, closure or None
        )
        function.__kwdefaults__ = source.__kwdefaults__
        KERNEL_CODE.add(code)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, with its module's globals as they were at its first use in this launch."""
        if self._generation != _Generation.number:
            self._generation = _Generation.number
            self._globals.update(self._source.__globals__)
            self._globals["__builtins__"] = _KERNEL_BUILTINS
        try:
            return self._function(*args, **kwargs)
        except _SLIPS as error:
            _say_where(error, self._function.__code__)
            raise


_SLIPS = (NameError, TypeError, ValueError, IndexError, ArithmeticError)
"""What Python itself raises at a line of a kernel: a wrong name, a wrong index, …"""


def _say_where(error: Exception, code: CodeType) -> None:
    """Name kernel and line in what Python raised at a line of this code, and not deeper."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_code is code and not isinstance(error, RankwiseError):
        ended = ""
        if isinstance(error, UnboundLocalError):
            ended = (
                " (in Triton a name ends with the loop, or the side of an `if`, that defines it)"
            )
        error.args = (f"{place(f'{code.co_filename}:{trace.tb_lineno}')}: {error}{ended}",)


class OnGrid:
    """What `kernel[grid]` gives: call it with the kernel's arguments."""

    def __init__(self, kernel: Any, grid: Any) -> None:
        self._kernel = kernel
        self._grid = grid

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel over the grid: a tuple, a number, or a function of its parameters.

        If an argument is on a simulated machine, it is launched there.
        """
        on_machine = launcher_among((*args, *kwargs.values()))
        if on_machine is not None:
            return on_machine(self._kernel, self._grid, *args, **kwargs)
        return self._kernel.run(*args, grid=self._grid, warmup=False, **kwargs)


class LaunchesSeen:
    """What is shown each kernel with its arguments, before it is launched; nothing if None."""

    by: "Callable[[JITFunction, Mapping[str, Any]], None] | None" = None


class CompiledKernel:
    """Stands for the binary that a compiler would have made.

    Its figures are those of a kernel that uses little, so that programs which choose their grid by
    occupancy get a sensible one.
    """

    def __init__(
        self, function: "JITFunction", given: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        name, num_warps = function.__name__, int(options.get("num_warps", 4))
        self._function = function
        self._constants = {each: given[each] for each in function.constants if each in given}
        self.name = name
        self.n_regs = 32
        self.n_spills = 0
        self.n_max_threads = 1024
        self.metadata = SimpleNamespace(
            name=name, shared=1024, num_warps=num_warps, num_ctas=1, num_stages=1
        )
        self.asm: dict[str, str] = {}
        self.kernel = name

    def _init_handles(self) -> None:
        """Nothing has to be loaded."""

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """A launch over a grid, where compile-time arguments may be left out."""

        def launch(*args: Any) -> Any:
            rest = self._function.arg_names[len(args) :]
            constants = {name: self._constants[name] for name in rest if name in self._constants}
            return self._function[grid](*args, **constants)

        return launch


class BoundLaunch(NamedTuple):
    """A launch whose arguments are bound, which happens once: emulator and machines take it so.

    Attributes:
        function: the kernel, without its decorators.
        given: its parameters by name.
        sizes: the grid.
        options: what was given by name, with what only a compiler would want to know.
    """

    function: "JITFunction"
    given: Mapping[str, Any]
    sizes: tuple[int, int, int]
    options: Mapping[str, Any]

    @property
    def stages(self) -> int | None:
        """Its `num_stages`, unless the kernel has a parameter of that name; at least 1."""
        if "num_stages" in self.function.signature.parameters:
            return None
        stages = self.options.get("num_stages")
        return None if stages is None else max(1, int(plain(stages)))

    def compiled(self) -> CompiledKernel:
        """What compiling would have given."""
        return CompiledKernel(self.function, self.given, self.options)

    def emulate(self, observer: Observer | None = None) -> None:
        """Run its programs here, whatever machine there is."""
        function = self.function
        launch, body = function.prepared(self.given, self.sizes)
        launch.observer = observer or launch.observer
        if 0 not in self.sizes:
            alone = launch.observer is not None or launch.races is not None or function.waits()
            run_launch(launch, body, interleave=alone)


class WrongArguments(LocalProtocolError, TypeError):
    """A launch's arguments are not those that the kernel has parameters for."""


class KernelParam(NamedTuple):
    """A parameter of a kernel, as libraries ask for it that wrap kernels."""

    num: int
    name: str
    is_constexpr: bool
    do_not_specialize: bool
    annotation: str
    default: Any
    has_default: bool


class KernelInterface:
    """What can be launched: a base for libraries' own wrappers, which have a `run`."""

    run: Any

    def __getitem__(self, grid: Any) -> OnGrid:
        """A launch over a grid: a tuple, a number, or a function of the kernel's parameters."""
        return OnGrid(self, grid)

    def warmup(self, *args: Any, grid: Any = (1,), **kwargs: Any) -> Any:
        """What compiling would have given, without running anything."""
        return self.run(*args, grid=grid, warmup=True, **kwargs)


class JITFunction(KernelInterface):
    """A kernel, or a function that kernels call."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        observer: Observer | None = None,
        detect_races: bool = False,
        do_not_specialize: Sequence[int | str] = (),
    ) -> None:
        self.fn = fn
        self.do_not_specialize = tuple(do_not_specialize)
        self.kernel_function = KernelFunction(fn)
        self.__name__ = fn.__name__
        self.__qualname__ = fn.__qualname__
        self.__doc__ = fn.__doc__
        self.__module__ = fn.__module__
        self.__globals__ = fn.__globals__
        self.signature = inspect.signature(fn)
        self.arg_names = list(self.signature.parameters)
        self.constants = frozenset(
            name
            for name, parameter in self.signature.parameters.items()
            if "constexpr" in str(parameter.annotation) or parameter.annotation is constexpr
        )
        self.types = {
            name: type_
            for name, parameter in self.signature.parameters.items()
            if name not in self.constants
            and (type_ := annotated_type(parameter.annotation)) is not None
        }
        self.observer = observer
        self.detect_races = detect_races
        self._tries: int | None = None
        self._exchanges: bool | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the function that it was made of, and be made anew."""
        options: dict[str, Any] = {
            "observer": self.observer,
            "detect_races": self.detect_races,
            "do_not_specialize": self.do_not_specialize,
        }
        return partial(jit, **options), (self.fn,)

    @property
    def params(self) -> list[KernelParam]:
        """Its parameters."""
        return [
            KernelParam(
                number,
                name,
                is_constexpr=name in self.constants,
                do_not_specialize=not self.is_specialized(name),
                annotation="" if each.annotation is each.empty else str(each.annotation),
                default=each.default,
                has_default=each.default is not each.empty,
            )
            for number, (name, each) in enumerate(self.signature.parameters.items())
        ]

    def is_specialized(self, name: str) -> bool:
        """Whether a compiler may use that an argument is 1."""
        return {self.arg_names.index(name), name}.isdisjoint(self.do_not_specialize)

    @property
    def src(self) -> str:
        """Its source."""
        return textwrap.dedent(inspect.getsource(self.fn))

    def _unsafe_update_src(self, new_src: str) -> None:
        """Make it the kernel of this source; libraries that write kernels ask for the method."""
        name = f"<source of {self.__name__} {sha256(new_src.encode()).hexdigest()[:8]}>"
        linecache.cache[name] = len(new_src), None, new_src.splitlines(keepends=True), name
        made: dict[str, Any] = {}
        exec(compile(new_src, name, "exec"), self.fn.__globals__, made)  # noqa: S102 (it is theirs)
        (fn,) = (getattr(each, "fn", each) for each in made.values())
        self.fn = fn
        self.kernel_function = KernelFunction(fn)
        self._tries = None

    @property
    def cache_key(self) -> str:
        """What tells its source from others'."""
        return sha256(self.src.encode()).hexdigest()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it from another kernel."""
        if ACTIVE.execution is None:
            raise LocalProtocolError(
                f"{self.__name__} is a kernel: call it from another kernel, or launch it with "
                f"{self.__name__}[grid](...)"
            )
        return self.kernel_function(*args, **kwargs)

    def waits(self) -> bool:
        """Whether its source, or that of a function it calls, shows a loop that may wait."""
        return self.tries() > 0

    def tries(self) -> int:
        """How many looks in vain count as waiting (`looks`); 0 where no loop may wait."""
        if self._tries is None:
            functions = self._functions()
            self._tries = _tries_of_loops(self.fn, _WAITING_CALLS.union(functions))
            self._tries = max(self._tries, *(each.tries() for each in functions.values()), 0)
        return self._tries

    def exchanges(self) -> bool:
        """Whether it, or a function that it names, sends messages to programs, or receives some."""
        if self._exchanges is None:
            self._exchanges = _exchanges(self.fn, set())
        return self._exchanges

    def _functions(self) -> "dict[str, JITFunction]":
        """The kernel functions that it names, also those in modules."""
        names = self.fn.__code__.co_names
        tables = [self.fn.__globals__]
        tables += [vars(each) for each in map(tables[0].get, names) if isinstance(each, ModuleType)]
        found = ((name, table.get(name)) for table in tables for name in names)
        return {name: each for name, each in found if isinstance(each, JITFunction)}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], grid: Any) -> BoundLaunch:
        """Bind the arguments of a launch; the grid may be a function of the parameters."""
        given = self.bound(args, kwargs)
        return BoundLaunch(self, given, grid_sizes(grid, given), kwargs)

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The kernel's parameters by name, without the options meant for a compiler."""
        own = {
            name: value
            for name, value in kwargs.items()
            if name in self.signature.parameters or name not in _OPTIONS
        }
        try:
            bound = self.signature.bind(*args, **own)
        except TypeError as error:
            raise WrongArguments(
                f"kernel {self.__name__}: {error}",
                hint=f"its parameters are {', '.join(self.arg_names)}",
            ) from None
        bound.apply_defaults()
        if LaunchesSeen.by is not None:
            LaunchesSeen.by(self, bound.arguments)
        warps = plain(kwargs.get("num_warps", 4))
        if not (isinstance(warps, int) and warps.bit_count() == 1 and warps > 0):
            raise WrongArguments(
                f"kernel {self.__name__}: num_warps is {warps!r}, expected a power of two",
                hint="Triton takes no other number: 1, 2, 4, 8, 16 or 32",
            )
        return dict(bound.arguments)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch the kernel; with `warmup`, only look at its arguments."""
        kwargs.pop("warmup", None)
        if warmup:  # its grid need not fit its arguments
            return CompiledKernel(self, self.bound(args, kwargs), kwargs)
        machine = HOST_MACHINE.get()
        if machine is not None:  # which binds the arguments as its devices see them
            return machine.launch(self, grid, *args, **kwargs)
        launch = self.bind(args, kwargs, grid)
        launch.emulate()
        return launch.compiled()

    def _seen(self, name: str, value: Any, arguments: Arguments) -> Any:
        if name in self.constants:
            return plain(value)
        if name in self.types and is_number(value):
            return number_as(name, value, self.types[name])
        return arguments.adapted(name, value)

    def prepared(
        self,
        given: Mapping[str, Any],
        grid: tuple[int, int, int],
        setters: LastWriters | None = None,
    ) -> tuple[Launch, Callable[[], Any]]:
        """A launch that is ready to run, and the kernel's body with its arguments.

        Args:
            given: the kernel's parameters by name.
            grid: its sizes.
            setters: who has set which word, if that goes beyond this launch.
        """
        arguments = Arguments()
        seen = {name: self._seen(name, value, arguments) for name, value in given.items()}
        memory = LaunchMemory(arguments.buffers, tensor_around, setters)
        races = RaceDetector().launch(grid[0] * grid[1] * grid[2]) if self.detect_races else None
        launch = Launch(self.__name__, grid, memory, observer=self.observer, races=races)
        launch.tries = self.tries() or TRIES
        _Generation.number += 1
        return launch, lambda: self.kernel_function(**seen)


def grid_sizes(grid: Any, given: Mapping[str, Any]) -> tuple[int, int, int]:
    """The grid as three numbers; a function gets the kernel's parameters by name."""
    if callable(grid):
        grid = grid({name: plain(value) for name, value in given.items()})
    lengths = grid if isinstance(grid, tuple | list) else (grid,)
    try:
        sizes = [index(plain(length)) for length in lengths]
    except TypeError:
        sizes = []
    if not 1 <= len(sizes) <= 3 or min(sizes) < 0:
        raise ConfigError(
            f"the grid is {grid!r}, expected a whole number, or up to three of them",
            hint="triton.cdiv(n, BLOCK) gives whole numbers, where n / BLOCK does not",
        )
    width, height, depth = sizes + [1] * (3 - len(sizes))
    return width, height, depth


def _tries_of_loops(function: Callable[..., Any], looks: frozenset[str]) -> int:
    """How often a `while` of the function may look in vain at memory; 0 if none looks.

    Args:
        function: of the user's.
        looks: attributes that look, or may, when they are called.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TokenError):  # no source: a compare-and-swap still tells
        return 0
    loops = [each for each in ast.walk(tree) if isinstance(each, ast.While)]
    waiting = [loop for loop in loops if _looks_at_memory(loop, looks)]
    return max((TRIES_COUNTED if _counts(loop) else TRIES for loop in waiting), default=0)


def _exchanges(function: Callable[..., Any], seen: set[CodeType]) -> bool:
    """Whether a function, or one that it names, mentions `send` or `recv`."""
    if not isinstance(function, FunctionType) or function.__code__ in seen:
        return False
    seen.add(function.__code__)
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    names = dict.fromkeys(name for code in codes for name in (*code.co_names, *code.co_freevars))
    if not _MESSAGES.isdisjoint(names):
        return True
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    known = function.__globals__ | {name: cell.cell_contents for name, cell in cells}
    found = [known[name] for name in names if name in known]
    found += [
        vars(module)[name]
        for module in found
        if isinstance(module, ModuleType) and not module.__name__.startswith(_OWN)
        for name in names
        if name in vars(module)
    ]
    functions = [each.fn if isinstance(each, JITFunction) else each for each in found]
    return any(
        _exchanges(each, seen)
        for each in functions
        if isinstance(each, FunctionType) and not (each.__module__ or "").startswith(_OWN)
    )


def _counts(loop: ast.While) -> bool:
    """Whether it goes on by what it counts: `while … and tries < LIMIT`, with `tries += 1`."""
    compared = {each.id for each in ast.walk(loop.test) if isinstance(each, ast.Name)}
    counted = {
        each.target.id
        for each in ast.walk(loop)
        if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name)
    }
    return not compared.isdisjoint(counted)


def _looks_at_memory(expression: ast.AST, looks: frozenset[str]) -> bool:
    called = [node.func for node in ast.walk(expression) if isinstance(node, ast.Call)]
    return any(
        func.attr in looks if isinstance(func, ast.Attribute) else isinstance(func, ast.Name)
        for func in called
    )


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    version: Any = None,
    repr: Callable[[Any], str] | None = None,
    launch_metadata: Callable[..., Any] | None = None,
    do_not_specialize: Sequence[int | str] | None = None,
    do_not_specialize_on_alignment: Sequence[int | str] | None = None,
    debug: bool | None = None,
    noinline: bool | None = None,
    observer: Observer | None = None,
    detect_races: bool = False,
) -> Any:
    """Make a kernel of a function.

    Options for a compiler or a profiler alone are accepted and change nothing.

    Args:
        fn: the function; without it, `jit(...)` is a decorator.
        version: for a compiler's cache.
        repr: names the kernel in a profile.
        launch_metadata: describes a launch in a profile.
        do_not_specialize: parameters whose values a compiler must not use.
        do_not_specialize_on_alignment: parameters whose alignment a compiler must not use.
        debug: keeps assertions, which are always kept here.
        noinline: whether calls stay calls.
        observer: is told of each operation.
        detect_races: report two programs that use an element unordered, one of them writing.
    """
    del version, repr, launch_metadata, do_not_specialize_on_alignment, debug, noinline
    options: dict[str, Any] = {
        "observer": observer,
        "detect_races": detect_races,
        "do_not_specialize": do_not_specialize or (),
    }
    if fn is None:
        return lambda function: jit(function, **options)
    return fn if isinstance(fn, JITFunction) else JITFunction(fn, **options)
