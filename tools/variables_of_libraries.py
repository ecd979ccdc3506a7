"""Lists the variables of libraries in which a simulated rank could leave something for another.

    python tools/variables_of_libraries.py                    what of installed torch has no verdict
    python tools/variables_of_libraries.py FOLDER...          the same of these packages
    python tools/variables_of_libraries.py --all FOLDER...    all that is found

An installed package is imported once for all ranks. So each of its caches, and each module-level or
class-level variable that its functions change, needs a verdict in
`docs/development/variables-of-libraries.md`. A table that no function of the package changes is a
constant, and is not listed.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "development" / "variables-of-libraries.md"
OF_TORCH = ("torch.distributed", "torch.utils.checkpoint", "torch.nn.parallel")
_CACHES = {"cache", "lru_cache"}
_CONTAINERS = {
    "ChainMap", "ContextVar", "Counter", "OrderedDict", "WeakIdKeyDictionary", "WeakKeyDictionary",
    "WeakSet", "WeakValueDictionary", "defaultdict", "deque", "dict", "list", "local", "set",
}  # fmt: skip
_CHANGING = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem",
    "popleft", "remove", "reverse", "set", "setdefault", "sort", "update",
}  # fmt: skip
_ROW = re.compile(r"\| `(?P<pattern>[^`]+)` \| (?P<verdict>[a-z ]+) \|")


class Variable(NamedTuple):
    """A variable, as `module:name`, and what kind it is."""

    place: str
    kind: str


def main(arguments: list[str]) -> int:
    """Print what is found; the exit code is 1 if something has no verdict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="also what has a verdict")
    parser.add_argument("folders", nargs="*", type=Path, help="packages; torch's without any")
    options = parser.parse_args(arguments)
    found = [each for folder in options.folders for each in variables_of(folder)]
    if not options.folders:
        found = variables_of_torch()
    patterns = verdicts()
    unjudged = [each for each in found if verdict_on(each, patterns) is None]
    for each in found if options.all else unjudged:
        print(f"{each.place}  ({each.kind})  {verdict_on(each, patterns) or 'no verdict'}")
    print(f"{len(found)} variables, {len(unjudged)} without a verdict", file=sys.stderr)
    return bool(unjudged)


def variables_of_torch() -> list[Variable]:
    """Those of the parts of the installed torch that know of ranks."""
    spec = find_spec("torch")
    assert spec is not None, "torch is installed"
    assert spec.origin is not None, "torch is no namespace"
    torch = Path(spec.origin).parent
    found: list[Variable] = []
    for name in OF_TORCH:
        package = name.rpartition(".")[0]
        path = torch.parent.joinpath(*name.split("."))
        found += variables_of(path if path.is_dir() else path.with_suffix(".py"), package)
    return found


def variables_of(path: Path, package: str = "") -> list[Variable]:
    """The variables of a package or a file; `package` is what contains the folder, if anything."""
    root = path.parent
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    trees = {}
    for file in files:
        parts = [*package.split("."), *file.relative_to(root).with_suffix("").parts]
        name = ".".join(part for part in parts if part and part != "__init__")
        trees[name] = ast.parse(file.read_text(encoding="utf-8"))
    changed = {name for tree in trees.values() for name in _changed_in(tree)}
    found = {
        each for module, tree in trees.items() for each in _variables_in(module, tree, changed)
    }
    return sorted(found)


def verdicts() -> dict[str, str]:
    """The page's verdicts, by the pattern of the variables that they are on."""
    rows = map(_ROW.match, PAGE.read_text(encoding="utf-8").splitlines())
    return {row["pattern"]: row["verdict"] for row in rows if row is not None}


def verdict_on(variable: Variable, patterns: dict[str, str]) -> str | None:
    """The verdict on a variable; None if it has none yet."""
    return next(
        (verdict for pattern, verdict in patterns.items() if fnmatchcase(variable.place, pattern)),
        None,
    )


def _variables_in(module: str, tree: ast.Module, changed: set[str]) -> Iterator[Variable]:
    """A module's own variables that keep something from one call to the next."""
    own = _bound_in(tree)
    for node, prefix in _statements(tree):
        targets, value = _assignment(node)
        for name in targets:
            if name == "__all__" or not isinstance(value, ast.expr):
                continue
            if _is_container(value) and name in changed:
                yield Variable(f"{module}:{prefix}{name}", "container")
    for part in ast.walk(tree):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            if _CACHES.intersection(map(_last, part.decorator_list)):
                yield Variable(f"{module}:{part.name}", "cached function")
            yield from _changes(module, part, own)
        elif isinstance(part, ast.Call) and _last(part.func) in _CACHES and _is_made_here(part):
            yield Variable(f"{module}:{ast.unparse(part.args[0])}", "cached function")


def _is_made_here(call: ast.Call) -> bool:
    """Whether a call caches a function: `lru_cache(f)`, `lru_cache(None)(f)` is its outer one."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Name | ast.Attribute)


def _changes(
    module: str, function: ast.FunctionDef | ast.AsyncFunctionDef, own: set[str]
) -> Iterator[Variable]:
    """What a function assigns: names that it declares global, and attributes of what is global."""
    told = {
        name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names
    }
    assigned = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    local = {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
    local |= assigned - told
    for name in sorted(told & assigned):
        yield Variable(f"{module}:{name}", "global")
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            path = ast.unparse(node)
            root = path.partition(".")[0]
            if root in own and root not in local and re.fullmatch(r"[\w.]+", path):
                yield Variable(f"{module}:{path}", "attribute")


def _changed_in(tree: ast.Module) -> Iterator[str]:
    """The last parts of the names that are changed in place, by any function of the package."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                yield _last(node.value)
            elif isinstance(node, ast.AugAssign):
                yield _last(node.target)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _CHANGING
            ):
                yield _last(node.func.value)
            elif isinstance(node, ast.Global):
                yield from node.names
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr


def _statements(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """The statements that an import executes, those in classes too, and the class's name."""
    waiting: list[tuple[ast.stmt, str]] = [(each, "") for each in tree.body]
    while waiting:
        node, prefix = waiting.pop()
        yield node, prefix
        if isinstance(node, ast.ClassDef):
            waiting += [(each, f"{prefix}{node.name}.") for each in node.body]
        elif isinstance(node, ast.If | ast.Try | ast.With):
            blocks = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
            waiting += [(each, prefix) for block in blocks for each in block]


def _bound_in(tree: ast.Module) -> set[str]:
    """The names that the import of a module binds."""
    names: set[str] = set()
    for node, prefix in _statements(tree):
        if prefix:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        else:
            names |= set(_assignment(node)[0])
    return names


def _assignment(node: ast.stmt) -> tuple[list[str], ast.expr | None]:
    if isinstance(node, ast.Assign):
        return [each.id for each in node.targets if isinstance(each, ast.Name)], node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id], node.value
    return [], None


def _is_container(value: ast.expr) -> bool:
    literals = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    return isinstance(value, literals) or (
        isinstance(value, ast.Call) and _last(value.func) in _CONTAINERS
    )


def _last(node: ast.expr) -> str:
    """The last part of a name, whatever it is called with."""
    if isinstance(node, ast.Call):
        return _last(node.func)
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
