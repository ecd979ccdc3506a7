"""Control flow that Triton's compiler refuses, though Python would run it.

In Triton a variable has one type. A loop must leave the type of what it carries, the sides of an
`if` must agree, and a name that one side or a loop alone defines ends with it. Code that is decided
at compile time is exempt: an `if` of constants, `static_range`. Which `if` that is shows at run
time, by what its condition holds; so calls are put into the kernel's syntax tree:

- before a loop, the types of what it carries are noted, and compared once, after the first turn;
- the condition of an `if` goes through `_decided`, which reads the types of both sides
  (`inferring`); behind it, those of the side that has run are compared;
- behind an `if` and a loop, the names that end with it are deleted, if others read them.

`return` in a loop, and `break` and `continue` anywhere, are refused where they are reached, or with
the `if` around them.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NoReturn, TypeVar

from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.execution import KernelTypeError, place
from rankwise.sim.triton.inferring import Reading, TypeOf, type_of
from rankwise.sim.triton.tensor import tensor

_IF, _JOIN, _TERNARY = "__rankwise_if", "__rankwise_join", "__rankwise_ternary"
_TYPES, _BACK_EDGE, _REFUSE = "__rankwise_types", "__rankwise_back_edge", "__rankwise_refuse"
HIDDEN = "__rankwise_flow"
"""How variables begin that hold what is compared."""

_Types = tuple[TypeOf | None, ...]
_Node = TypeVar("_Node", bound=ast.AST)


@dataclass
class _Site:
    """An `if`, a ternary or a loop.

    Attributes:
        names: whose values its call is given.
        compared: whose types are compared behind it.
        sides: what is read for the types of both sides.
        refused: a statement in it that cannot be there, if what decides is known at run time.
        seen: by the types of `names`, those of `compared` after either side.
    """

    function: FunctionType
    names: tuple[str, ...]
    compared: tuple[str, ...]
    sides: tuple[list[ast.stmt], list[ast.stmt]] | tuple[ast.expr, ast.expr] | None = None
    refused: str = ""
    seen: dict[Any, tuple[_Types, _Types]] = field(default_factory=dict)


_SITES: list[_Site] = []
"""All there are; code names them by their numbers, as a tree holds nothing but literals."""


def _types(values: tuple[Any, ...]) -> _Types:
    return tuple(type_of(each) if isinstance(plain(each), tensor) else None for each in values)


def _shown(type_: TypeOf) -> str:
    return f"{type_[0]}{list(type_[1])}" if type_[1] else type_[0]


def _differ(one: TypeOf | None, other: TypeOf | None) -> bool:
    return one is not None and other is not None and one != other


def _refuse(what: str) -> NoReturn:
    raise KernelTypeError(
        f"{place()}: Triton has no {what}", hint="put the condition around what follows"
    )


def _key(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, tensor):
        return value.dtype.name, value.shape
    return (type(value), value if isinstance(value, bool | int | float | str) else None)


def _decided(condition: Any, number: int, values: tuple[Any, ...]) -> tuple[bool, _Types | None]:
    """Whether the condition holds; and types before, if what decides is known at run time only."""
    if not isinstance(plain(condition), tensor):
        return bool(plain(condition)), None
    site = _SITES[number]
    if site.refused:
        _refuse(site.refused)
    held = dict(zip(site.names, values, strict=True))
    key = tuple(map(_key, values))
    if key not in site.seen:
        sides = _read_sides(site, held)
        for name, mine, theirs in zip(site.compared, *sides, strict=True):
            before = type_of(held[name]) if isinstance(plain(held.get(name)), tensor) else None
            for side, found in (("then", mine), ("else", theirs)):
                if _differ(before, found):
                    _refuse_types(name, before, found, f"the {side} side of this `if` makes it")
            if _differ(mine, theirs):
                _refuse_types(name, mine, theirs, "after the other side of this `if` it is")
        site.seen[key] = sides  # only what is right: a launch that was refused is made again
    return bool(condition), _types(tuple(held.get(name) for name in site.compared))


def _read_sides(site: _Site, held: Mapping[str, Any]) -> tuple[_Types, _Types]:
    others = _namespace(site.function)
    sides = []
    for side in site.sides or ():
        assert isinstance(side, list)
        after = Reading(held, others).after(side)
        sides.append(tuple(after.get(name) for name in site.compared))
    first, second = sides
    return first, second


def _namespace(function: FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = dict(function.__globals__)
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    return found


def _refuse_types(name: str, first: Any, second: Any, words: str) -> NoReturn:
    raise KernelTypeError(
        f"{place()}: `{name}` is {_shown(first)}, and {words} {_shown(second)}: a variable has one "
        "type in Triton",
        hint="cast one with .to(...), or decide by a tl.constexpr",
    )


def _join(number: int, before: _Types, *, holds: bool, values: tuple[Any, ...]) -> None:
    """Compare what the side that has run has left with what was there, and the other side."""
    site = _SITES[number]
    now = _types(values)
    if now == before:
        return
    for name, old, new in zip(site.compared, before, now, strict=True):
        if _differ(old, new):
            side = "then" if holds else "else"
            _refuse_types(name, old, new, f"the {side} side of this `if` makes it")


def _ternary(condition: Any, number: int, values: tuple[Any, ...]) -> bool:
    if isinstance(plain(condition), tensor):
        site = _SITES[number]
        key = tuple(map(_key, values))
        if key not in site.seen:
            held = dict(zip(site.names, values, strict=True))
            assert site.sides is not None
            one, other = (
                Reading(held, _namespace(site.function)).of(each)  # type: ignore[arg-type]
                for each in site.sides
            )
            if _differ(one, other):
                raise KernelTypeError(
                    f"{place()}: one side of `... if ... else ...` is {_shown(one)}, the other "  # type: ignore[arg-type]
                    f"{_shown(other)}: Triton takes one type",  # type: ignore[arg-type]
                    hint="use tl.where, or cast one with .to(...)",
                )
            site.seen[key] = ((), ())
    return bool(plain(condition))


def _back_edge(number: int, before: _Types, values: tuple[Any, ...]) -> tuple[()]:
    """Compare what the first turn of a loop has left with what was there before it."""
    now = _types(values)
    if now != before:
        for name, old, new in zip(_SITES[number].compared, before, now, strict=True):
            if _differ(old, new):
                _refuse_types(name, old, new, "a turn of this loop makes it")
    return ()


WORDS: dict[str, Any] = {
    _IF: _decided,
    _JOIN: lambda number, entry, values: _join(number, entry[1], holds=entry[0], values=values),
    _TERNARY: _ternary,
    _TYPES: _types,
    _BACK_EDGE: _back_edge,
    _REFUSE: _refuse,
}
"""What kernels call that were changed here; among their builtins."""


def check_flow(definition: ast.FunctionDef, function: FunctionType) -> bool:
    """Put the calls into a kernel's tree; whether it has changed."""
    flow = _Flow(definition, function)
    given = definition.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    bound = {each.arg for each in (*parameters, given.vararg, given.kwarg) if each is not None}
    definition.body = flow.statements(definition.body, bound, set(), in_loop=False)
    return flow.has_changed


