"""The modules that collective algorithms are written in, ours and users': the boundary to them.

An exception inside of one, at its import or in its functions, becomes one error that names the
module, what it raised, and the line of its file.
"""

import inspect
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Any, SupportsIndex

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import hint_on_name
from rankwise.core.collectives.program import Copy, Fold, Instruction, Receive, Send, Span, Task
from rankwise.sim.ccl.calculation import spans_of
from rankwise.sim.kernel import line_of

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send_receive",
)
"""What an algorithm can be for."""

KERNEL_PARAMETERS = (
    "workspace", "elements", "rank", "size", "root", "position", "left", "right", "OP", "LANES",
    "SLOT", "SLOTS",
)  # fmt: skip
"""The parameters that the kernel of an algorithm may have (`kernel_execution`)."""

INSTRUCTIONS_MOST = 1 << 20
"""A program of one rank that is longer does not end: 1,024 ranks that send to all have 2,046."""

MULTICAST_HINT = "multicast is a field of system.sips with graph switch, or of the first level"
"""Where switches that copy and combine are asked for."""

_OURS = __package__ + ".algorithms."
_IN_CORE = "rankwise.core.collectives.algorithms."


class AlgorithmError(ConfigError):
    """An algorithm cannot be used: no rank's program is at fault, though a rank has called it."""


def needs_multicast(module: str) -> bool:
    """Whether an algorithm needs switches that copy and combine."""
    return bool(getattr(algorithm_module(module), "NEEDS_MULTICAST", False))


def algorithm_module(name: str) -> ModuleType:
    """Import an algorithm and see that it is one.

    Raises:
        ConfigError: it cannot be imported, or lacks what every algorithm has.
    """
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(name, "cannot be imported", error) from error
        raise ConfigError(
            f"the algorithm's module {name!r} cannot be imported: {error}",
            hint="module names any importable module, as in an import statement",
        ) from error
    except (Exception, SystemExit) as error:  # the user's module: anything may come out of it
        raise _failed(name, "cannot be imported", error) from error
    kernel = getattr(module, "kernel", None)
    if kernel is not None:
        _check_kernel(module, kernel)
    elif not callable(getattr(module, "program", None)):
        raise ConfigError(
            f"module {name!r} is not a collective algorithm: it has no function program(task)"
            f" and no kernel{_at(module)}"
        )
    collective = getattr(module, "COLLECTIVE", None)
    if collective not in COLLECTIVES:
        raise ConfigError(
            f"module {name!r} has COLLECTIVE = {collective!r}{_at(module)};"
            f" {hint_on_name(str(collective), COLLECTIVES)}"
        )
    return module


def _check_kernel(module: ModuleType, kernel: Any) -> None:
    """Refuse a kernel that wants what no collective can give it."""
    if not callable(kernel):
        raise ConfigError(
            f"module {module.__name__!r}: kernel is {kernel!r}, expected a function{_at(module)}"
        )
    for name, parameter in parameters_of(kernel).items():
        if name not in KERNEL_PARAMETERS and parameter.default is parameter.empty:
            raise ConfigError(
                f"module {module.__name__!r}: its kernel has a parameter {name!r} that gets no"
                f" value; expected some of {', '.join(KERNEL_PARAMETERS)}{_at(module, kernel)}"
            )


def parameters_of(kernel: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a kernel, under `triton.jit` or not."""
    return dict(inspect.signature(getattr(kernel, "fn", kernel)).parameters)


def is_ours(module: ModuleType) -> bool:
    """Whether an algorithm ships with the package, and is tested."""
    return module.__name__.startswith((_OURS, _IN_CORE))


def instructions_of(module: ModuleType, task: Task) -> Iterator[Instruction]:
    """What an algorithm has one rank do, instruction by instruction.

    Raises:
        AlgorithmError: its `program` fails, gives what is no instruction, or does not end.
    """
    if is_ours(module):  # they are long where there are many ranks
        yield from module.program(task)
        return
    whose = f"failed for rank {task.rank} of {task.size}"
    count = 0
    try:
        program = module.program(task)
        for given in islice(program, INSTRUCTIONS_MOST + 1):
            _check(module, task, count, given, program)
            count += 1
            yield given
    except AlgorithmError:
        raise
    except (Exception, SystemExit) as error:  # the user's code, and called for the first time
        raise _failed(module.__name__, whose, error, module.__file__) from error
    if count > INSTRUCTIONS_MOST:
        raise AlgorithmError(
            f"algorithm {module.__name__}: program(task) gives rank {task.rank} more than"
            f" {INSTRUCTIONS_MOST:,} instructions, and does not seem to end"
            f"{_at(module, module.program, program)}"
        )


def scratch_of(module: ModuleType, task: Task) -> int:
    """How many elements behind its operands an algorithm wants.

    Raises:
        AlgorithmError: its `scratch_elements` fails, or gives no such number.
    """
    ask = getattr(module, "scratch_elements", None)
    if ask is None:
        return 0
    try:
        wanted = ask(task)
    except (Exception, SystemExit) as error:  # the user's code
        what = f"failed to tell the scratch of rank {task.rank}"
        raise _failed(module.__name__, what, error, module.__file__) from error
    if not isinstance(wanted, int) or wanted < 0:
        raise AlgorithmError(
            f"algorithm {module.__name__}: scratch_elements(task) of rank {task.rank} is"
            f" {wanted!r}, expected a count of elements{_at(module, ask)}"
        )
    return wanted


def _check(module: ModuleType, task: Task, step: int, given: Any, program: Any) -> None:
    problem = _problem_of(given)
    if problem is not None:
        raise AlgorithmError(
            f"algorithm {module.__name__}: instruction {step} of rank {task.rank} is"
            f" {problem}{_at(module, module.program, program)}"
        )


def _problem_of(given: Any) -> str | None:
    """Why an instruction is invalid; `calculation` checks whether it fits the others."""
    if not isinstance(given, Send | Receive | Copy | Fold):
        return f"{given!r}, expected Send, Receive, Copy or Fold"
    if not isinstance(getattr(given, "peer", 0), SupportsIndex):
        return f"{given!r}, whose peer is not a rank"
    if not all(map(_is_span, _given_spans(given))):
        return f"{given!r}, expected spans of whole elements: Span(start, stop)"
    return None


def place_in(module: ModuleType, function: Any = None, generator: Any = None) -> str:
    """The file and line at fault: where a generator stands, or a function begins; else the file."""
    frame = getattr(generator, "gi_frame", None)
    if frame is not None:
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    code = getattr(inspect.unwrap(getattr(function, "fn", function)), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return getattr(module, "__file__", None) or module.__name__


def _at(module: ModuleType, function: Any = None, generator: Any = None) -> str:
    place = place_in(module, function, generator)
    return f", at {place}" if place else ""


def _given_spans(given: Instruction) -> list[Any]:
    if not isinstance(getattr(given, "sources", ()), tuple | list):
        return [None]
    return [*spans_of(given)]


def _is_span(given: object) -> bool:
    return isinstance(given, Span) and all(isinstance(end, SupportsIndex) for end in given)


def _failed(
    module: str, what: str, error: BaseException, file: str | None = None
) -> AlgorithmError:
    line = line_of(error, file) or line_of(error)
    place = f", at {line}" if line else ""
    return AlgorithmError(
        f"the algorithm's module {module!r} {what}: {type(error).__name__}: {error}{place}"
    )
