"""Operators that a program defines: torch's dispatcher has them once, and each rank has its own.

Each simulated rank defines the operators of its program, and its functions know its own globals. So
the first rank that defines an operator has it made; what the dispatcher calls looks for the
function of the rank that runs. They end with the world. Operators of installed packages, which are
imported once, and changes of torch's operators are passed on.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._library import custom_ops
from torch.library import fallthrough_kernel

from rankwise.simranks.world.places import owner_of
from rankwise.simranks.world.ranks import Rank
from rankwise.simranks.world.world import rank_of_thread

_make_library = torch._C._dispatch_library  # noqa: SLF001  # see `hooks`
_INTERFACE = (
    torch.library.__file__, custom_ops.__file__.rpartition("/")[0],
    contextlib.__file__, functools.__file__,
)  # fmt: skip
"""Files through which a program defines operators."""


class CustomOperators:
    """What the ranks of a world have defined.

    Args:
        is_of_ranks: whether each rank imports an installed module of this name for itself.

    Attributes:
        definers: by the name of an operator.
        kernels: by name and dispatch key: each rank's function, by the number of the rank, which a
            process that it forks has, too.
    """

    def __init__(self, is_of_ranks: Callable[[str], bool]) -> None:
        self._is_of_ranks = is_of_ranks
        self._libraries: dict[str, Any] = {}
        self.definers: dict[str, set[Rank]] = {}
        self.kernels: dict[tuple[str, str], dict[int, Callable[..., Any]]] = {}

    def library(self, namespace: str) -> Any:
        """The one of the dispatcher in which all ranks define operators of a namespace."""
        found = self._libraries.get(namespace)
        if found is None:
            found = _make_library("FRAGMENT", namespace, "", __file__, 1)
            self._libraries[namespace] = found
        return found

    def close(self) -> None:
        """Take the operators out of the dispatcher."""
        for library in self._libraries.values():
            library.reset()
        torch.library._clear_torch_ops_cache(set(self.definers))  # noqa: SLF001  # as it does itself

    def make_library(self, kind: str, namespace: str, key: str, file: str, line: int) -> Any:
        """Replace `torch._C._dispatch_library`."""
        rank = rank_of_thread()
        if rank is None or not self._is_called_by_program(sys._getframe(1)):  # noqa: SLF001  # whose it is
            return _make_library(kind, namespace, key, file, line)
        return _LibraryOfRank(self, rank, (kind, namespace, key, file, line))

    def _is_called_by_program(self, frame: FrameType | None) -> bool:
        """Whether the innermost frame that is none of the interface's is of a module of ranks."""
        while frame is not None:
            file = frame.f_code.co_filename
            owner = owner_of(file)
            if owner != "rankwise" and not file.startswith(_INTERFACE):
                return owner == "user" or self._is_of_ranks(str(frame.f_globals.get("__name__")))
            frame = frame.f_back
        return False


class _LibraryOfRank:
    """What one rank defines in a namespace; it has the methods of the dispatcher's libraries."""

    def __init__(self, operators: CustomOperators, rank: Rank, words: tuple[Any, ...]) -> None:
        self._operators = operators
        self._rank = rank
        self._words = words
        self._namespace = words[1]
        self._of_others: Any = None

    def define(self, schema: str, alias_analysis: str = "", tags: Any = ()) -> str:
        """Define an operator, if no other rank has."""
        name = schema.partition("(")[0]
        definers = self._operators.definers.setdefault(f"{self._namespace}::{name}", set())
        if not definers or self._rank in definers:  # which is refused
            self._operators.library(self._namespace).define(schema, alias_analysis, tags)
        definers.add(self._rank)
        return name

    def impl(
        self, name: str, key: str, function: Callable[..., Any], with_keyset: bool = False
    ) -> None:
        """Have this rank compute an operator by a function."""
        operator = f"{self._namespace}::{name.rpartition('::')[2]}"
        if operator not in self._operators.definers or function is fallthrough_kernel:
            self._library_of_others().impl(name, key, function, with_keyset)
            return
        kernels = self._operators.kernels.setdefault((operator, key), {})
        is_first = not kernels
        kernels[self._rank.number] = function
        if is_first:

            def call(*args: Any, **kwargs: Any) -> Any:
                number = (rank_of_thread() or self._rank).number
                if number not in kernels:
                    raise NotImplementedError(
                        f"rank {number} has not defined {operator} for {key!r}"
                    )
                return kernels[number](*args, **kwargs)

            library = self._operators.library(self._namespace)
            library.impl(name, key, call, with_keyset)

    def register_ad_inplace_or_view_fallback(self, name: str) -> None:
        """Have torch count the versions of what an operator changes, if it does not yet."""
        kernels = self._operators.kernels.setdefault((f"{self._namespace}::{name}", "versions"), {})
        if not kernels:
            library = self._operators.library(self._namespace)
            library.register_ad_inplace_or_view_fallback(name)
        kernels[self._rank.number] = fallthrough_kernel

    def reset(self) -> None:
        """The rank has no use for it any more; other ranks may have."""
        if self._of_others is not None:
            self._of_others.reset()

    def __getattr__(self, name: str) -> Any:
        """What else a library has."""
        return getattr(self._library_of_others(), name)

    def _library_of_others(self) -> Any:
        """One that the dispatcher takes for this rank's alone, to change what others define."""
        if self._of_others is None:
            _, namespace, key, file, line = self._words
            self._of_others = _make_library("IMPL", namespace, key, file, line)
        return self._of_others


class TableByRank(dict[Any, Any]):
    """A table of which each rank sees its own entries, and those of the process."""

    def __init__(self, home: Any) -> None:
        super().__init__()
        self._home = home

    def __contains__(self, key: Any) -> bool:
        return super().__contains__((rank_of_thread(), key)) or key in self._home

    def __getitem__(self, key: Any) -> Any:
        return super().get((rank_of_thread(), key)) or self._home[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__((rank_of_thread(), key), value)

    def __delitem__(self, key: Any) -> None:
        self.pop((rank_of_thread(), key), None)


TABLES = ("OPDEFS", "OPDEF_TO_LIB")
"""Where `torch._library.custom_ops` has the operators that Python programs have defined."""