class _Flow:
    def __init__(self, definition: ast.FunctionDef, function: FunctionType) -> None:
        self.has_changed = False
        self._function = function
        self._reads = list(_names(definition, ast.Load))
        self._constants = {
            node.target.id
            for node in ast.walk(definition)
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and "constexpr" in ast.unparse(node.annotation)
        }
        self._maybe: set[str] = set()

    def statements(
        self, body: list[ast.stmt], bound: set[str], repeated: set[str], *, in_loop: bool
    ) -> list[ast.stmt]:
        """The statements with calls between them.

        Args:
            body: the statements.
            bound: names that have a value before them; those that have one after are added.
            repeated: names that may have one from an earlier turn of an unrolled loop.
            in_loop: whether they are in a loop that is not unrolled.
        """
        found: list[ast.stmt] = []
        for node in body:
            match node:
                case ast.If():
                    found += self._if(node, bound, repeated, in_loop=in_loop)
                case ast.For() | ast.While():
                    found += self._loop(node, bound, repeated, in_loop=in_loop)
                case ast.Break() | ast.Continue():
                    word = "break" if isinstance(node, ast.Break) else "continue"
                    found += [self._said(f"`{word}`", node), node]
                case ast.Return() if in_loop:
                    found += [self._said(_RETURN, node), node]
                case ast.With():
                    node.body = self.statements(node.body, bound, repeated, in_loop=in_loop)
                    found.append(node)
                case _:
                    found.append(_Ternaries(self, bound).visit(node))
                    bound |= self._stored(node)
            self._maybe |= set(_names(node, ast.Store))
        return found

    def _if(
        self, node: ast.If, bound: set[str], repeated: set[str], *, in_loop: bool
    ) -> list[ast.stmt]:
        node.test = _Ternaries(self, bound).visit(node.test)
        written = [set().union(*map(self._stored, side)) for side in (node.body, node.orelse)]
        alone = (written[0] ^ written[1]) - bound - self._maybe - repeated
        alone = {name for name in alone if self._is_read_outside(name, node)}
        sides = (list(node.body), list(node.orelse))
        reads = {*_names(node, ast.Load), *written[0], *written[1]}
        refused = _refused_in(node, in_loop=in_loop)
        bounds = [set(bound), set(bound)]
        before = set(self._maybe)
        node.body = self.statements(node.body, bounds[0], repeated, in_loop=in_loop)
        self._maybe = before | {name for name in self._maybe if name in written[0]}
        node.orelse = self.statements(node.orelse, bounds[1], repeated, in_loop=in_loop)
        after = bounds[0] & bounds[1]
        compared = sorted(((written[0] | written[1]) & bound) | (after - bound))
        names = tuple(sorted(reads & bound))
        bound |= after
        if not (compared or alone or refused):
            return [node]
        number = self._site(names, tuple(compared), sides, refused)
        entry = f"{HIDDEN}{number}"
        decided = _call(_IF, node.test, ast.Constant(value=number), _tuple(names))
        node.test = _part(entry, 0)
        found = [_assigned(entry, decided), node]
        behind: list[ast.stmt] = []
        if compared:
            given = (ast.Constant(value=number), _name(entry), _tuple(compared))
            behind.append(ast.Expr(value=_call(_JOIN, *given)))
        behind += _ended(sorted(alone))
        if behind:
            test = ast.Compare(
                left=_part(entry, 1), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]
            )
            found.append(ast.If(test=test, body=behind, orelse=[]))
        return [_placed(each, node) for each in found]

    def _loop(
        self, node: ast.For | ast.While, bound: set[str], repeated: set[str], *, in_loop: bool
    ) -> list[ast.stmt]:
        stored = set().union(*map(self._stored, node.body))
        target = set(_names(node.target, ast.Store)) if isinstance(node, ast.For) else set()
        if isinstance(node, ast.For) and not _counts_at_run_time(node.iter):
            node.body = self.statements(
                node.body, bound | target, repeated | stored, in_loop=in_loop
            )
            return [node]
        carried = sorted(stored & bound - target)
        ended = sorted(
            name
            for name in stored - bound - target - self._maybe - repeated
            if self._is_read_outside(name, node)
        )
        if isinstance(node, ast.While):
            node.test = _Ternaries(self, bound).visit(node.test)
        node.body = self.statements(node.body, bound | target, set(), in_loop=True)
        found: list[ast.stmt] = [node]
        if carried:
            number = self._site((), tuple(carried), None, "")
            entry = f"{HIDDEN}{number}"
            found.insert(0, _assigned(entry, _call(_TYPES, _tuple(carried))))
            compare = _call(_BACK_EDGE, ast.Constant(value=number), _name(entry), _tuple(carried))
            node.body.append(
                _placed(
                    ast.If(test=_name(entry), body=[_assigned(entry, compare)], orelse=[]),
                    node.body[-1],
                )
            )
        if ended:
            self.has_changed = True
        found += _ended(ended)
        return [_placed(each, node) for each in found]

    def ternary(self, node: ast.IfExp, bound: set[str]) -> None:
        """Let the condition of `a if condition else b` compare their types."""
        names = tuple(sorted(set(_names(node.body, ast.Load)) | set(_names(node.orelse, ast.Load))))
        names = tuple(name for name in names if name in bound)
        number = self._site(names, (), (node.body, node.orelse), "")
        node.test = _placed(
            _call(_TERNARY, node.test, ast.Constant(value=number), _tuple(names)), node
        )

    def _site(
        self, names: tuple[str, ...], compared: tuple[str, ...], sides: Any, refused: str
    ) -> int:
        self.has_changed = True
        _SITES.append(_Site(self._function, names, compared, sides, refused))
        return len(_SITES) - 1

    def _said(self, what: str, node: ast.stmt) -> ast.stmt:
        self.has_changed = True
        return _placed(ast.Expr(value=_call(_REFUSE, ast.Constant(value=what))), node)

    def _stored(self, node: ast.AST) -> set[str]:
        return set(_names(node, ast.Store)) - self._constants

    def _is_read_outside(self, name: str, node: ast.AST) -> bool:
        return self._reads.count(name) > list(_names(node, ast.Load)).count(name)


