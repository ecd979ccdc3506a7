"""Pickles exceptions so that they arrive, with their notes, their causes and a group's members.

The standard pickle of an exception leaves out its cause and its context, and fails as a whole when
one attribute cannot be pickled, or when its class is called with other arguments than it hands on
to `Exception`. Here each exception of a chain is pickled alone, in the first of these ways that
works:

1. by reference, so that `except MyError` at the other end finds the very class;
2. by value, where only the sender knows the class;
3. without calling the class, and without the attributes that cannot be pickled;
4. as its text.

Every exception that crosses a process does so by `dumps` and `loads`; the errors of rankwise
itself use them in `__reduce__` too, so that other people's process pools and queues can carry them.
In text they travel as an `ErrorRecord` (`rankwise.base.failure`).
"""

import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rankwise.base.errors import PicklableError, RemoteTraceback

_LINK = "__link__"
"""Where in the state of an exception of ours its cause or context is: no attribute's name."""


class _ChainPart(NamedTuple):
    """One exception of a chain.

    Attributes:
        pickled: the exception alone; empty when it cannot be pickled.
        text: its traceback, type, message and notes.
        notes: its notes, which some classes' own pickles forget.
        previous: the place of its cause or context among the parts; None when it has none.
        is_cause: whether `previous` is the cause, and not the context.
        suppresses: whether its context is not to be shown.
        members: the places of a group's members.
    """

    pickled: bytes
    text: str
    notes: tuple[str, ...]
    previous: int | None
    is_cause: bool
    suppresses: bool
    members: tuple[int, ...]


def dumps(error: BaseException) -> bytes:
    """Pickle an exception and all that it was caused by."""
    chain = _chain_of(error)
    place = {id(one): number for number, one in enumerate(chain)}
    return pickle.dumps(
        [
            _ChainPart(
                pickled=_pickled_alone(one),
                text="".join(traceback.format_exception(one, chain=False)),
                notes=tuple(getattr(one, "__notes__", ())),
                previous=None if (previous := previous_of(one)) is None else place[id(previous)],
                is_cause=one.__cause__ is not None,
                suppresses=one.__suppress_context__,
                members=tuple(place[id(member)] for member in _members_of(one)),
            )
            for one in chain
        ]
    )


def loads(pickled: bytes) -> BaseException | None:
    """The exception that was pickled; None if only its text could be.

    Of what it was caused by, and of a group's members, each that could not be pickled is a
    `RemoteTraceback`.
    """
    error, is_itself = _arrived(pickled)
    return error if is_itself else None


def previous_of(error: BaseException) -> BaseException | None:
    """The exception that a traceback shows before this one: its cause, or its context."""
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def tell_traceback(error: BaseException, text: str) -> None:
    """Have an exception from elsewhere tell where it was raised, before all that caused it."""
    seen = {id(error)}
    first = error
    while (previous := previous_of(first)) is not None and id(previous) not in seen:
        seen.add(id(previous))
        first = previous
    first.__cause__ = RemoteTraceback(text)


def state_of(error: PicklableError) -> dict[str, Any]:
    """The attributes of an exception of ours, and what it was caused by; see `set_state`."""
    state = _attributes_of(error)
    if (previous := previous_of(error)) is not None or error.__suppress_context__:
        is_cause = error.__cause__ is not None
        state[_LINK] = _CauseLink(
            previous, is_cause=is_cause, suppresses=error.__suppress_context__
        )
    return state


def set_state(error: PicklableError, state: dict[str, Any]) -> None:
    """Give an exception what `state_of` has found, perhaps in another process."""
    attributes = dict(state)
    link: _CauseLink | None = attributes.pop(_LINK, None)
    if link is not None:
        link.tie(error)
    _set_attributes(error, attributes)


