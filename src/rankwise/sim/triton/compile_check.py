"""`--check-compile`: each kernel that is launched is shown to Triton's own front end, too.

It runs in a process of its own (`front_end`), since `import triton` is the shim here. A kernel
is asked about once for each signature. One that cannot be described (a global of a class that
Triton does not know, an argument that is a descriptor) is not refused: a line says why.
"""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from types import FunctionType, ModuleType
from typing import Any

from rankwise.base.errors import ConfigError
from rankwise.sim.triton import front_end
from rankwise.sim.triton.annotations import is_number
from rankwise.sim.triton.constants import constexpr, constexpr_function, plain
from rankwise.sim.triton.dtypes import dtype, dtype_named
from rankwise.sim.triton.execution import KernelError
from rankwise.sim.triton.jit import JITFunction, LaunchesSeen

_PATIENCE_S = 120


_OF_CONSTANTS = constexpr_function(len).__code__
"""What all functions of constants have in common."""


class RefusedByTriton(KernelError):
    """Triton's own front end does not compile a kernel."""


class _Indescribable(Exception):
    """What Triton's process cannot be given."""


def check_installed() -> None:
    """Refuse to begin where there is no Triton to be asked."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "--check-compile asks Triton's own compiler, and the package triton is not installed",
            hint=f"{shlex.quote(sys.executable)} -m pip install 'triton==3.9.*'; it needs no GPU",
        )


@contextmanager
def kernels_shown_to_triton(say: Callable[[str], object]) -> Iterator[None]:
    """Ask about each kernel that is launched in the block; `say` gets what cannot be asked."""
    command = [sys.executable, "-P", str(Path(front_end.__file__))]
    # The front end is of the compiler: with Triton's own interpreter there would be none.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    asked: set[str] = set()

    def show(function: JITFunction, given: Mapping[str, Any]) -> None:
        place = f'kernel "{function.__name__}"'
        try:
            question = json.dumps(_Described(function, given).whole(), sort_keys=True)
        except _Indescribable as reason:
            question, unknown = f"{place}: {reason}", True
        else:
            unknown = False
        if question in asked:
            return
        asked.add(question)
        if unknown:
            say(f"--check-compile: {question}, which Triton cannot be asked about")
            return
        answer = _answer(process, question)
        if "cannot" in answer:
            say(f"--check-compile: {place}: Triton cannot be asked: {answer['cannot']}")
        elif answer:
            at = f"{answer['file']}:{answer['line']}: " if "line" in answer else ""
            raise RefusedByTriton(
                f"{place}: {at}Triton {answer['version']} refuses it: {answer['refused']}"
            )

    before, LaunchesSeen.by = LaunchesSeen.by, show
    try:
        yield
    finally:
        LaunchesSeen.by = before
        process.kill()
        process.communicate()


def _answer(process: "subprocess.Popen[str]", question: str) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(question + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return {"cannot": "its process has ended"}
    with DefaultSelector() as selector:
        selector.register(process.stdout, EVENT_READ)
        if not selector.select(_PATIENCE_S):
            return {"cannot": f"it has not answered for {_PATIENCE_S} s"}
    line = process.stdout.readline()
    answer: dict[str, Any] = json.loads(line) if line else {"cannot": "its process has ended"}
    return answer


class _Described:
    """A kernel, its arguments and all that it mentions, in words of JSON."""

    def __init__(self, kernel: JITFunction, given: Mapping[str, Any]) -> None:
        self._functions: list[dict[str, Any]] = []
        self._numbers: dict[Any, int] = {}
        self._kernel = self._function(kernel.fn, kernel)
        self._signature: dict[str, str] = {}
        self._constants: dict[str, Any] = {}
        for name, value in given.items():
            type_ = type_in_signature(kernel, name, value)
            self._signature[name] = type_
            if type_ == "constexpr":
                self._constants[name] = self._value(name, plain(value))

    def whole(self) -> dict[str, Any]:
        return {
            "kernel": self._kernel, "functions": self._functions,
            "signature": self._signature, "constants": self._constants,
        }  # fmt: skip

    def _function(self, fn: Any, wrapped: Any) -> int:
        if fn in self._numbers:
            return self._numbers[fn]
        if not isinstance(fn, FunctionType) or not Path(fn.__code__.co_filename).is_file():
            raise _Indescribable(f"the source of {getattr(fn, '__name__', fn)} is in no file")
        number = self._numbers[fn] = len(self._functions)
        described: dict[str, Any] = {}
        self._functions.append(described)
        code = fn.__code__
        is_kernel = isinstance(wrapped, JITFunction)
        described.update(
            name=fn.__name__,
            module=fn.__module__,
            file=code.co_filename,
            line=code.co_firstlineno,
            kind="jit" if is_kernel else "constexpr",
            constants=sorted(wrapped.constants) if is_kernel else [],
            defaults=[self._value(fn.__name__, each) for each in fn.__defaults__ or ()],
            keywords={
                name: self._value(name, each) for name, each in (fn.__kwdefaults__ or {}).items()
            },
        )
        described["names"] = {
            name: self._value(name, value) for name, value in _mentioned(fn).items()
        }
        return number

    def _value(self, name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, constexpr):
            return {"constexpr": self._value(name, value.value)}
        if value is None or type(value) in {bool, int, float, str}:
            return {"value": value}
        if isinstance(value, dtype):
            return {"name": ("triton.language", repr(value).rpartition(".")[2])}
        if isinstance(value, tuple):
            return {"tuple": [self._value(name, each) for each in value]}
        own = _name_in_triton(name, value)
        if own is not None:
            return own
        if isinstance(value, JITFunction):
            return {"function": self._function(value.fn, value)}
        if getattr(value, "__code__", None) is _OF_CONSTANTS:
            return {"function": self._function(value.__wrapped__, value)}
        raise _Indescribable(f"`{name}` holds: {type(value).__name__}")


def _mentioned(fn: FunctionType) -> dict[str, Any]:
    found = {name: fn.__globals__[name] for name in _names_read(fn) if name in fn.__globals__}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        found[name] = cell.cell_contents
    return found


def _names_read(fn: FunctionType) -> list[str]:
    codes = [fn.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if hasattr(each, "co_names")]
    return list(dict.fromkeys(name for code in codes for name in code.co_names))


def _name_in_triton(name: str, value: Any) -> dict[str, Any] | None:
    """Where an object of the shim is found in Triton; None if it is the user's own."""
    modules = {key: each for key, each in sys.modules.items() if key.partition(".")[0] == "triton"}
    if isinstance(value, ModuleType):
        for key, each in modules.items():
            if each is value or vars(value).get("__name__") == key:
                return {"module": key}
        return None
    for key, each in modules.items():
        for word in (name, getattr(value, "__name__", name)):
            if vars(each).get(word) is value:
                return {"name": (key, word)}
    return None


def type_in_signature(kernel: JITFunction, name: str, value: Any) -> str:
    """The type of an argument; a number that is 1 is a constant, unless the kernel forbids it."""
    value = plain(value)
    if name in kernel.constants or value is None:
        return "constexpr"
    if name in kernel.types and is_number(value):
        return _short(kernel.types[name])
    if type(value) is int and value == 1 and kernel.is_specialized(name):
        return "constexpr"
    return _type_of(name, value)


def _short(type_: dtype) -> str:
    return "u1" if type_.is_bool() else type_.name.replace("uint", "u").replace("int", "i")


def _type_of(name: str, value: Any) -> str:
    """How Triton's launcher writes the type of an argument."""
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    if isinstance(value, float):
        return "fp32"
    element = getattr(value, "kind", None) or getattr(value, "dtype", None)
    try:
        assert element is not None
        named = element if isinstance(element, dtype) else dtype_named(_word_of(element))
    except Exception as error:
        raise _Indescribable(f"argument `{name}` is of type {type(value).__name__}") from error
    return "*" + named.name.replace("uint", "u").replace("int", "i")


def _word_of(element: Any) -> str:
    return str(element).removeprefix("torch.")
