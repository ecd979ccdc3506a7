"""Functions in which a thread that a rank has started takes a turn (`Turns.turn`).

Almost no rank starts threads, and several such functions lie above each other in each collective.
So they are left alone until a rank starts its first thread. Then their code is replaced, in the
function objects themselves: a reference that the program took before takes turns, too.
"""

from collections.abc import Callable
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any, TypeVar

from rankwise.simranks.world.turns import Turns

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PLACE = "takes a turn"
"""The constant of `_template` that is replaced."""


class _Takers:
    """The functions, and what their code was; a process has one of these."""

    def __init__(self) -> None:
        self._known: dict[FunctionType, None] = {}
        self._codes: dict[FunctionType, CodeType] = {}
        self._turns: Turns | None = None

    def add(self, function: FunctionType) -> None:
        """Let a function take turns."""
        self._known[function] = None
        self._replace()

    def begin(self, turns: Turns) -> None:
        """Let them take turns of these: a rank starts a thread."""
        if self._turns is not turns:
            self._turns = turns
            self._replace()

    def end(self) -> None:
        """Leave them alone again: the world is over."""
        self._turns = None
        while self._codes:
            function, code = self._codes.popitem()
            function.__code__ = code

    def _replace(self) -> None:
        if self._turns is not None:
            for function in [each for each in self._known if each not in self._codes]:
                self._codes[function] = function.__code__
                function.__code__ = _code_with_turn(function, self._turns)


_takers = _Takers()
begin, end = _takers.begin, _takers.end


def taking_turns(function: _Function) -> _Function:
    """The same function, which takes a turn from when a rank has threads.

    So such a thread finds the state of its rank in it, and may wait in it for other ranks.
    """
    assert isinstance(function, FunctionType), "its code can be replaced"
    _takers.add(function)
    return function


def _code_with_turn(function: FunctionType, turns: Turns) -> CodeType:
    code = function.__code__
    original = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__

    def take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if get_ident() not in turns.helpers:
            return original(*args, **kwargs)
        with turns.turn():
            return original(*args, **kwargs)

    # A function's variables and closure stay what they are, so what it calls must be a constant.
    template = _template.__code__
    return template.replace(
        co_consts=tuple(take if each == _PLACE else each for each in template.co_consts),
        co_freevars=code.co_freevars,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
    )


def _template(*args: Any, **kwargs: Any) -> Any:
    take: Any = "takes a turn"
    return take(args, kwargs)
