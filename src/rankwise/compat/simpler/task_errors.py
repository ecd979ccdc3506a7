"""Exceptions of tasks that are `RuntimeError`s too, with the text that programs look for."""

from typing import Any

_PREFIXES = {"sub": "sub_worker", "chip": "chip_process", "worker": "child_worker"}


def task_error(error: Exception, place: str) -> Exception:
    """The same exception of the same class, which is also a `RuntimeError`.

    Its text says where it comes from: `sub_worker: ValueError: no such thing`.

    Args:
        error: what a task has raised.
        place: where it ran, as `TaskFailure.child` says it: `sub 0`.
    """
    # A name of two words, public in `TaskFailure.child`, and no sentence.
    kind, number, *_ = [*place.split(), ""]
    where = f"{_PREFIXES.get(kind, kind)} {number}".strip()
    return with_text(error, f"{where}: {type(error).__name__}: {error}")


def with_text(error: Exception, text: str) -> Exception:
    """An exception like this one that says `text`, and is a `RuntimeError`."""
    try:
        kind = _also_runtime_error(type(error))
        made: Any = kind.__new__(kind, *error.args)
    except TypeError:  # its class has no place for another base, or wants other arguments
        made = RuntimeError(text)
    else:
        made.args = error.args
        made.__dict__.update(vars(error), original=error, text=text)
    made.__cause__ = error.__cause__
    return made  # type: ignore[no-any-return]  # it is one of a class made here


def _also_runtime_error(kind: type[Exception]) -> type[Exception]:
    bases = (kind,) if issubclass(kind, RuntimeError) else (kind, RuntimeError)
    methods = {
        "__module__": kind.__module__,
        "__str__": lambda self: self.text,
        "__reduce__": lambda self: (with_text, (self.original, self.text)),
    }
    return type(kind.__name__, bases, methods)