def made_without_calling(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception of this class that has its arguments and nothing else."""
    if issubclass(kind, BaseExceptionGroup):
        # A group cannot be without members; its own are put in their place when they are made.
        return BaseExceptionGroup.__new__(kind, args[0], [RemoteTraceback("")])
    for base in kind.__mro__:
        if "__new__" not in vars(base):
            continue
        try:
            error: BaseException = base.__new__(kind, *args)
        except TypeError:
            # Of several built-in bases (`MemoryError` is one) only one may make this class.
            continue
        error.args = args
        return error
    raise TypeError(f"no base of {kind.__qualname__} makes it of {len(args)} arguments")


class _CauseLink:
    """An exception's cause or context: itself in a copy, and by `dumps` in a pickle."""

    def __init__(self, previous: BaseException | None, *, is_cause: bool, suppresses: bool) -> None:
        self._previous = previous
        self._is_cause = is_cause
        self._suppresses = suppresses

    def tie(self, error: BaseException) -> None:
        """Give the exception its cause or context."""
        if self._is_cause:
            error.__cause__ = self._previous
        else:
            error.__context__ = self._previous
        error.__suppress_context__ = self._suppresses

    def __reduce__(self) -> tuple[Any, ...]:
        pickled = None if self._previous is None else dumps(self._previous)
        return _arrived_link, (pickled, self._is_cause, self._suppresses)


def _arrived_link(pickled: bytes | None, is_cause: bool, suppresses: bool) -> _CauseLink:
    previous = None if pickled is None else _arrived(pickled)[0]
    return _CauseLink(previous, is_cause=is_cause, suppresses=suppresses)


class _Companions:
    """A dictionary of exceptions in an attribute of another one, their owner, or with it."""

    def __init__(self, owner: BaseException | None, errors: dict[Any, BaseException]) -> None:
        self._owner = owner
        self._errors = errors

    def for_owner(self, owner: BaseException) -> dict[Any, BaseException]:
        """The dictionary, with its new owner where the old one was."""
        return {
            key: owner if error is self._owner else error for key, error in self._errors.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        pickled = {
            key: None if error is self._owner else dumps(error)
            for key, error in self._errors.items()
        }
        return _arrived_companions, (pickled,)


def _arrived_companions(pickled: dict[Any, bytes | None]) -> _Companions:
    owner = RemoteTraceback("")
    return _Companions(
        owner, {key: owner if one is None else _arrived(one)[0] for key, one in pickled.items()}
    )


class _Alone:
    """Pickles as an exception without calling its class, without what it was caused by."""

    def __init__(self, error: BaseException, *, only_what_travels: bool = False) -> None:
        args = (error.message,) if isinstance(error, BaseExceptionGroup) else error.args
        attributes = _attributes_of(error)
        if only_what_travels:
            args = tuple(filter(_travels, args))
            attributes = {name: value for name, value in attributes.items() if _travels(value)}
        self._parts = (type(error), args, attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, self._parts


def _remade(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    error = made_without_calling(kind, args)
    _set_attributes(error, attributes)
    return error


def _attributes_of(error: BaseException) -> dict[str, Any]:
    return {
        name: _Companions(error, value) if _holds_exceptions(value) else value
        for name, value in vars(error).items()
    }


def _set_attributes(error: BaseException, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        is_ours = isinstance(value, _Companions)
        error.__dict__[name] = value.for_owner(error) if is_ours else value


def _holds_exceptions(value: object) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(one, BaseException) for one in value.values())
    )


def _chain_of(error: BaseException) -> list[BaseException]:
    """The exception, all that it was caused by, and all members of groups; each once."""
    chain: list[BaseException] = []
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        chain.append(one)
        waiting += _members_of(one)
        if (previous := previous_of(one)) is not None:
            waiting.append(previous)
    return chain


def _members_of(error: BaseException) -> tuple[BaseException, ...]:
    return error.exceptions if isinstance(error, BaseExceptionGroup) else ()


def _pickled_alone(error: BaseException) -> bytes:
    for way in _ways(error):
        try:
            pickled = way()
            if isinstance(pickle.loads(pickled), BaseException):  # noqa: S301  # just written
                return pickled
        except Exception:  # noqa: BLE001, S112  # the next way, or none: then the text is told
            continue
    return b""


def _ways(error: BaseException) -> Iterator[Callable[[], bytes]]:
    is_ours = type(error).__reduce__ is PicklableError.__reduce__
    is_remade = is_ours or isinstance(error, BaseExceptionGroup)
    yield lambda: pickle.dumps(_Alone(error) if is_remade else error)
    yield lambda: _by_value(_Alone(error) if is_remade else error)
    # A class with a `__reduce__` of its own has decided how it is made.
    if is_remade or type(error).__reduce__ is BaseException.__reduce__:
        yield lambda: _by_value(_Alone(error, only_what_travels=True))


def _by_value(thing: object) -> bytes:
    # Only a failure pays for importing it, and cloudpickle may be what fails.
    from rankwise.base.value_pickle import dumps_by_value  # noqa: PLC0415

    return dumps_by_value(thing)


def _travels(thing: object) -> bool:
    try:
        pickle.loads(_by_value(thing))  # noqa: S301  # just written
    except Exception:  # noqa: BLE001  # whatever a foreign class does when it is pickled
        return False
    return True


def _arrived(pickled: bytes) -> tuple[BaseException, bool]:
    """The exception and True; or its text, as an exception, and False."""
    parts: list[_ChainPart] = pickle.loads(pickled)  # noqa: S301  # from a process of ours
    made: dict[int, BaseException] = {}
    lost: set[int] = set()
    for number in range(len(parts)):
        _make(number, parts, made, lost)
    for number, part in enumerate(parts):
        previous = None if part.previous is None else made[part.previous]
        _CauseLink(previous, is_cause=part.is_cause, suppresses=part.suppresses).tie(made[number])
    return made[0], 0 not in lost


def _make(
    number: int, parts: list[_ChainPart], made: dict[int, BaseException], lost: set[int]
) -> BaseException:
    """Make one of the exceptions, after its members if it is a group."""
    if number not in made:
        part = parts[number]
        members = [_make(member, parts, made, lost) for member in part.members]
        try:
            made[number] = _made_alone(part, members)
        except Exception:  # noqa: BLE001  # whatever a foreign class does when it is rebuilt
            lost.add(number)
            made[number] = RemoteTraceback(part.text)
    return made[number]


def _made_alone(part: _ChainPart, members: list[BaseException]) -> BaseException:
    error: BaseException = pickle.loads(part.pickled)  # noqa: S301  # from a process of ours
    if members:
        assert isinstance(error, BaseExceptionGroup), "nothing else has members"
        error = _with_members(error, members)
    if part.notes and not hasattr(error, "__notes__"):
        error.__notes__ = list(part.notes)
    return error


def _with_members(
    group: BaseExceptionGroup[BaseException], members: list[BaseException]
) -> BaseException:
    whole = BaseExceptionGroup.__new__(type(group), group.message, members)
    whole.__dict__.update(vars(group))
    return whole
