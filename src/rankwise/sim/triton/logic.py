"""`and`, `or` and `not` of blocks, and numbers in variables, as Triton's compiler takes them.

A number that a kernel assigns to a variable is from then on a tensor of its own type, int32 or
float32 as a rule, and is promoted as one: `half * 0.1` is fp16, and `scale = 0.1; half * scale` is
fp32. It stays a number where the variable is annotated with `tl.constexpr`.

Likewise `a < b < c` is a comparison of each element, `assert` is `device_assert` for blocks, and
`N.value` of a compile-time parameter is the plain value that it is here. A block's shape equals a
list of the same sizes, as in Triton; Python's tuples and lists never are equal.

Python decides by the truth of the left side, and a block has none. Triton means the operation of
each element, also in the condition of an `if` or a `while`, and short-circuits compile-time values
only. So a kernel that uses these words is compiled again with calls in their places.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from tokenize import TokenError
from types import CodeType, FunctionType
from typing import Any

from rankwise.sim.triton import flow
from rankwise.sim.triton.constants import plain
from rankwise.sim.triton.debug import StaticAssertion, device_assert
from rankwise.sim.triton.execution import KernelTypeError, place
from rankwise.sim.triton.flow import check_flow
from rankwise.sim.triton.tensor import tensor, to_tensor

_AND, _OR, _NOT = "__rankwise_and", "__rankwise_or", "__rankwise_not"
_EQUAL, _VALUE, _ASSERT = "__rankwise_equal", "__rankwise_value", "__rankwise_assert"
_VARIABLE, _CHAIN, _NO_SYNTAX = "__rankwise_variable", "__rankwise_chain", "__rankwise_no_syntax"
_REFUSED: dict[type[ast.AST], str] = {
    ast.Try: "`try`", ast.TryStar: "`try`", ast.Delete: "`del`", ast.Global: "`global`",
    ast.Nonlocal: "`nonlocal`", ast.FunctionDef: "function inside of a kernel",
    ast.ClassDef: "class inside of a kernel", ast.Lambda: "`lambda`", ast.Dict: "dictionary",
    ast.DictComp: "dictionary", ast.Set: "set", ast.SetComp: "set", ast.GeneratorExp: "generator",
}  # fmt: skip
"""What Triton's front end refuses, where it comes by: not in a branch that no program takes."""


def _refused(node: ast.AST) -> str | None:
    if isinstance(node, ast.For | ast.While) and node.orelse:
        return "`else` of a loop"
    if isinstance(node, ast.Assign):
        if len(node.targets) > 1:
            return "assignment to several targets, as in `a = b = c`"
        if any(isinstance(each, ast.Starred) for each in ast.walk(node.targets[0])):
            return "`*` on the left of an assignment"
    return _REFUSED.get(type(node))


def _both(left: Any, right: Callable[[], Any]) -> Any:
    if not isinstance(left, tensor):
        return plain(left) and right()
    return _joined(left, right(), "and")


def _joined(left: tensor, right: Any, word: str) -> Any:
    """Both sides of `and` or `or`; a compile-time value decides, or leaves the other as it is."""
    right = plain(right)
    if not isinstance(right, tensor):
        return right if bool(right) is (word == "or") else left
    sides = _truth(left, word), _truth(right, word)
    return sides[0] & sides[1] if word == "and" else sides[0] | sides[1]


def _either(left: Any, right: Callable[[], Any]) -> Any:
    if not isinstance(left, tensor):
        return plain(left) or right()
    return _joined(left, right(), "or")


def _opposite(value: Any) -> Any:
    return ~_truth(value, "not") if isinstance(value, tensor) else not plain(value)


def _truth(value: Any, word: str) -> Any:
    value = to_tensor(value)
    if not value.dtype.is_bool():
        raise KernelTypeError(
            f"{place()}: `{word}` is for int1, not {value.dtype}", hint="compare it with 0 first"
        )
    return value


def _equal(left: Any, right: Any) -> Any:
    sequences = (list, tuple)
    if isinstance(left, sequences) and isinstance(right, sequences):
        return tuple(left) == tuple(right)
    return left == right


def _chain(left: Any, *links: tuple[Callable[[], Any], Callable[[Any, Any], Any]]) -> Any:
    """`a < b < c`: each side is evaluated once, and none behind what is known to fail."""
    result: Any = True
    for side, compare in links:
        if not isinstance(result, tensor) and not plain(result):
            break
        right = side()
        result = _both(result, partial(compare, left, right))
        left = right
    return result


def _value(holder: Any) -> Any:
    return getattr(holder, "value", holder)


def _assert(condition: Any, message: Any = "") -> None:
    if isinstance(condition, tensor):
        device_assert(condition, message)
    elif not plain(condition):
        raise StaticAssertion(
            f"{place()}: an assertion failed" + (f": {message}" if message else "")
        )


def _variable(value: Any) -> Any:
    """What a variable holds to which a kernel assigns a value."""
    value = plain(value)
    if isinstance(value, bool | int | float):
        return to_tensor(value)
    if isinstance(value, tuple):
        held = map(_variable, value)
        return type(value)(*held) if hasattr(value, "_fields") else tuple(held)
    return value


def _refuse(what: str) -> None:
    raise KernelTypeError(f"{place()}: Triton's compiler takes no {what}")


WORDS: dict[str, Any] = {
    _NO_SYNTAX: _refuse,
    _AND: _both,
    _OR: _either,
    _NOT: _opposite,
    _EQUAL: _equal,
    _CHAIN: _chain,
    _VALUE: _value,
    _ASSERT: _assert,
    _VARIABLE: _variable,
    **flow.WORDS,
}
"""What rewritten kernels call; among their builtins."""


