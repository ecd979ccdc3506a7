"""The profile hook of a walk: runs in each process that the walk starts, before anything else.

It writes each call the first time that it sees it, as one line of JSON, into a file of its process:
a process may be killed at any time.
"""

import _thread
import builtins
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

_FUNCTION_FLAGS = 0x3
"""CO_OPTIMIZED and CO_NEWLOCALS: the code of a function, not of a module or a class."""
_get_ident = _thread.get_ident
"""Simulated ranks find another function."""
_DEPTH_MAX, _ITEMS_MAX, _BYTES_MAX = 6, 50, 1 << 20


class Hook:
    """Writes the calls of functions below `source`: those that carry something, or of a window.

    Args:
        source: the folder of the package, with a slash at its end.
        folder: where the files go.
        marks: texts and whole numbers. A call carries one if an argument or the returned value
            has it. None: the calls of a thread between `begin` and `end`, which it calls itself.
    """

    def __init__(self, source: str, folder: str, marks: list[str | int] | None) -> None:
        self._source = source
        self._root = os.path.dirname(source.rstrip("/"))  # noqa: PTH120  # see `run_file`
        self._folder = folder
        self._marks = marks
        self._texts = tuple(mark for mark in marks or () if isinstance(mark, str))
        self._bytes = tuple(text.encode() for text in self._texts)
        self._numbers = {mark for mark in marks or () if isinstance(mark, int)}
        self._places: dict[CodeType, tuple[str, str] | None] = {}
        self._written: set[tuple[object, ...]] = set()
        self._open: set[int] = set()

    def install(self) -> None:
        """Watch this thread, and those that are started from now on."""
        start = _thread.start_new_thread

        def start_new_thread(function: Callable[..., Any], *more: Any) -> int:
            def run(*args: Any, **kwargs: Any) -> None:
                sys.setprofile(self)
                function(*args, **kwargs)

            return start(run, *more)

        _thread.start_new_thread = start_new_thread
        threading.setprofile(self)
        builtins.rankwise_walk = self  # type: ignore[attr-defined]
        sys.setprofile(self)

    def begin(self) -> None:
        """Open the window of this thread."""
        self._open.add(_get_ident())

    def end(self) -> None:
        """Close it."""
        self._open.discard(_get_ident())

    def __call__(self, frame: FrameType, kind: str, value: Any) -> None:
        """Be called by the interpreter at each call and return."""
        if kind not in {"call", "return"}:
            return
        place = self._place(frame.f_code)
        if place is None:
            return
        if self._marks is None:
            if _get_ident() in self._open:
                self._write(frame, place)
        elif self._has_mark(self._arguments(frame) if kind == "call" else value, _DEPTH_MAX):
            self._write(frame, place)

    def _place(self, code: CodeType) -> tuple[str, str] | None:
        """Module and function; None for foreign code, and for the bodies of modules and classes."""
        try:
            return self._places[code]
        except KeyError:
            pass
        place = None
        # Relative in bytecode that `compileall` has written from the root of the checkout.
        path = os.path.join(self._root, code.co_filename)  # noqa: PTH118  # see `run_file`
        is_function = code.co_flags & _FUNCTION_FLAGS == _FUNCTION_FLAGS
        if path.startswith(self._source) and is_function:
            name = path.removeprefix(self._source).removesuffix(".py").removesuffix("/__init__")
            place = (
                name.replace("/", "."),
                code.co_qualname if sys.version_info >= (3, 11) else "",
            )
        self._places[code] = place
        return place

    @staticmethod
    def _arguments(frame: FrameType) -> list[object]:
        """The arguments of a call, without the object whose method it is: that has seen others."""
        code, values = frame.f_code, frame.f_locals
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & 0x4) + bool(code.co_flags & 0x8)
        names = code.co_varnames[:count]
        return [values[name] for name in names if name in values and name not in {"self", "cls"}]

    def _has_mark(self, value: Any, depth: int) -> bool:
        if value is None or depth == 0:
            return False
        match value:
            case bool() | float() | type():
                return False
            case int():
                return value in self._numbers
            case str():
                return any(mark in value for mark in self._texts)
            case bytes() | bytearray() | memoryview():
                data = bytes(value[:_BYTES_MAX])
                return any(mark in data for mark in self._bytes)
            case dict():
                parts = [*value.keys(), *value.values()]
            case list() | tuple() | set() | frozenset():
                parts = list(value)
            case BaseException():
                parts = list(value.args)
            case _:
                # Values of msgspec; other objects keep what they have seen, and carry nothing.
                fields = getattr(type(value), "__struct_fields__", ())
                parts = [getattr(value, name, None) for name in fields]
        return any(self._has_mark(part, depth - 1) for part in parts[:_ITEMS_MAX])

    def _write(self, frame: FrameType, place: tuple[str, str]) -> None:
        caller = frame.f_back
        origin = None
        while caller is not None and (origin := self._place(caller.f_code)) is None:
            caller = caller.f_back
        key = (os.getpid(), place, origin)  # a forked process writes its own calls
        if key in self._written:
            return
        self._written.add(key)
        line = json.dumps([time.monotonic_ns(), *place, *(origin or ("", ""))])
        path = f"{self._folder}/{os.getpid()}.jsonl"
        # Opened anew: programs close descriptors that they do not know.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, f"{line}\n".encode())
        finally:
            os.close(file)


def install(source: str, folder: str, marks: list[str | int] | None) -> None:
    """Install a hook in this process."""
    Hook(source, folder, marks).install()


def run_file(path: str, words: list[str]) -> None:
    """Run a program as `python path words` does, without `site`."""
    main = sys.modules["__main__"]
    main.__dict__.update(__file__=path)
    sys.argv = [path, *words]
    with open(path, encoding="utf-8") as file:  # noqa: PTH123  # the guardian has no pathlib
        code = compile(file.read(), path, "exec")
    run = FunctionType(code, main.__dict__)
    run()
