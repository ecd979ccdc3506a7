"""Packs a function and its arguments for workers.

A payload is two pickles, one after the other: a header of plain data, and `(function, arguments)`;
`drivers/real/worker/function.py` reads it. Code that a worker can import travels by name, as
`pickle` has it. Other code, because it was defined in `__main__`, in a notebook, in another
function or as a lambda, travels by value, which `cloudpickle` does; importing that takes as long as
starting a worker, so it happens only then.
"""

import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from rankwise.base.deferred_calls import empty_call
from rankwise.base.errors import ConfigError
from rankwise.drivers.real.call_pickle import UNSENDABLE_HINT, find_culprit, name_of
from rankwise.drivers.real.interrupts import came_from_handler, gate_here


def pack_function(
    fn: Callable[..., Any],
    args: Any,
    *,
    pass_rank: bool = False,
    arguments_by_rank: bool = False,
) -> bytes:
    """Return a payload that makes each worker call `fn(*args)`.

    The workers find modules where this process finds them: the payload carries `sys.path`.

    Args:
        fn: what to call.
        args: its positional arguments; a mapping from local rank to them with `arguments_by_rank`.
        pass_rank: put the local rank before the arguments.
        arguments_by_rank: each rank has arguments of its own.

    Raises:
        ConfigError: the function or an argument cannot be pickled; it is named. Or a call of the
            function would not run it.
    """
    name = name_of(fn)
    _check_call_runs(fn, name)
    here = os.getcwd()
    header = {
        "name": name,
        "sys_path": [entry or here for entry in sys.path],
        "argv": list(sys.argv),
        "pass_rank": pass_rank,
        "arguments_by_rank": arguments_by_rank,
    }
    plain_args = (
        {rank: tuple(own) for rank, own in args.items()} if arguments_by_rank else tuple(args)
    )
    with gate_here().handlers_replaced():
        try:
            call, header["sources"] = _pickled((fn, plain_args))
        except Exception as error:
            if came_from_handler(error):
                raise
            found = find_culprit(fn, _arguments(plain_args), _pickled)
            culprit, reason = found or (f"the call of {name}", error)
            raise ConfigError(
                f"{culprit} cannot be sent to workers: {reason}",
                hint=UNSENDABLE_HINT,
            ) from error
    return pickle.dumps(header) + call


def _check_call_runs(fn: Any, name: str) -> None:
    if empty := empty_call(fn):
        raise ConfigError(
            f"{name} is {empty.kind}: a call makes {empty.makes}, which no rank would run",
            hint=f"give a function that runs it: def main(): return {empty.runner}({name}())",
        )


class _NeedsValue(Exception):
    """Something must travel by value."""


class _ByName(pickle.Pickler):
    """Pickles what the worker can import, and gives up at anything else."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and (
            obj.__module__ in ("__main__", None) or "<" in obj.__qualname__
        ):
            raise _NeedsValue
        return NotImplemented


def _pickled(value: object) -> tuple[bytes, dict[str, Any]]:
    """A value as bytes, and the sources of its code that are in no file."""
    buffer = io.BytesIO()
    try:
        _ByName(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    except (_NeedsValue, AttributeError, TypeError, pickle.PicklingError):
        from rankwise.base.value_pickle import (  # noqa: PLC0415 - see the module's text
            dumps_with_sources,
        )

        return dumps_with_sources(value)
    return buffer.getvalue(), {}


def _arguments(args: Any) -> Iterator[tuple[str, Any]]:
    for rank, own in args.items() if isinstance(args, dict) else [(None, args)]:
        whose = "" if rank is None else f" of local rank {rank}"
        for position, argument in enumerate(own):
            yield f"argument {position}{whose}", argument