_RETURN = "`return` in a loop"


class _Ternaries(ast.NodeTransformer):
    def __init__(self, flow: _Flow, bound: set[str]) -> None:
        self._flow, self._bound = flow, bound

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        self._flow.ternary(node, self._bound)
        return node


def _names(node: ast.AST, context: type[ast.expr_context]) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, context):
            yield each.id


def _refused_in(node: ast.If, *, in_loop: bool) -> str:
    """What cannot be in an `if` that programs decide."""
    if in_loop and any(isinstance(each, ast.Return) for each in ast.walk(node)):
        return _RETURN
    for each in (*node.body, *node.orelse):
        if isinstance(each, ast.Break | ast.Continue):
            return f"`{type(each).__name__.lower()}`"
    return ""


def _counts_at_run_time(iterated: ast.expr) -> bool:
    if not isinstance(iterated, ast.Call):
        return False
    called = iterated.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name == "range"


def _ended(names: list[str]) -> list[ast.stmt]:
    """Statements after which these names have no value, whether or not they had one."""
    found: list[ast.stmt] = []
    for name in names:
        found.append(_assigned(name, ast.Constant(value=None)))
        found.append(ast.Delete(targets=[ast.Name(id=name, ctx=ast.Del())]))
    return found


def _name(name: str) -> ast.expr:
    return ast.Name(id=name, ctx=ast.Load())


def _tuple(names: Any) -> ast.expr:
    return ast.Tuple(elts=[_name(name) for name in names], ctx=ast.Load())


def _part(name: str, at: int) -> ast.expr:
    return ast.Subscript(value=_name(name), slice=ast.Constant(value=at), ctx=ast.Load())


def _call(word: str, *args: ast.expr) -> ast.expr:
    return ast.Call(func=_name(word), args=list(args), keywords=[])


def _assigned(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=value)


def _placed(node: _Node, like: ast.AST) -> _Node:
    """The node and all in it that has no line, at the line of another one."""
    for each in ast.walk(node):
        if isinstance(each, ast.expr | ast.stmt) and not hasattr(each, "lineno"):
            ast.copy_location(each, like)
    return node
