"""Notices that a task writes to a tensor that it has as INPUT.

While a task runs, `array_at` gives read-only arrays of its input tensors: numpy raises at the line
that writes. For what writes by a pointer, the whole pages of these tensors are mapped read-only in
the task's process. A write there is a fault: the handler notes the tensor and the line, maps the
page writable again, and the write goes on, so that nothing is torn. Pages at a tensor's ends hold
memory of others, too: these bytes are compared afterwards, and the line remains unknown. When the
task has ended, `InputWritten` tells of the first write.

The handler runs Python where the fault is: in code that fills a tensor, which holds no half-changed
state of the interpreter. That is good enough for a check that users ask for, and is why it is not
on by default. A fault elsewhere goes to the handler that was there before.
"""

import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from rankwise.core.tasks.tensors import TensorArgType
from rankwise.workers.arguments import TaskArgs
from rankwise.workers.arrays import host_bytes, read_only
from rankwise.workers.errors import BadPointer, InputWritten

_SIGINFO, _NODEFER = 4, 0x40000000
_ADDRESS_OFFSET = 16
"""Of `si_addr` in `siginfo_t`, where pointers have 64 bits."""
_MASK_BYTES = 128
_READ, _WRITE = mmap.PROT_READ, mmap.PROT_WRITE
_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """`struct sigaction` of the C library."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * _MASK_BYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Input:
    """One tensor that a task must not write."""

    def __init__(self, place: int, address: int, size: int) -> None:
        self.place = place
        self.begin, self.end = address, address + size
        page = mmap.PAGESIZE
        first, last = -(-self.begin // page) * page, self.end // page * page
        self.pages = (first, last) if first < last else (self.end, self.end)
        self.ends = self._read_ends()
        self.line = ""
        self.is_written = False

    def protect(self, how: int) -> None:
        """Map the whole pages of it read-only, or writable again."""
        begin, end = self.pages
        if begin < end and _libc.mprotect(begin, end - begin, how) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"mprotect of a tensor's pages: {os.strerror(code)}")

    def is_changed_at_its_ends(self) -> bool:
        return self._read_ends() != self.ends

    def _read_ends(self) -> tuple[bytes, bytes]:
        begin, end = self.pages
        return (
            ctypes.string_at(self.begin, begin - self.begin),
            ctypes.string_at(end, self.end - end),
        )


@contextmanager
def inputs_checked(args: TaskArgs) -> Iterator[None]:
    """Let a task in this block write to none of its inputs.

    Raises:
        InputWritten: it has. An exception of its own goes first, with a note.
    """
    inputs = _inputs_of(args)
    before = _Action()
    handler = _Handler(lambda number, info, _: _on_fault(inputs, before, number, info))
    action = _Action(ctypes.cast(handler, ctypes.c_void_p), flags=_SIGINFO | _NODEFER)
    _libc.sigaction(signal.SIGSEGV, ctypes.byref(action), ctypes.byref(before))
    try:
        read_only[:] = [(each.begin, each.end) for each in inputs]
        for each in inputs:
            each.protect(_READ)
        yield
    except ValueError as error:
        # NumPy has no class for it: the sentence is NumPy's.
        if not str(error).endswith("is read-only"):
            _note(inputs, error)
            raise
        place = _place_of(error, inputs)
        raise InputWritten(f"the task writes to {place}", hint=_HINT) from error
    except BaseException as error:
        _note(inputs, error)
        raise
    finally:
        read_only.clear()
        for each in inputs:
            each.protect(_READ | _WRITE)
        _libc.sigaction(signal.SIGSEGV, ctypes.byref(before), None)
    if written := _written(inputs):
        raise InputWritten(_in_words(written), hint=_HINT)


def _inputs_of(args: TaskArgs) -> list[_Input]:
    """The inputs in memory of the host, but for those that the task may write by another tensor."""
    found: list[_Input] = []
    accesses = args.accesses()
    written = [
        (address, address + size)
        for address, size, tag, _ in accesses
        if tag is not TensorArgType.INPUT
    ]
    for place, (address, size, tag, is_chips) in enumerate(accesses):
        if tag is not TensorArgType.INPUT or is_chips or not size:
            continue
        if any(begin < address + size and address < end for begin, end in written):
            continue
        with suppress(BadPointer):  # nothing is mapped there: it only orders tasks
            host_bytes(address, size)
            found.append(_Input(place, address, size))
    return found


_HINT = "give it the tag INOUT, or OUTPUT if the task reads none of it"


def _note(inputs: list[_Input], error: BaseException) -> None:
    """Tell of a write beside what the task has raised."""
    if written := _written(inputs):
        error.add_note(_in_words(written))


def _place_of(error: ValueError, inputs: list[_Input]) -> str:
    """Which input numpy has refused to write, as far as that is known, and the line."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    line = _line_of(frames[-1]) if frames else ""
    names = [f"tensor {each.place}" for each in inputs]
    text = (
        f"{names[0]}, which is INPUT,"
        if len(names) == 1
        else f"one of {', '.join(names)}, which are INPUT,"
    )
    return f"{text} at {line}"


def _on_fault(inputs: list[_Input], before: _Action, number: int, info: int) -> None:
    address = ctypes.c_size_t.from_address(info + _ADDRESS_OFFSET).value
    found = [each for each in inputs if each.pages[0] <= address < each.pages[1]]
    if not found:
        _libc.sigaction(number, ctypes.byref(before), None)  # it comes again, and goes there
        return
    for each in found:
        if not each.is_written:
            each.is_written, each.line = True, _line_of(sys._getframe(1))  # noqa: SLF001
        each.protect(_READ | _WRITE)


def _line_of(frame: FrameType | None) -> str:
    """The innermost line of the program, or of what it has called if that is all there is."""
    innermost = frame
    while frame is not None and _is_of_library(frame):
        frame = frame.f_back
    shown = frame or innermost
    if shown is None:
        return ""
    code = shown.f_code
    return f"{Path(code.co_filename).name}:{shown.f_lineno}, in {code.co_name}"


def _is_of_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith((_PACKAGE, "<frozen ")) or "/site-packages/" in path


def _written(inputs: list[_Input]) -> _Input | None:
    for each in inputs:
        each.is_written = each.is_written or each.is_changed_at_its_ends()
    return next((each for each in inputs if each.is_written), None)


def _in_words(written: _Input) -> str:
    where = f" at {written.line}" if written.line else ""
    return f"the task has written to tensor {written.place}, which is INPUT{where}"