class _Rewriting(ast.NodeTransformer):
    def __init__(self, *, takes_words: bool) -> None:
        self.has_changed = False
        self._takes_words = takes_words
        self._constants: set[str] = set()

    def visit(self, node: ast.AST) -> Any:
        what = _refused(node)
        if what is None:
            return super().visit(node)
        self.has_changed = True
        refusal = _call(_NO_SYNTAX, ast.Constant(value=what))
        replacement = ast.Expr(value=refusal) if isinstance(node, ast.stmt) else refusal
        return ast.copy_location(replacement, node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        (name, *others) = [each.id for each in node.targets if isinstance(each, ast.Name)] or [""]
        if name in self._constants and not others:
            self._constants.remove(name)
        else:
            node.value = self._held(node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """`N: tl.constexpr`, with a value or before it gets one, and what is none."""
        self.generic_visit(node)
        is_constant = "constexpr" in ast.unparse(node.annotation)
        if node.value is not None and not is_constant:
            node.value = self._held(node.value)
        elif is_constant and node.value is None and isinstance(node.target, ast.Name):
            self._constants.add(node.target.id)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        before = ast.Name(id=node.target.id, ctx=ast.Load())
        after = ast.BinOp(left=before, op=node.op, right=node.value)
        assignment = ast.Assign(targets=[node.target], value=self._held(after))
        return ast.copy_location(assignment, node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        self.generic_visit(node)
        node.value = self._held(node.value)
        return node

    def _held(self, value: ast.expr) -> ast.expr:
        if isinstance(value, ast.Constant) and not isinstance(value.value, int | float):
            return value
        self.has_changed = True
        return ast.copy_location(_call(_VARIABLE, value), value)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        super().generic_visit(node)
        sides = (node.left, *node.comparators)
        if len(sides) > 2 and self._takes_words:
            self.has_changed = True
            links = map(_link, node.ops, node.comparators)
            return ast.copy_location(_call(_CHAIN, node.left, *links), node)
        if not any(isinstance(side, ast.List) for side in sides) or len(sides) != 2:
            return node
        if not isinstance(node.ops[0], ast.Eq | ast.NotEq):
            return node
        self.has_changed = True
        result = _call(_EQUAL, *sides)
        if isinstance(node.ops[0], ast.NotEq):
            result = _call(_NOT, result)
        return ast.copy_location(result, node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if not self._takes_words:
            return node
        self.has_changed = True
        word = _AND if isinstance(node.op, ast.And) else _OR
        result = node.values[0]
        for each in node.values[1:]:
            result = _call(word, result, _function(each))
        return ast.copy_location(result, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        self.has_changed = True
        return ast.copy_location(_call(_NOT, node.operand), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`N.value` of a compile-time parameter, which is a plain value here."""
        self.generic_visit(node)
        if node.attr != "value" or not isinstance(node.ctx, ast.Load):
            return node
        self.has_changed = True
        return ast.copy_location(_call(_VALUE, node.value), node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """An assertion of blocks holds for each element."""
        self.generic_visit(node)
        self.has_changed = True
        given = [node.test] if node.msg is None else [node.test, node.msg]
        return ast.copy_location(ast.Expr(value=_call(_ASSERT, *given)), node)


def _call(word: str, *args: ast.expr) -> ast.expr:
    return ast.Call(func=ast.Name(id=word, ctx=ast.Load()), args=list(args), keywords=[])


def _function(body: ast.expr, *parameters: str) -> ast.Lambda:
    names = [ast.arg(arg=name) for name in parameters]
    given = ast.arguments(posonlyargs=[], args=names, kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(args=given, body=body)


def _link(operator: ast.cmpop, side: ast.expr) -> ast.expr:
    """The next side of a chain of comparisons, and how it is compared with the one before."""
    left, right = (ast.Name(id=name, ctx=ast.Load()) for name in ("left", "right"))
    compared = ast.Compare(left=left, ops=[operator], comparators=[right])
    compares = _function(compared, "left", "right")
    return ast.Tuple(elts=[_function(side), compares], ctx=ast.Load())


def rewritten(function: FunctionType) -> CodeType | None:
    """A kernel's code with calls instead of these words; None if it needs none, or has no source.

    Its free variables may be in another order.
    """
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TokenError):
        return None
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef):
        return None
    definition.decorator_list.clear()
    rewriting = _Rewriting(takes_words=not _names_within(definition))
    definition.body = [rewriting.visit(statement) for statement in definition.body]
    is_checked = check_flow(definition, function)
    if not (rewriting.has_changed or is_checked):
        return None
    names = function.__code__.co_freevars
    if names:
        tree.body = [_enclosing(definition, names)]
    ast.increment_lineno(ast.fix_missing_locations(tree), first - 1)
    code = compile(tree, function.__code__.co_filename, "exec")
    return next(each for each in _codes(code) if each.co_name == definition.name)


def _names_within(definition: ast.FunctionDef) -> bool:
    """Whether an expression assigns a name, which it could not do inside of a lambda."""
    return any(isinstance(node, ast.NamedExpr) for node in ast.walk(definition))


def _enclosing(definition: ast.FunctionDef, names: tuple[str, ...]) -> ast.FunctionDef:
    """A function whose variables have these names, so that they are free in the inner one."""
    outer = ast.parse(f"def enclosing({', '.join(names)}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [definition]
    return outer


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
